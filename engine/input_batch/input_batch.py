"""Builds the arrays of a step, `StepMetadata`, from the scheduler's decision.

Sampling parameters are kept in tables that are indexed by a sequence's row. A step carries the parameters of its rows,
and the changed entries of the block tables, which ranks keep. Tokens that the previous step samples are not known when
a step is built, so they are references to the previous step's rows of logits (`SampledRows`). Knows numpy and the
step's layout. Does not know policy or transport.
"""

from typing import NamedTuple

import numpy as np

from oarlock.engine.input_batch.sampling_metadata import (
    NO_BIAS,
    ConstrainedRow,
    GrammarBitmask,
    build_sampling_metadata,
    constrained_until,
    history_sections,
)
from oarlock.engine.kv_cache.manager import TableEntry
from oarlock.engine.kv_cache.offload import Copies
from oarlock.engine.kv_cache.sequence_memory import UNSENT
from oarlock.engine.scheduler.sequence import NOT_KNOWN, Decodes, ScheduledTokens, SchedulerOutput, Sequence
from oarlock.engine.types import KINDS, penalises
from oarlock.workers.adapters import NO_SLOT, command_fields
from oarlock.workers.kv_offload import DIGEST_BYTES
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.sampling_parameters import ROWS, columns_off

_NONE = -1
_NO_LOGPROBS = -1
_SAMPLE = -1
_NEVER = 0  # id before the first step


class BuiltStep(NamedTuple):
    """A step for the ranks, and the masks that are computed after its submission; None if the masks are complete."""

    step: StepMetadata
    masks: GrammarBitmask | None


class _Tokens(NamedTuple):
    """Tokens of a step."""

    rows_of_seqs: np.ndarray  # int32 [S]; rows in the engine's tables
    seq_lens: np.ndarray  # int32 [S]
    query_start_loc: np.ndarray  # int32 [S + 1]
    rows: np.ndarray  # int64 [T]
    token_ids: np.ndarray  # int32 [T]; may be NOT_KNOWN
    positions: np.ndarray  # int64 [T]
    rows_of_logits: np.ndarray  # int64 [L]
    columns: dict[str, np.ndarray]  # fields of the step with L entries


class InputBatch:
    """Builds `StepMetadata` from `SchedulerOutput`. The arrays of a step are not changed by later steps."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._sampled_rows = SampledRows(max_num_seqs)
        # sampling parameters by row, written when a sequence gets the row
        self._choices = {
            **columns_off(max_num_seqs),
            "seeds": np.zeros(max_num_seqs, np.int64),
            "num_logprobs": np.zeros(max_num_seqs, np.int32),
        }
        self._unconstrained_from = np.zeros(
            max_num_seqs, np.int64
        )  # first position from which on no bias, penalty or mask is needed
        self._history_step = np.zeros(max_num_seqs, np.int64)  # step in which the history of a row's sequence was sent
        self._adapter_slots = np.zeros(max_num_seqs, np.int32)  # slot of each row's adapter
        # Kept from the last step in which every sequence decoded. As long as no row changes, the next step can reuse
        # them.
        self._gathered_of: np.ndarray | None = None
        self._gathered: dict[str, np.ndarray] = {}
        self._rows_of_seqs = self._starts = np.empty(0, np.int32)
        self._unconstrained: np.ndarray | None = None  # decoding rows if none of them needs bias, penalty or mask
        self._counting = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._samples = np.full(max_num_seqs, _SAMPLE, np.int32)

    def build(self, output: SchedulerOutput) -> BuiltStep:
        """Return the arrays for `output`. Building the same output twice gives the same arrays."""
        for seq in output.new_rows:
            if seq.row >= 0:
                self._assign(seq)
                self._gathered_of = self._unconstrained = None
        sections = _table_entries(output.new_blocks) if output.new_blocks else {}
        if output.scheduled:
            tokens = self._mixed(output)
            sections |= _pooling(output)
        else:
            tokens = self._decodes(output.decodes)
        if output.num_drafts:
            sections["num_drafts"] = _num_drafts(output)
        if output.kv_copies is not None:
            sections |= _kv_copies(output.kv_copies)
        if output.states is not None:
            sections |= output.states.fields()
        if output.adapter_commands:
            sections |= command_fields(output.adapter_commands)
        if output.has_adapters and (slots := self._adapter_slots[tokens.rows_of_seqs]).any():
            sections["adapter_slots"] = slots
        token_ids, columns = tokens.token_ids, tokens.columns
        unknown = (token_ids == NOT_KNOWN).nonzero()[0]
        if 0 < len(unknown) == len(token_ids):
            token_ids = self._sampled_rows.references(output.step_id, tokens.rows)
        elif len(unknown):
            token_ids = token_ids.copy()
            token_ids[unknown] = self._sampled_rows.references(output.step_id, tokens.rows[unknown])
        samples = columns["target_ids"] == _SAMPLE if output.scheduled else None
        self._sampled_rows.note(output.step_id, tokens.rows_of_logits, samples)
        sampling, masks = NO_BIAS, None
        if tokens.rows is not self._unconstrained:
            sampling, masks = self._sampling_metadata(output, tokens.rows_of_logits, columns)
            if masks is None and sampling is NO_BIAS and not output.scheduled:
                self._unconstrained = tokens.rows
        step = StepMetadata(
            step_id=output.step_id,
            is_ahead=output.is_ahead,
            token_ids=token_ids,
            positions=tokens.positions.astype(np.int32),
            query_start_loc=tokens.query_start_loc,
            seq_lens=tokens.seq_lens,
            rows=tokens.rows_of_seqs,
            **columns,
            **sampling,
            **sections,
        )
        return BuiltStep(step, masks)

    def forget_histories(self) -> None:
        """Send all histories again: the ranks may have lost theirs, which penalties need. No step is in flight."""
        self._history_step[:] = _NEVER
        self._unconstrained = None  # sequences may be at earlier positions again

    def _decodes(self, decodes: Decodes) -> _Tokens:
        """Return the tokens of a step in which every sequence decodes."""
        rows, positions, num_seqs = decodes.rows, decodes.positions, len(decodes.rows)
        seq_lens = (positions + 1).astype(np.int32)
        if rows is not self._gathered_of:
            indices = {"logits_indices": self._counting[:num_seqs], "target_ids": self._samples[:num_seqs]}
            self._gathered_of, self._gathered = rows, {**indices, **self._gather(rows)}
            self._rows_of_seqs, self._starts = rows.astype(np.int32), self._counting[: num_seqs + 1]
        columns = {**self._gathered, "sample_positions": seq_lens}
        return _Tokens(self._rows_of_seqs, seq_lens, self._starts, rows, decodes.token_ids, positions, rows, columns)

    def _mixed(self, output: SchedulerOutput) -> _Tokens:
        """Return the tokens of a step in which some sequences do more than decode one token."""
        scheduled, decodes, num_decodes = output.scheduled, output.decodes, len(output.decodes.rows)
        rows = _joined(decodes.rows, [item.seq.row for item in scheduled])  # [S]
        starts = _joined(decodes.positions, [item.start for item in scheduled])  # [S]
        counts = _joined(np.ones(num_decodes, np.int64), [item.num_tokens for item in scheduled])  # [S]
        query_start_loc = np.zeros(len(rows) + 1, np.int64)  # [S + 1]
        np.cumsum(counts, out=query_start_loc[1:])
        seq_lens = starts + counts  # [S]
        token_ids = _joined(decodes.token_ids, _concatenated(scheduled))  # [T]
        first = np.repeat(starts - query_start_loc[:-1], counts)
        positions, row_of_token = first + np.arange(len(token_ids)), np.repeat(rows, counts)  # [T]
        if any(item.num_scored or item.drafts for item in scheduled):
            rows_of_logits, columns = self._scoring_columns(output.items(), query_start_loc)
        else:
            wants = _joined(np.ones(num_decodes, bool), [item.wants_logits for item in scheduled])  # [S]
            rows_of_logits, last, after = rows[wants], query_start_loc[1:][wants] - 1, seq_lens[wants]
            columns = {
                "logits_indices": last.astype(np.int32),
                "target_ids": self._samples[: len(rows_of_logits)],
                "sample_positions": after.astype(np.int32),
                **self._gather(rows_of_logits),
            }
        of_seqs = (some.astype(np.int32) for some in (rows, seq_lens, query_start_loc))
        return _Tokens(*of_seqs, row_of_token, token_ids, positions, rows_of_logits, columns)

    def _assign(self, seq: Sequence) -> None:
        """Write the table entries of the row that was assigned to `seq`."""
        params, row = seq.request.params, seq.row
        for parameter in ROWS:
            self._choices[parameter.column][row] = getattr(params, parameter.name)
        self._choices["seeds"][row] = params.seed
        self._choices["num_logprobs"][row] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._unconstrained_from[row] = constrained_until(seq)
        self._history_step[row] = _NEVER
        self._adapter_slots[row] = NO_SLOT if seq.adapter is None else seq.adapter.slot

    def _scoring_columns(
        self, scheduled: list[ScheduledTokens], query_start_loc: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the table row of each of the L rows of logits, int64 [L], and the fields of the step with L entries.

        For steps that score prompt tokens or verify drafts, which have several rows of logits per sequence.
        """
        rows: list[int] = []
        indices: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        num_logprobs: list[int] = []
        for item, first in zip(scheduled, query_start_loc.tolist(), strict=False):
            seq, params = item.seq, item.seq.request.params
            end = item.score_from + item.num_scored
            rows += [seq.row] * item.num_rows
            indices += range(first + item.score_from - item.start, first + end - item.start)
            targets += seq.token_ids[item.score_from + 1 : end + 1]
            positions += range(item.score_from + 1, end + 1)
            num_logprobs += [params.prompt_logprobs or 0] * item.num_scored
            num_sampled = item.num_rows - item.num_scored
            indices += range(first + item.num_tokens - num_sampled, first + item.num_tokens)
            targets += [_SAMPLE] * num_sampled
            positions += range(item.start + item.num_tokens + 1 - num_sampled, item.start + item.num_tokens + 1)
            num_logprobs += [_NO_LOGPROBS if params.logprobs is None else params.logprobs] * num_sampled
        rows_of_logits = np.array(rows, np.int64)
        return rows_of_logits, {
            "logits_indices": np.array(indices, np.int32),
            "target_ids": np.array(targets, np.int32),
            "sample_positions": np.array(positions, np.int32),
            **self._gather(rows_of_logits),
            "num_logprobs": np.array(num_logprobs, np.int32),
        }

    def _gather(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the sampling parameters of `rows`, int64 [L], as fields of the step with L entries."""
        return {name: column[rows] for name, column in self._choices.items()}

    def _sampling_metadata(
        self, output: SchedulerOutput, rows: np.ndarray, columns: dict[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], GrammarBitmask | None]:
        """Return bias, penalties and masks of the rows of logits that need any."""
        is_early = columns["sample_positions"] < self._unconstrained_from[rows]  # [L]
        more = (columns["target_ids"] == _SAMPLE) & is_early  # [L]
        if not more.any():
            return NO_BIAS, None
        indices = np.flatnonzero(more)
        item_of_row = {item.seq.row: item for item in output.scheduled}
        constrained = []
        for index, row, position in zip(indices, rows[indices], columns["sample_positions"][indices], strict=True):
            item = item_of_row.get(int(row))
            seq, drafts = (output.decodes.seqs[row], ()) if item is None else (item.seq, item.drafts)
            assert seq is not None
            constrained.append((int(index), seq, int(position) - seq.num_prompt_tokens, drafts))
        sections, masks = build_sampling_metadata(constrained, self.vocab_size)
        if "penalty_rows" in sections and (new := self._without_history(constrained, output.step_id)):
            sections |= history_sections(new)
        return sections, masks

    def _without_history(self, constrained: list[ConstrainedRow], step_id: int) -> list[Sequence]:
        """Return the sequences that sample with penalties for the first time in their row."""
        new: dict[int, Sequence] = {}
        for _, seq, num_generated, _ in constrained:
            is_new = self._history_step[seq.row] in (_NEVER, step_id) and seq.row not in new
            if is_new and penalises(seq.request.params):
                assert num_generated == seq.num_generated_tokens, "a history with a token that is not known yet"
                new[seq.row] = seq
                self._history_step[seq.row] = step_id
        return list(new.values())


def _table_entries(new_blocks: list[TableEntry]) -> dict[str, np.ndarray]:
    """Return the step's fields for block tables: each changed entry once, with the block of the last write."""
    written = {(group, row, column): block for group, row, column, block in new_blocks if group != UNSENT}
    if not written:
        return {}
    groups, rows, columns = np.array(list(written), np.int32).T  # [N]
    return {
        "table_groups": groups.astype(np.uint8),
        "table_rows": rows,
        "table_columns": columns,
        "table_blocks": np.array(list(written.values()), np.int32),
    }


def _concatenated(scheduled: list[ScheduledTokens]) -> list[int]:
    token_ids: list[int] = []
    for item in scheduled:
        known = item.seq.token_ids[item.start : item.start + item.num_tokens]
        token_ids += known or [NOT_KNOWN]
        token_ids += item.drafts
    return token_ids


def _num_drafts(output: SchedulerOutput) -> np.ndarray:
    """Return the number of drafts of each sequence, int32 [S], for a step with drafts."""
    return _joined(np.zeros(len(output.decodes.rows), np.int32), [len(item.drafts) for item in output.scheduled])


def _pooling(output: SchedulerOutput) -> dict[str, np.ndarray]:
    first = len(output.decodes.rows)
    wanted = [(s, item.seq, item.seq.pooling) for s, item in enumerate(output.scheduled, first) if item.seq.pooling]
    if not wanted:
        return {}
    columns = {
        "pool_seqs": [s for s, _, _ in wanted],
        "pool_kinds": [KINDS.index(pooling.kind) for _, _, pooling in wanted],
        "pool_lens": [seq.num_prompt_tokens for _, seq, _ in wanted],
        "pool_second": [pooling.second_text for _, _, pooling in wanted],
        "pool_num_ids": [len(pooling.token_ids) for _, _, pooling in wanted],
        "pool_ids": [token for _, _, pooling in wanted for token in pooling.token_ids],
    }
    return {name: np.array(numbers, np.int32) for name, numbers in columns.items()}


def _kv_copies(copies: Copies) -> dict[str, np.ndarray]:
    numbers = np.array([(kind, block, slot) for kind, block, slot, _ in copies.commands], np.int32)
    digests = b"".join(digest.ljust(DIGEST_BYTES, b"\0") for _, _, _, digest in copies.commands)
    return {"kv_copies": numbers, "kv_digests": np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)}


def _joined(column: np.ndarray, more: list[int]) -> np.ndarray:
    return np.concatenate((column, np.array(more, column.dtype)))


class SampledRows:
    """Maps rows of the engine's tables to the rows of logits that sampled for them, for the last two steps."""

    def __init__(self, max_num_seqs: int) -> None:
        self._index_of = np.full((2, max_num_seqs), _NONE, np.int32)
        self._step_ids = [0, 0]
        self._noted: list[np.ndarray | None] = [None, None]  # the rows of each step if all of them sampled
        self._in_order = -1 - np.arange(max_num_seqs, dtype=np.int32)

    def note(self, step_id: int, rows: np.ndarray, samples: np.ndarray | None) -> None:
        """Record the rows of a step. `rows`, int64 [L]: the table row of each row of logits; not changed later.

        `samples`, bool [L]: whether a token is sampled; None: in all rows.
        """
        half = step_id % 2
        self._step_ids[half] = step_id
        if samples is None and rows is self._noted[half]:
            return
        self._noted[half] = rows if samples is None else None
        index_of = self._index_of[half]
        index_of[:] = _NONE
        indices = np.arange(len(rows)) if samples is None else samples.nonzero()[0]
        index_of[rows[indices]] = indices

    def references(self, step_id: int, rows: np.ndarray) -> np.ndarray:
        """Return references, for the `token_ids` of step `step_id`, to the tokens that the previous step samples for
        `rows`.
        """
        before = step_id - 1
        assert self._step_ids[before % 2] == before, "the step before was not built"
        if rows is self._noted[before % 2]:
            return self._in_order[: len(rows)].copy()
        indices = self._index_of[before % 2, rows]
        assert (indices != _NONE).all(), "the step before samples no token for a sequence whose newest is unknown"
        return -1 - indices
