"""Sampling by kernels whose work is the same for every step of a bucket, and the one copy of what they leave.

The sampled tokens always lie in the same place on the device, where the next step reads them.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.runner.cuda_graphs.inputs import InputPlace
from oarlock.workers.runner.cuda_graphs.staging import Layout, StagingBuffer
from oarlock.workers.runner.pending_output import Computed, PendingOutput
from oarlock.workers.sampling.columns import Variant
from oarlock.workers.sampling.device_outputs import DeviceOutputs, output_of, sections
from oarlock.workers.sampling.device_sampler import DeviceSampler

_ALWAYS = 2  # of the sections: the others hold logprobs


class DeviceSampling:
    """`StepSampling` by a `DeviceSampler`."""

    variants = (
        Variant(),
        Variant(random=True),
        Variant(random=True, filtered=True),
        Variant(random=True, filtered=True, processed=True),
        Variant(random=True, filtered=True, processed=True, logprobs=True),
    )

    def __init__(self, sampler: DeviceSampler, most_rows: int, device: torch.device, *, answers: bool) -> None:
        """`most_rows`: of logits in a step, those that are scored included. `answers`: whether this is rank 0."""
        self._sampler, self._answers = sampler, answers
        largest = Layout(sections(most_rows))
        self._staging = StagingBuffer(largest.num_bytes, device)
        self.sampled: Tensor = largest.tensors(self._staging.on_device)["tokens"]  # int32 [most_rows]

    def begin(self, step: StepMetadata) -> None:
        """Writes the histories that `step` brings, as `StepSampling` describes."""
        self._sampler.histories.write(step)

    def sample(self, logits: Tensor, place: InputPlace, first: int, variant: Variant) -> None:
        """Samples rows and counts their tokens, as `StepSampling` describes."""
        rows = place.shape.logits
        outputs = DeviceOutputs(**Layout(sections(rows)).tensors(self._staging.on_device))
        self._sampler.sample(logits, place.columns, outputs, variant, first)
        if variant.processed and first + len(logits) == rows:
            self._sampler.count(place.columns, outputs, rows)

    def finish(self, step: StepMetadata, place: InputPlace) -> PendingOutput:
        """Begins the copy of the results to the host, as `StepSampling` describes."""
        if not self._answers:
            return Computed(None)
        found = sections(place.shape.logits)
        copied = found if Variant.of(step).logprobs else found[:_ALWAYS]
        return _DeviceOutput(_kept(step), Layout(found), self._staging.to_host(Layout(copied).num_bytes))


class _DeviceOutput:
    """The output of a step that the device may still compute."""

    def __init__(self, step: StepMetadata, layout: Layout, copied: Callable[[], np.ndarray]) -> None:
        self._step, self._layout, self._copied = step, layout, copied

    def wait(self) -> StepOutput:
        return output_of(self._step, self._layout.arrays(self._copied()))


def _kept(step: StepMetadata) -> StepMetadata:
    """`step` with copies of what its output is made from: its arrays may be overwritten before that is there."""
    names = ("token_ids", "query_start_loc", "logits_indices", "target_ids", "num_logprobs", "num_drafts")
    return replace(step, **{name: getattr(step, name).copy() for name in names})
