"""Capture of a rank's graphs at start, after every kernel has been compiled, and the memory that they will take."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from oarlock.workers.attention.backend import AttentionBackend, CapturableBackend
from oarlock.workers.config import WorkerConfig
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.runner.buckets import graph_sizes, prompt_sizes
from oarlock.workers.runner.cuda_graphs import GraphMaker
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.kv_room import MemoryMeter
from oarlock.workers.runner.trial_steps import TrialMemory, null_step, with_adapters

logger = logging.getLogger("oarlock.runner")

Backends = Mapping[int, AttentionBackend]  # by the number of the group of pages


def warm_up_sizes(most: int) -> list[int]:
    """Return numbers of tokens, up to `most`, for which every variant of each kernel is compiled.

    Variants depend on powers of 2. One token has its own, because the stride of a single row is another.
    """
    return [*(size for size in (2**power for power in range(32)) if size < most), most]


def warm_up(execute: Callable[[StepMetadata], object], config: WorkerConfig, memory: TrialMemory) -> None:
    """Execute steps before graphs are captured, so that no kernel is compiled while requests wait. Every rank must call
    this at the same point."""
    assert config.max_model_len is not None
    for tokens in warm_up_sizes(min(config.max_num_batched_tokens, config.max_model_len)):
        step = null_step(tokens, tokens, 1, config.block_size, memory=memory)
        execute(step)
        if config.max_loras:
            execute(with_adapters(step))


def capture(steps: DeviceSteps, maker: GraphMaker, config: WorkerConfig, backends: Backends) -> int:
    """Capture the graphs of a rank if it can and may have graphs. Return their number."""
    reason, sizes, begun = _why_none(config, backends), graph_sizes(config), time.monotonic()
    if reason is not None:
        logger.info("event=no_graphs reason=%r", reason)
        return 0
    prompts = prompt_sizes(config)
    count = steps.capture(maker, sizes, prompts)
    seconds = time.monotonic() - begun
    logger.info(
        "event=graphs_captured count=%d largest=%d prompt_tokens=%d seconds=%.1f",
        count, sizes[-1], max(prompts, default=0), seconds,
    )  # fmt: skip
    return count


def bytes_of_graphs(
    steps: DeviceSteps, maker: GraphMaker, config: WorkerConfig, backends: Backends, meter: MemoryMeter
) -> int:
    """Return the bytes that `capture` will take from the device.

    Captures some graphs and destroys them, so every rank must call this at the same point.
    """
    if _why_none(config, backends) is not None:
        return 0
    kinds = [
        [partial(steps.capture, maker, (), [size]) for size in reversed(prompt_sizes(config))],
        [partial(steps.capture, maker, [size]) for size in reversed(graph_sizes(config))],
    ]
    return graph_bytes(kinds, steps.release, meter)


def graph_bytes(
    kinds: Sequence[Sequence[Callable[[], object]]], release: Callable[[], None], meter: MemoryMeter
) -> int:
    """Return the bytes of all graphs.

    `kinds`: for each kind of graph, functions that capture its graphs of one size, the largest first. `release`
    destroys all graphs. The free memory before `release` is compared with the free memory after it, so that memory
    which libraries allocate at first use and keep is not counted: it is in use already.

    The largest graphs allocate the pool, in which the others find memory for intermediate results. The additional
    memory of each size, for kernel arguments and its own tensors, is measured with the second largest; a smaller size
    takes no more. So two sizes of each kind are captured and destroyed.
    """
    free, others = 0, 0
    for captures in kinds:
        for place, capture in enumerate(captures[:2]):
            capture()
            before, free = free, meter.free_bytes()
            if place == 1:
                others += (len(captures) - 2) * max(0, before - free)
    release()
    return max(0, meter.free_bytes() - free) + others


def _why_none(config: WorkerConfig, backends: Backends) -> str | None:
    """Return the reason why a rank has no graphs, or None if it has."""
    if config.enforce_eager:
        return "--enforce-eager"
    for backend in backends.values():
        if not isinstance(backend, CapturableBackend):
            return f"attention backend {backend.name} reads lengths on the host"
    return None
