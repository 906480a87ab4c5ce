"""Memory of one decoder rank at start: the largest step and the graphs, measured if possible, and the KV blocks that
fit.

The memory of steps is estimated as a number of bytes for each token and each row of logits. Running the largest step
measures how far the estimate is off on a device, with its kernels and allocator. On the CPU there is no meter, since
other processes use its memory too, and the estimate is used.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache

import torch

from oarlock.base.errors import StartupError
from oarlock.base.host_memory import human_bytes
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.protocol import LOGITS, StepMetadata
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.runner.device import free_bytes, meter_of
from oarlock.workers.runner.group_sizes import GroupSizes
from oarlock.workers.runner.kv_room import MemoryMeter, room_for_kv
from oarlock.workers.runner.memory_needs import (
    largest_step_bytes,
    loaded_bytes_of_node,
    out_of_memory,
    out_of_memory_as,
    rank_weight_bytes,
    step_bytes,
)

logger = logging.getLogger("oarlock.runner")

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


class RankMemory:
    """Memory of a rank. Every out-of-memory error at start becomes a `StartupError` with the arithmetic."""

    def __init__(
        self,
        config: WorkerConfig,
        spec: DecoderSpec,
        formats: WeightFormats,
        stage: PipelineStage,
        device: torch.device,
        meter: MemoryMeter | None = None,
    ) -> None:
        """Estimate the largest step. `meter`: replaces the device's own meter."""
        self._config, self._spec, self._formats, self._stage, self._device = config, spec, formats, stage, device
        self.meter = meter or meter_of(device)
        self.step = StepMemory(config, spec, has_head=stage.is_last)
        self.groups = GroupSizes.of(config, spec, stage.number)
        self.graph_bytes = 0  # known before KV memory is allocated
        self.kv_bytes: int | None = None  # None: not known yet

    def needed_for(self, activity: str) -> AbstractContextManager[None]:
        """Return a context in which an allocator's out-of-memory error becomes a `StartupError` that names
        `activity`."""
        return out_of_memory_as(lambda _: self._error(activity))

    def measure_step(self, run: Callable[[], object]) -> None:
        """Measure the largest step, which `run` runs. Every rank must call this at the same point."""
        assert self.meter is not None
        peak = self.meter.peak_of(run)
        self.step = StepMemory(self._config, self._spec, peak, has_head=self._stage.is_last)

    def num_blocks_that_fit(self) -> list[int]:
        """Return the numbers of KV blocks and slots of each memory group that fit. Raises `StartupError` if one
        sequence would not fit."""
        config = self._config
        if config.num_kv_blocks is not None:
            return self.groups.given_counts(config.num_kv_blocks)
        loaded = loaded_bytes_of_node(config, self._spec, self._formats)
        room = room_for_kv(config, self.meter, self.step.largest, self.graph_bytes, loaded)
        num_blocks = self.groups.counts_that_fit(room)
        logger.info(
            "event=memory step_bytes=%d measured=%s graph_bytes=%d kv_bytes=%d room=%r",
            self.step.largest,
            self.meter is not None,
            self.graph_bytes,
            self.groups.bytes_of(num_blocks),
            f"{room.source} {human_bytes(room.available)}",
        )
        return num_blocks

    def check_room_left(self) -> None:
        """Raise `StartupError` if the device has too little memory left for a step and the graphs."""
        if self.meter is not None and self.meter.free_bytes() < self.step.largest + self.graph_bytes:
            raise self._error("leaving room for a step and graphs")

    def _error(self, activity: str) -> StartupError:
        weights = rank_weight_bytes(self._config, self._spec, self._formats, self._stage.number)
        free = free_bytes(self._device) if self.meter is None else self.meter.free_bytes()
        measured = None if self.meter is None else self.step.largest
        return out_of_memory(
            self._config, self._spec, weights, activity, self.kv_bytes, free, measured, self.graph_bytes
        )
