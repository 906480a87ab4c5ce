"""Sampling parameters of a step's rows for a device: numpy arrays on the host, tensors at fixed addresses.

Columns have R rows, at least the step's number of logits rows; the rest is padding, which is sampled greedily and
without any option. Everything is 32 bits wide. Two sections have their own length: additions to logits, and the words
of masks, which may become known later than the rest.

Knows the layout of a step. Does not know how the step reaches the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.protocol import StepMetadata
from oarlock.workers.sampling.noise import row_keys
from oarlock.workers.sampling_parameters import PENALTIES, PENALTY_NAMES, ROW_NAMES, ROWS, RowColumns, have_floor

NONE = -1


class Variant(NamedTuple):
    """Kernels that a step's sampling needs: each is launched only for steps with rows of that kind."""

    random: bool = False  # rows that are sampled at random
    filtered: bool = False  # rows with a floor, top-k or top-p
    processed: bool = False  # rows with bias, penalties or masks
    logprobs: bool = False

    @staticmethod
    def of(step: StepMetadata) -> "Variant":
        drawn = (step.target_ids < 0) & (step.temperature > 0) & (step.top_k != 1)
        filtered = drawn & ((step.top_p < 1) | (step.top_k > 0) | have_floor(step))
        processed = len(step.bias_rows) or len(step.penalty_rows) or len(step.mask_rows)
        logprobs = (step.num_logprobs >= 0) | (step.target_ids >= 0)
        return Variant(bool(drawn.any()), bool(filtered.any()), bool(processed), bool(logprobs.any()))

    def serves(self, other: "Variant") -> bool:
        """Return whether this variant launches all kernels that a step of `other` needs."""
        return all(own or not wanted for own, wanted in zip(self, other, strict=True))


@dataclass(slots=True)
class SamplingColumns(RowColumns[Tensor]):
    """Sampling parameters on the device. A kernel reads row r of the columns for row r of the logits."""

    keys: Tensor  # int32 [R, 2]   keys of the noise
    target_ids: Tensor  # int32 [R]   -1: sample a token; otherwise this token is scored and nothing is sampled
    num_logprobs: Tensor  # int32 [R]   -1: none; 0: only the token's own; k: the k best as well
    history_rows: Tensor  # int32 [R]   row of the engine's tables; -1: no penalties
    repetition: Tensor  # float32 [R]
    frequency: Tensor  # float32 [R]
    presence: Tensor  # float32 [R]
    # The rows of a sequence's newest token and its drafts are consecutive.
    guesses: Tensor  # int32 [R]   the draft for the token that the row samples; -1: none
    drafts_before: Tensor  # int32 [R]   number of the sequence's drafts before the token that the row samples
    mask_index: Tensor  # int32 [R]   row of `mask_bits`; -1: no mask
    changed: Tensor  # int32 [R]   1 if penalties, a mask or bias change the row's logits, else 0
    bias_starts: Tensor  # int32 [R + 1]   first entry of each row in `bias`
    bias: Tensor  # int32 [M, 2]   an id (-1: none; unique in a row) and the bits of the float32 that is added
    mask_bits: Tensor  # int32 [G, W]   bit v % 32 of word v // 32 is 1 if id v is allowed

    @staticmethod
    def of_step(step: StepMetadata, device: torch.device) -> "SamplingColumns":
        """Copy the parameters of `step` into new tensors, without padding."""
        arrays = {name: np.empty(shape, dtype) for name, dtype, shape in sections(len(step.logits_indices))}
        write_rows(step, arrays)
        arrays["bias"], arrays["mask_bits"] = bias_entries(step), step.mask_bits.view(np.int32)
        return SamplingColumns(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def sections(rows: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and shape of the columns of `rows` rows, except `bias` and `mask_bits`."""
    return [
        *((row.column, row.dtype, (rows,)) for row in ROWS),
        ("keys", "<i4", (rows, 2)),
        ("target_ids", "<i4", (rows,)),
        ("num_logprobs", "<i4", (rows,)),
        ("history_rows", "<i4", (rows,)),
        *((row.column, row.dtype, (rows,)) for row in PENALTIES),
        ("guesses", "<i4", (rows,)),
        ("drafts_before", "<i4", (rows,)),
        ("mask_index", "<i4", (rows,)),
        ("changed", "<i4", (rows,)),
        ("bias_starts", "<i4", (rows + 1,)),
    ]


def write_rows(step: StepMetadata, into: Mapping[str, np.ndarray]) -> None:
    """Write the columns of `step`, followed by padding, into arrays with the names and shapes of `sections`."""
    count = len(step.logits_indices)
    for name, padding in _PADDING.items():
        into[name][count:] = padding
    for name in (*ROW_NAMES, "target_ids", "num_logprobs"):
        into[name][:count] = getattr(step, name)
    into["keys"][:count] = row_keys(step.seeds, step.sample_positions)
    into["mask_index"][:count] = NONE
    into["mask_index"][step.mask_rows] = np.arange(len(step.mask_rows))
    into["changed"][:count] = 0
    for rows in (step.penalty_rows, step.mask_rows, step.bias_rows):
        into["changed"][rows] = 1
    into["bias_starts"][:] = np.searchsorted(step.bias_rows, np.arange(len(into["bias_starts"])))
    _write_penalties(step, into, count)
    _write_drafts(step, into, count)


_PADDING = {
    **{row.column: row.off for row in (*ROWS, *PENALTIES)},
    "keys": 1, "target_ids": NONE, "num_logprobs": NONE, "history_rows": NONE, "guesses": NONE, "drafts_before": 0,
    "mask_index": NONE, "changed": 0,
}  # fmt: skip


def _write_penalties(step: StepMetadata, into: Mapping[str, np.ndarray], count: int) -> None:
    for name in ("history_rows", *PENALTY_NAMES):
        into[name][:count] = _PADDING[name]
    if len(step.penalty_rows):
        into["history_rows"][step.penalty_rows] = step.rows[_sequences(step, step.logits_indices[step.penalty_rows])]
        for name in PENALTY_NAMES:
            into[name][step.penalty_rows] = getattr(step, name)


def _write_drafts(step: StepMetadata, into: Mapping[str, np.ndarray], count: int) -> None:
    guesses, before = into["guesses"][:count], into["drafts_before"][:count]
    guesses[:], before[:] = NONE, 0
    if len(step.num_drafts):
        tokens = step.logits_indices
        seqs = _sequences(step, tokens)
        ends = step.query_start_loc[seqs + 1]
        before[:] = np.maximum(tokens + 1 - (ends - step.num_drafts[seqs]), 0)
        guessed = (step.num_drafts[seqs] > 0) & (tokens + 1 < ends)
        guesses[guessed] = step.token_ids[tokens[guessed] + 1]


def _sequences(step: StepMetadata, tokens: np.ndarray) -> np.ndarray:
    """Return the sequence of each of `tokens`, indices among the T tokens: int64."""
    return np.searchsorted(step.query_start_loc, tokens, "right") - 1


def bias_entries(step: StepMetadata) -> np.ndarray:
    """Return the section `bias`: int32 [M, 2]. If an id occurs several times in a row, its first entry has the sum."""
    keys = step.bias_rows.astype(np.int64) << 32 | step.bias_ids
    distinct, firsts, index = np.unique(keys, return_index=True, return_inverse=True)
    if len(distinct) == len(keys):
        return np.stack([step.bias_ids, step.bias_values.view(np.int32)], 1)
    ids, sums = np.full(len(keys), NONE, np.int32), np.zeros(len(keys), np.float32)
    ids[firsts] = step.bias_ids[firsts]
    np.add.at(sums, firsts[index], step.bias_values)
    return np.stack([ids, sums.view(np.int32)], 1)
