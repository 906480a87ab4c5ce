"""Sampling of a step's rows on a CUDA device in launches that graphs can record, and the copy of the results to the
host.

Sampled tokens are always stored at the same address, from which the next step reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.runner.pending_output import Launched
from oarlock.workers.runner.step_inputs import InputPlace, Layout, StagingBuffer
from oarlock.workers.sampling.columns import Variant
from oarlock.workers.sampling.device_sampler import DeviceOutputs, DeviceSampler, output_of, output_sections
from oarlock.workers.sampling.sharded_sampler import RowSampler, ShardSampler
from oarlock.workers.sampling.token_histories import DenseHistories


class StepSampling(Protocol):
    """Sampler of the rows of one step after another: `begin`, `sample` for each part of the rows in turn, `finish`."""

    sampled: Tensor  # integers [R] on the device, always the same tensor: tokens of the newest step, by row

    @property
    def variants(self) -> Sequence[Variant]:
        """Variants to capture, ordered so that each serves more steps than the previous."""

    def begin(self, step: StepMetadata) -> None:
        """Prepare for a step before it is sent to the device."""

    def sample(self, logits: Tensor, place: InputPlace, first: int, variant: Variant) -> None:
        """Sample rows `first` to `first + n` of the step in `place`.

        `logits`: float32 [n, vocab_local], of this rank. `variant`: at least the kernels that these rows need. The work
        depends only on the variant and on the number of rows. A collective call.
        """

    def finish(self, step: StepMetadata, place: InputPlace) -> Launched:
        """Return the output of the step."""


# Variants to capture, each with the kernels of the previous and one more. With several ranks, also `_PROCESSED`: bias,
# penalties and masks without filters.
_VARIANTS = (
    Variant(),
    Variant(random=True),
    Variant(random=True, filtered=True),
    Variant(random=True, filtered=True, processed=True),
    Variant(random=True, filtered=True, processed=True, logprobs=True),
)
_PROCESSED = Variant(random=True, processed=True)
_ALWAYS = 2  # output sections that are always copied; the others hold logprobs


class DeviceSampling:
    """`StepSampling` by a `DeviceSampler` on one rank.

    With several ranks, rows are sampled from each rank's part of the logits if that is enough (`ShardSampler`).
    Otherwise the rows are divided among the ranks, and each rank samples from all logits of its rows (`RowSampler`).
    """

    def __init__(
        self,
        sampler: DeviceSampler | RowSampler,
        histories: DenseHistories,
        most_rows: int,
        tp: TensorParallel,
        shards: ShardSampler | None = None,
    ) -> None:
        """Allocate the outputs. `most_rows`: largest number of rows of logits in a step, including scored rows.
        `shards`: the sampler from parts of logits if there are several ranks."""
        self._sampler, self._shards, self._histories, self._tp = sampler, shards, histories, tp
        self.variants = _VARIANTS if shards is None else (*_VARIANTS[:2], _PROCESSED, *_VARIANTS[2:])
        largest = Layout(output_sections(most_rows))
        self._staging = StagingBuffer(largest.num_bytes, histories.seen.device)
        self.sampled: Tensor = largest.tensors(self._staging.on_device)["tokens"]  # int32 [most_rows]

    def begin(self, step: StepMetadata) -> None:
        """Write the histories that `step` brings, as `StepSampling` describes."""
        self._histories.write(step)

    def sample(self, logits: Tensor, place: InputPlace, first: int, variant: Variant) -> None:
        """Sample rows and count their tokens, as `StepSampling` describes."""
        rows = place.shape.logits
        outputs = DeviceOutputs(**Layout(output_sections(rows)).tensors(self._staging.on_device))
        if self._shards is not None and self._shards.serves(variant):
            self._shards.sample(logits, place.columns, outputs, variant, first)
        else:
            self._sampler.sample(logits, place.columns, outputs, variant, first)
        if variant.processed and first + len(logits) == rows:
            self._sampler.count(place.columns, outputs, rows)

    def finish(self, step: StepMetadata, place: InputPlace) -> Launched:
        """Start the copy of the results to the host, as `StepSampling` describes."""
        if self._tp.rank:
            return None
        found = output_sections(place.shape.logits)
        copied = found if Variant.of(step).logprobs else found[:_ALWAYS]
        return _DeviceOutput(_kept(step), Layout(found), self._staging.to_host(Layout(copied).num_bytes))


class _DeviceOutput:
    """Output of a step that the device may still compute."""

    def __init__(self, step: StepMetadata, layout: Layout, copied: Callable[[], np.ndarray]) -> None:
        self._step, self._layout, self._copied = step, layout, copied

    def wait(self) -> StepOutput:
        return output_of(self._step, self._layout.arrays(self._copied()))


def _kept(step: StepMetadata) -> StepMetadata:
    """Return `step` with copies of the arrays that its output needs: they may be overwritten before the output is
    ready."""
    names = ("token_ids", "query_start_loc", "logits_indices", "target_ids", "num_logprobs", "num_drafts")
    return replace(step, **{name: getattr(step, name).copy() for name in names})
