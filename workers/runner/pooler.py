"""Pooled outputs of a step's sequences: hidden states of one token or of all, their mean, or logits of given ids.

A mean is the sum of the tokens' hidden states, added in float64 one after the other, divided by their number. So it has
the same bits for every division of the prompt into chunks, whatever else is in the steps. Between the chunks of a
sequence the sum is kept here, by row of the engine's tables. The sum before the newest chunk is kept too, since this
chunk may be refused and sent again. Knows steps and hidden states. Does not know requests.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import AdaptedRows, adapted_rows
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.protocol import CLS, LABELS, LAST, LOGITS, MEAN, NOT_POOLED, TOKEN, StepMetadata, StepOutput
from oarlock.workers.runner.memory_needs import MAX_LOGITS_ROWS
from oarlock.workers.runner.pending_output import Launched, PendingOutput

_TOKENS_AT_ONCE = 64  # chunk size of a sum; float64 copies are 2 to 4 times larger than the hidden states

# [L, hidden], adapters of these rows -> float32 [L, vocab_local]
ComputeLogits = Callable[[Tensor, AdaptedRows | None], Tensor]
Classify = Callable[[Tensor], Tensor]  # hidden states of one text [n, hidden] -> float32 [labels]


class _Sum(NamedTuple):
    hidden: Tensor  # float64 [hidden]
    num_tokens: int


class _Chunk(NamedTuple):
    """The tokens of one sequence in a step."""

    kind: int
    row: int  # row of the engine's tables
    start: int  # its first token, among the T tokens of the step
    end: int
    position: int  # position of its first token in the sequence
    is_last: bool
    ids: list[int]  # ids whose logits are returned


class Pooled(NamedTuple):
    """Vectors and logits that the sequences of a step requested; the device may still compute them."""

    values: Tensor  # float32 [X] on the host
    lens: list[int]  # values of each sequence, in the order of `pool_seqs`
    computed: Callable[[], None]  # waits until `values` are computed

    def add_to(self, output: StepOutput) -> StepOutput:
        """Return `output` with the values of sequences that are finite."""
        self.computed()
        kept, lens, start = [], [], 0
        values = self.values.numpy()
        for length in self.lens:
            part = values[start : start + length]
            start += length
            is_finite = bool(np.isfinite(part).all())
            lens.append(length if is_finite else NOT_POOLED)
            if is_finite:
                kept.append(part)
        output.pooled_lens = np.array(lens, np.int32)
        output.pooled = np.concatenate(kept) if kept else np.empty(0, np.float32)
        return output


class Pooler:
    """Pooler of one rank. All ranks have the same hidden states, and the rank that returns outputs makes the vectors.
    Logits are sharded, so all ranks take part in them."""

    def __init__(
        self,
        tp: TensorParallel,
        *,
        answers: bool,
        compute_logits: ComputeLogits | None = None,
        vocab_start: int = 0,
        classify: Classify | None = None,
    ) -> None:
        """Set the rank's role.

        `compute_logits`: of a model with an output head; `vocab_start`: the first id of this rank's logits. `classify`:
        of an encoder with a classification head. The engine requests only values that the model has.
        """
        self._tp, self._answers = tp, answers
        self._compute_logits, self._vocab_start, self._classify = compute_logits, vocab_start, classify
        self._sums: dict[
            int, tuple[_Sum, _Sum]
        ] = {}  # by row: sums before and after the newest chunk, until the row is reused

    def __call__(self, step: StepMetadata, hidden: Tensor) -> Pooled | None:
        """Return the values of `step` on the rank that returns outputs, None on others.

        `hidden`: [T, hidden], after the final norm.
        """
        chunks = _chunks(step)
        wanted = [chunk for chunk in chunks if _wants_logits(chunk)]
        logits = self._named_logits(wanted, hidden, step.adapter_slots_of_tokens)
        if not self._answers:
            return None
        sums = {chunk.row: self._sum(chunk, hidden) for chunk in chunks if chunk.kind == MEAN}
        parts = []
        for chunk in chunks:
            if _wants_logits(chunk):
                parts.append(logits.pop(0))
            elif chunk.kind == LABELS:
                assert self._classify is not None, "the engine asks for labels where there are any"
                parts.append(self._classify(hidden[chunk.start : chunk.end]).float())
            elif chunk.kind == MEAN and chunk.is_last:
                total = sums[chunk.row][1]
                parts.append((total.hidden / total.num_tokens).float())
            else:
                parts.append(hidden[_returned(chunk)].float().flatten())
        self._sums.update(sums)
        return _to_host(torch.cat(parts), [len(part) for part in parts])

    def _sum(self, chunk: _Chunk, hidden: Tensor) -> tuple[_Sum, _Sum]:
        """Return the sum of the sequence's tokens before `chunk`, and the sum up to its end."""
        none = _Sum(torch.zeros(hidden.shape[1], dtype=torch.float64, device=hidden.device), 0)
        known = (none,) if chunk.position == 0 else self._sums[chunk.row]
        (before,) = [one for one in known if one.num_tokens == chunk.position]
        total = before.hidden
        for start in range(chunk.start, chunk.end, _TOKENS_AT_ONCE):
            tokens = hidden[start : min(start + _TOKENS_AT_ONCE, chunk.end)].double()
            # Adds one row after the other, whereas `sum` may add in any order.
            total = torch.cat((total[None], tokens)).cumsum(0)[-1]  # [hidden]
        return before, _Sum(total, chunk.position + chunk.end - chunk.start)

    def _named_logits(self, chunks: list[_Chunk], hidden: Tensor, slot_of: np.ndarray) -> list[Tensor]:
        """Return the logits of the ids of each of `chunks`, after its last token: float32 [ids] for each. `slot_of`
        int32 [T]: slots of the adapters of the rows of `hidden`."""
        found = []
        for first in range(0, len(chunks), MAX_LOGITS_ROWS):
            some = chunks[first : first + MAX_LOGITS_ROWS]
            ends = [chunk.end - 1 for chunk in some]
            last = torch.tensor(ends, device=hidden.device)
            assert self._compute_logits is not None, "an encoder has no logits"
            adapters = adapted_rows(slot_of[ends], hidden.device)
            logits = self._compute_logits(hidden.index_select(0, last), adapters)  # float32 [L, vocab_local]
            counts = [len(chunk.ids) for chunk in some]
            rows = torch.repeat_interleave(torch.arange(len(some)), torch.tensor(counts)).to(hidden.device)
            ids = torch.tensor([one for chunk in some for one in chunk.ids])
            local = (ids - self._vocab_start).clamp(0, logits.shape[1] - 1).to(hidden.device)
            mine = logits[rows, local]  # [N]   valid for ids of this rank's shard
            ranks = ids // logits.shape[1]
            if self._tp.size > 1:
                mine = self._tp.all_gather(mine)[ranks.to(hidden.device), torch.arange(len(ids), device=hidden.device)]
            found += mine.split(counts)
        return found


class _PooledOutput:
    """Output of a step that a device may still compute, with its pooled values."""

    def __init__(self, pending: PendingOutput, pooled: Pooled) -> None:
        self._pending, self._pooled = pending, pooled

    def wait(self) -> StepOutput | None:
        output = self._pending.wait()
        return None if output is None else self._pooled.add_to(output)


def with_pooled(launched: Launched, pooled: Pooled | None) -> Launched:
    """Return the output of a launched step with its pooled values. Both are None on ranks that do not return
    outputs."""
    if launched is None or pooled is None:
        return launched
    return pooled.add_to(launched) if isinstance(launched, StepOutput) else _PooledOutput(launched, pooled)


def _chunks(step: StepMetadata) -> list[_Chunk]:
    starts, ids, chunks = step.query_start_loc.tolist(), step.pool_ids.tolist(), []
    columns = (step.pool_seqs, step.pool_kinds, step.pool_lens, step.pool_num_ids)
    for seq, kind, length, num_ids in zip(*(column.tolist() for column in columns), strict=True):
        start, end, seq_len = starts[seq], starts[seq + 1], int(step.seq_lens[seq])
        named, ids = ids[:num_ids], ids[num_ids:]
        position = seq_len - (end - start)
        chunks.append(_Chunk(kind, int(step.rows[seq]), start, end, position, seq_len == length, named))
    return chunks


def _wants_logits(chunk: _Chunk) -> bool:
    return chunk.kind == LOGITS and chunk.is_last


def _returned(chunk: _Chunk) -> slice:
    """Return the slice of the step's T tokens whose hidden states are returned unchanged."""
    if chunk.kind == TOKEN:
        return slice(chunk.start, chunk.end)
    if chunk.kind == LAST and chunk.is_last:
        return slice(chunk.end - 1, chunk.end)
    if chunk.kind == CLS and chunk.position == 0:
        return slice(chunk.start, chunk.start + 1)
    return slice(0, 0)


def _to_host(values: Tensor, lens: list[int]) -> Pooled:
    """Start the copy of `values`, float32 [X], to the host, without waiting for the device."""
    if values.device.type != "cuda":
        return Pooled(values, lens, lambda: None)
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record()
    return Pooled(on_host, lens, copied.synchronize)
