"""Changes that requests make to their logits before sampling: bias, then penalties, then masks.

Works on one rank's shard without communication: the change of an id's logit depends only on that logit and the step.
Only the entries named in the step are changed, and whole rows only if they have a mask. Rows that report logprobs are
restored afterwards, because logprobs are of the raw logits.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.sampling.token_histories import DenseHistories, Entries, Histories, TokenHistories

_ROWS_AT_ONCE = 16


@dataclass(slots=True)
class AppliedChanges:
    """The logits before each change, to restore them."""

    # for each change: indices into the flat logits, int64 [n], and the previous values
    entries: list[tuple[Tensor, Tensor]]
    rows: Tensor  # int64 [R]   rows that report logprobs and were changed completely: masked, or penalised densely
    raw_rows: Tensor  # float32 [R, V]

    def undo(self, x: Tensor) -> None:
        """Restore the raw logits in `x`; masked rows that report no logprobs stay masked."""
        for indices, before in reversed(self.entries):
            x.view(-1).index_copy_(0, indices, before)
        x.index_copy_(0, self.rows, self.raw_rows)


def apply_logits_processors(
    x: Tensor, step: StepMetadata, histories: Histories, first_id: int, reporting: np.ndarray
) -> AppliedChanges | None:
    """Change `x`, this rank's contiguous float32 [L, V] of the ids from `first_id` on.

    `reporting` bool [L]: rows that report logprobs. Returns the changes, or None if there were none.
    """
    has_mask = len(step.mask_rows) > 0
    if not (has_mask or len(step.bias_rows) or len(step.penalty_rows)):
        return None
    whole = step.mask_rows
    if isinstance(histories, DenseHistories):
        whole = np.union1d(whole, step.penalty_rows)
    kept = whole[reporting[whole]]
    rows = torch.from_numpy(kept).to(x.device, torch.int64)
    done = AppliedChanges([], rows, x[rows])
    if len(step.bias_rows):
        _add_bias(x, step, first_id, done)
    if len(step.penalty_rows):
        if isinstance(histories, DenseHistories):
            _penalise_densely(x, step, histories)
        else:
            assert isinstance(histories, TokenHistories)
            _penalise(x, step, histories.entries(step), first_id, done)
    if has_mask:
        _mask(x, step, first_id)
    return done


def _add_bias(x: Tensor, step: StepMetadata, first_id: int, done: AppliedChanges) -> None:
    local, indices = _flat_indices(x, step.bias_rows, step.bias_ids - first_id)
    logits = x.view(-1)
    done.entries.append((indices, logits.index_select(0, indices)))
    # An id may have both a bias and a ban; additions commute.
    logits.index_add_(0, indices, _moved(step.bias_values[local], x, torch.float32))


def _penalise(x: Tensor, step: StepMetadata, entries: Entries, first_id: int, done: AppliedChanges) -> None:
    """Apply the repetition penalty, then frequency and presence, in float64, rounded once to float32."""
    lengths = entries.lengths
    where = np.repeat(entries.firsts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    local, indices = _flat_indices(x, np.repeat(step.penalty_rows, lengths), entries.ids[where] - first_id)

    def column(values: np.ndarray) -> Tensor:
        return _moved(np.repeat(values, lengths)[local], x, torch.float64)

    before = x.view(-1).index_select(0, indices)
    done.entries.append((indices, before))
    logits = before.double()
    if (step.repetition != 1).any():
        factor = column(step.repetition)
        logits = logits.clamp(min=0).div_(factor).add_(logits.clamp(max=0).mul_(factor))
    if step.frequency.any() or step.presence.any():
        counts = _moved(entries.counts[where][local], x, torch.float64)
        logits -= column(step.frequency) * counts
        logits -= column(step.presence) * (counts > 0)
    x.view(-1).index_copy_(0, indices, logits.float())


def _penalise_densely(x: Tensor, step: StepMetadata, histories: DenseHistories) -> None:
    """Penalise every id of the shard at once, with the same result as `_penalise`, a few rows at a time."""
    for start in range(0, len(step.penalty_rows), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        seen = histories.of(step, some)  # [p, V]
        repetition, frequency, presence = (
            _moved(column[some], x, torch.float64).unsqueeze(1)
            for column in (step.repetition, step.frequency, step.presence)
        )
        rows = _moved(step.penalty_rows[some], x, torch.int64)
        before = x[rows]
        logits = before.double()
        logits = logits.clamp(min=0).div_(repetition).add_(logits.clamp(max=0).mul_(repetition))
        counts = seen >> 1
        logits -= frequency * counts
        logits -= presence * (counts > 0)
        x[rows] = torch.where(seen > 0, logits.float(), before)


def _flat_indices(x: Tensor, rows: np.ndarray, local_ids: np.ndarray) -> tuple[slice | np.ndarray, Tensor]:
    """Return the entries whose ids are in this rank's shard, and their indices into its flat logits: int64 [n]."""
    width = x.shape[1]
    local: slice | np.ndarray = slice(None)
    if len(local_ids) and (local_ids.min() < 0 or local_ids.max() >= width):
        local = np.flatnonzero((local_ids >= 0) & (local_ids < width))
    return local, _moved(rows[local].astype(np.int64) * width + local_ids[local], x, torch.int64)


def _mask(x: Tensor, step: StepMetadata, first_id: int) -> None:
    """Set the logits of ids whose bit is 0 to -inf. NaN stays NaN, so that it is still reported."""
    if x.device.type == "cpu" and library.provides("oarlock_mask"):
        words = np.ascontiguousarray(step.mask_bits)
        rows = np.ascontiguousarray(step.mask_rows)
        library.library().oarlock_mask(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.stride(0)),
            ctypes.c_void_p(rows.ctypes.data), ctypes.c_void_p(words.ctypes.data),
            *map(ctypes.c_long, (len(rows), words.shape[1], first_id, x.shape[1])),
        )  # fmt: skip
    else:
        mask_with_torch(x, step, first_id)


def mask_with_torch(x: Tensor, step: StepMetadata, first_id: int) -> None:
    """Mask like `_mask`, with torch and numpy, for every device; tests compare the kernel with it."""
    first_word, last_word = first_id // 32, -(-(first_id + x.shape[1]) // 32)
    # [G, W]   may have fewer bits than ids: those beyond the vocabulary have none
    bits = step.mask_bits[:, first_word:last_word]
    allowed = _unpacked_bits(bits) if x.device.type == "cpu" else _unpacked_bits_on(bits, x.device)
    allowed = allowed[:, first_id % 32 :][:, : x.shape[1]]  # [G, up to V]
    width = allowed.shape[1]
    if x.device.type == "cpu":
        # One row at a time stays in the cache, and arithmetic has no branch to mispredict: 1/1 - 1 = 0, 1/0 - 1 = inf.
        for row, ones in zip(step.mask_rows.tolist(), allowed, strict=True):
            x[row, :width].sub_(ones.float().reciprocal_().sub_(1))
    else:
        rows = torch.from_numpy(step.mask_rows).to(x.device, torch.int64)
        x[rows, :width] = x[rows, :width] - allowed.float().reciprocal_().sub_(1)


def _unpacked_bits(words: np.ndarray) -> Tensor:
    """Return the bits of uint32 [G, W] as uint8 [G, 32 W], on the CPU."""
    return torch.from_numpy(np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little"))


def _unpacked_bits_on(words: np.ndarray, device: torch.device) -> Tensor:
    """Return the bits of uint32 [G, W] as [G, 32 W] on `device`: only the words are copied there."""
    moved = torch.from_numpy(np.ascontiguousarray(words).view(np.int32)).to(device)
    return (moved.unsqueeze(2) >> torch.arange(32, device=device, dtype=torch.int32)).bitwise_and_(1).flatten(1)


def bans_all(step: StepMetadata, row: int, vocab_size: int) -> bool:
    """Return whether bias and mask together ban every id in `row` of the L rows."""
    allowed = np.ones(vocab_size, np.uint8)
    for words in step.mask_bits[step.mask_rows == row]:
        allowed &= np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")[:vocab_size]
    allowed[step.bias_ids[(step.bias_rows == row) & (step.bias_values == -np.inf)]] = 0
    return not allowed.any()


def _moved(array: np.ndarray, x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array).to(x.device, dtype)
