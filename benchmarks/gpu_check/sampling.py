"""Times a step's sampling on a device, by the kernels that ranks launch there and by torch's operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_check.device import measure_ceilings, seconds_of
from benchmarks.gpu_check.part import NotHere, Row, Where
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.triton import availability
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from oarlock.workers.sampling.columns import SamplingColumns, Variant
from oarlock.workers.sampling.device_sampler import DeviceOutputs, DeviceSampler
from oarlock.workers.sampling.sampler import Sampler
from oarlock.workers.sampling.token_histories import DenseHistories, TokenHistories

# Kind of rows -> the standard deviation of their logits, and columns of the step.
KINDS: dict[str, tuple[float, dict[str, float]]] = {
    "greedy": (3.0, {}),
    "temperature": (3.0, {"temperature": 0.8}),
    "top-p": (3.0, {"temperature": 0.8, "top_p": 0.95}),
    "top-k and top-p": (3.0, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
    "top-p, flat": (1.0, {"temperature": 1.0, "top_p": 0.95}),  # kept are tens of thousands of ids
    "top-k of 1000": (3.0, {"temperature": 1.0, "top_k": 1000}),
    "penalties": (3.0, {"temperature": 0.8, "frequency": 0.5}),
    "logprobs": (3.0, {"num_logprobs": 5}),
}


def sampling(where: Where) -> Iterator[Row]:
    """Times of sampling in microseconds; `floor` is one pass over the logits at the best bandwidth."""
    device = torch.device(where.device)
    if reason := availability.why_not(device):
        raise NotHere(reason)
    limits = measure_ceilings(where)
    vocab, batches = (600, (2,)) if where.is_tiny else (151_936, (1, 32, 256))
    for batch in batches:
        histories = DenseHistories(batch, 0, vocab, device)
        histories.seen[:, ::64] = 3  # in the prompt, and generated once
        kernels = DeviceSampler(vocab, batch, histories, device)
        kept = TokenHistories(batch, vocab) if where.is_tiny else histories  # as ranks on the CPU have
        by_torch = Sampler(TensorParallel.solo(), 0, vocab, vocab, kept)
        noise = torch.randn(batch, vocab, device=device)
        for kind, (deviation, columns) in KINDS.items():
            step, logits = _step(batch, columns), noise * deviation
            placed, outputs = SamplingColumns.of_step(step, device), DeviceOutputs.empty(batch, device)
            variant = Variant.of(step)
            ours = seconds_of(where, partial(kernels.sample, logits, placed, outputs, variant), at_once=3)
            theirs = seconds_of(where, partial(by_torch.sample, logits, step))
            figures = {"us": ours * 1e6, "floor us": logits.nbytes / limits.bytes_s * 1e6, "torch us": theirs * 1e6}
            yield Row(f"{kind}, {batch} rows", figures)


def _step(rows: int, columns: dict[str, float]) -> StepMetadata:
    """One token each; `columns` for all rows."""
    step = greedy_step([SequenceChunk([0], 0, [NULL_BLOCK])] * rows, 1, range(rows))
    penalised = np.arange(rows if "frequency" in columns else 0, dtype=np.int32)
    named = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0} if len(penalised) else {}
    values = {name: np.full(rows, value, getattr(step, name).dtype) for name, value in (named | columns).items()}
    return dataclasses.replace(step, seeds=np.arange(rows), penalty_rows=penalised, **values)
