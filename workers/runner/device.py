"""A rank's device: its index and memory, the memory that graphs and steps take, and refusal of steps for lack of it.

CUDA keeps the current device for each thread, initially device 0. Streams, events, collectives and launches use the
current device by default, not the device of their tensors, and a thread that only waits for an event would allocate
some hundred MB there. So every thread that calls CUDA first calls `use_device`.

The memory of steps is estimated as a number of bytes for each token and each row of logits. Running the largest step
measures how far the estimate is off on a device, with its kernels and allocator.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from oarlock.base.host_memory import free_host_bytes
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.pipeline_stage import PipelineStage, StepRefusedError
from oarlock.workers.distributed.shm_layout import Votes
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.protocol import LOGITS, NULL_BLOCK, StepMetadata, refusal
from oarlock.workers.runner.memory_needs import (
    MAX_LOGITS_ROWS,
    MemoryMeter,
    is_out_of_memory,
    largest_step_bytes,
    step_bytes,
)
from oarlock.workers.runner.pending_output import Launched
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step


def device_of(config: WorkerConfig, rank: int) -> torch.device:
    """Return the device of `rank`, its index among the replica's ranks on this host: its own GPU, a shared GPU, or the
    CPU."""
    if config.device != "cuda":
        return torch.device("cpu")
    place = config.first_on_host + rank
    return torch.device("cuda", place % torch.cuda.device_count() if config.share_device else place)


def use_device(config: WorkerConfig, rank: int) -> torch.device:
    """Make `device_of` the calling thread's CUDA device, and return it."""
    device = device_of(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class CudaMeter:
    """Meter of a CUDA device that counts the blocks of torch's caching allocator, which are larger than their
    tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_of(self, run: Callable[[], object]) -> int:
        """Return the most memory that `run` took.

        Memory that libraries allocate by themselves is not included: they keep it, which lowers `free_bytes` later.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device) - before
        torch.cuda.empty_cache()
        return peak


def meter_of(device: torch.device) -> MemoryMeter | None:
    """Return the meter of a CUDA device, or None for the CPU: other processes use its memory, so steps are
    estimated."""
    return CudaMeter(device) if device.type == "cuda" else None


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the memory of `device`."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


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


_KEPT_SHAPES = 4096


class StepMemory:
    """Bytes of steps on one rank."""

    def __init__(
        self, config: WorkerConfig, spec: DecoderSpec, measured: int | None = None, *, has_head: bool = True
    ) -> None:
        """Estimate the largest step.

        `measured`: bytes that `largest_step` took; the estimate is used if it is larger. `has_head`: whether this rank
        computes logits, as the ranks of the last pipeline stage do.
        """
        self._config, self._spec, self._has_head = config, spec, has_head
        self._estimate = largest_step_bytes(config, spec, has_head=has_head)
        self.largest = max(self._estimate, measured or 0)
        self._of_shape = lru_cache(_KEPT_SHAPES)(self._bytes)

    def of(self, step: StepMetadata) -> int:
        """Return the bytes of `step`: a proportional part of the largest step."""
        num_rows = len(step.logits_indices)
        if len(step.pool_kinds):
            num_rows += int((step.pool_kinds == LOGITS).sum())
        return self._of_shape(len(step.token_ids), num_rows)

    def _bytes(self, num_tokens: int, num_rows: int) -> int:
        estimate = step_bytes(self._config, self._spec, num_tokens, num_rows if self._has_head else 0)
        return -(-estimate * self.largest // self._estimate)


def largest_step(config: WorkerConfig) -> StepMetadata:
    """Return a step of `max_num_batched_tokens` tokens in the null block.

    It has as few sequences as possible, at the ends of full contexts, and the most rows of logits that are computed at
    once.
    """
    assert config.max_model_len is not None, "preflight resolves the context length"
    length, left = config.max_model_len, config.max_num_batched_tokens
    blocks = [NULL_BLOCK] * -(-length // config.block_size)
    chunks = []
    while left and len(chunks) < config.max_num_seqs:
        count = min(left, length)
        chunks.append(SequenceChunk([0] * count, length - count, blocks))
        left -= count
    num_tokens = config.max_num_batched_tokens - left
    return greedy_step(chunks, config.block_size, range(max(0, num_tokens - MAX_LOGITS_ROWS), num_tokens))


logger = logging.getLogger("oarlock.rank")


class StepGuard:
    """Guard of one rank's steps, which refuses steps for lack of memory. Every rank must get the same steps, in order.

    Ranks must refuse the same steps: if a rank left a step in the middle, the others would wait in a collective. So
    each rank reserves the memory of the step, and the ranks vote, before the first collective. A later failure is an
    error if there are several ranks; a single rank refuses the step. No result of a refused step is valid: the engine
    sends again everything that a rank may have written.

    Each pipeline stage decides by itself. It reports its refusals to the next stage, and drops the hidden states that
    the previous stage sends for a refused step, as the results of earlier stages are not valid either.
    """

    def __init__(
        self,
        needed: Callable[[StepMetadata], int],
        device: torch.device,
        votes: Votes | None,
        stage: PipelineStage | None = None,
    ) -> None:
        """Guard the steps of a rank.

        `needed`: bytes that a step takes in addition to the rank's memory; 0, on every rank, if it allocates nothing.
        `votes`: votes of the ranks of `stage` if there are several. `stage`: None if it is the only one.
        """
        self._stage = stage or PipelineStage.solo()
        self._needed = needed
        self._device = device
        self._votes = votes
        self._has_refused = False  # whether the last step was refused

    def run(self, step: StepMetadata, launch: Callable[[], Launched]) -> Launched:
        """Launch `step` and return its output, or a refusal if a rank lacks memory."""
        if not (step.is_ahead and self._has_refused):
            self._has_refused = not self._all_have_room(step)
        if self._has_refused:
            self._stage.drop(step.num_tokens)
        else:
            try:
                return launch()
            except StepRefusedError:
                self._has_refused = True
            except Exception as error:
                if self._votes is not None or self._stage.size > 1 or not is_out_of_memory(error):
                    raise
                self._refuse(step, error)
        self._stage.refuse(step.num_tokens)
        return refusal(step.step_id)

    def _all_have_room(self, step: StepMetadata) -> bool:
        size = self._needed(step)
        if size == 0:
            return True
        try:
            reserve(size, self._device)
            has_room = True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._refuse(step, error)
            has_room = False
        return has_room if self._votes is None else self._votes.all_agree(has_room)

    def _refuse(self, step: StepMetadata, error: Exception) -> None:
        self._has_refused = True
        logger.warning("event=step_refused step=%d tokens=%d cause=%r", step.step_id, step.num_tokens, str(error))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def reserve(size: int, device: torch.device) -> None:
    """Allocate `size` bytes in one piece and free them: CUDA's caching allocator keeps them for this process.

    Raises the allocator's error if there is not enough memory.
    """
    torch.empty(size, dtype=torch.uint8, device=device)
