"""A rank's device: which it is, how much memory it has and graphs and steps take, and steps refused for lack of it.

CUDA keeps the current device for each thread, and begins with device 0. A stream, an event, a collective or a launch
means that one unless told otherwise, whatever device its tensors are on; and a thread that only waits for an event
would take some hundred MB there. So every thread that calls CUDA first calls `use_device`.

Memory of steps is estimated: so many bytes for each token and each row of logits. How far that is off on a device, with
its kernels and allocator, its largest step tells.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.pipeline_stage import PipelineStage, StepRefusedError
from oarlock.workers.distributed.shm_layout import Votes
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.platform.host_memory import free_host_bytes
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
    """The device of `rank`, its place among the replica's ranks of this host: its own GPU, one that it shares, or the
    CPU."""
    if config.device != "cuda":
        return torch.device("cpu")
    place = config.first_on_host + rank
    return torch.device("cuda", place % torch.cuda.device_count() if config.share_device else place)


def use_device(config: WorkerConfig, rank: int) -> torch.device:
    """Makes `device_of` the calling thread's CUDA device, and returns it."""
    device = device_of(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class CudaMeter:
    """A CUDA device, through torch's caching allocator: its blocks, which are larger than the tensors in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_of(self, run: Callable[[], object]) -> int:
        """Leaves out memory that libraries allocate by themselves: they keep it, which lowers `free_bytes` later."""
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
    """The meter of a CUDA device; None on the CPU, whose memory others use as well: steps are estimated there."""
    return CudaMeter(device) if device.type == "cuda" else None


def free_bytes(device: torch.device) -> int:
    """Free bytes of the memory of `device`."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def graph_bytes(
    kinds: Sequence[Sequence[Callable[[], object]]], release: Callable[[], None], meter: MemoryMeter
) -> int:
    """Bytes of all graphs. `kinds`: for each kind what captures its graphs of one size, the largest first. `release`
    destroys all.

    Compared with the device after `release`, so that what libraries load and keep at a first use is not counted: that
    is in use already.

    The largest graphs bring the pool, in which the others find room for what they compute. What each size takes beside
    it, for the kernels' arguments and its own tensors, the second largest tells: a smaller one takes no more. So two
    sizes of each kind are captured, and destroyed.
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
        """`measured`: what `largest_step` took; never taken to be less than the estimate. `has_head`: whether this rank
        computes logits, as those of the last pipeline stage do."""
        self._config, self._spec, self._has_head = config, spec, has_head
        self._estimate = largest_step_bytes(config, spec, has_head=has_head)
        self.largest = max(self._estimate, measured or 0)
        self._of_shape = lru_cache(_KEPT_SHAPES)(self._bytes)

    def of(self, step: StepMetadata) -> int:
        """Bytes of `step`: its part of the largest one."""
        num_rows = len(step.logits_indices)
        if len(step.pool_kinds):
            num_rows += int((step.pool_kinds == LOGITS).sum())
        return self._of_shape(len(step.token_ids), num_rows)

    def _bytes(self, num_tokens: int, num_rows: int) -> int:
        estimate = step_bytes(self._config, self._spec, num_tokens, num_rows if self._has_head else 0)
        return -(-estimate * self.largest // self._estimate)


def largest_step(config: WorkerConfig) -> StepMetadata:
    """A step of `max_num_batched_tokens` tokens, in the null block: as few sequences as can be, at the ends of full
    contexts, and as many rows of logits as are computed at once."""
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
    """Guard of one rank's steps. Every rank must be given the same steps, in order.

    Ranks must refuse the same steps: one that left a step in its middle would leave the others in a collective. So each
    reserves what the step needs, and they vote, before the first collective. A failure after that is an error where
    there are several ranks; one alone refuses the step all the same. Nothing of a refused step holds: the engine sends
    again whatever a rank may have written.

    Each stage of a pipeline decides for itself. It tells the stage after it what it refuses, and forgets what comes
    from the stage before for such a step: what earlier stages have computed of it does not hold either.
    """

    def __init__(
        self,
        needed: Callable[[StepMetadata], int],
        device: torch.device,
        votes: Votes | None,
        stage: PipelineStage | None = None,
    ) -> None:
        """`needed`: bytes that a step takes beside what the rank holds; 0 for one that allocates nothing, the same on
        every rank. `votes`: of the ranks of `stage`, where they are several. `stage`: None where it is the only one."""
        self._stage = stage or PipelineStage.solo()
        self._needed = needed
        self._device = device
        self._votes = votes
        self._has_refused = False  # the last step

    def run(self, step: StepMetadata, launch: Callable[[], Launched]) -> Launched:
        """Launches `step` and returns its output, or a refusal where a rank lacks the memory."""
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
    """Take `size` bytes in one piece and give them back: CUDA's allocator of this process keeps them for what follows.

    Raises what the allocator raises.
    """
    torch.empty(size, dtype=torch.uint8, device=device)
