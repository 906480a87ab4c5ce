"""Builds the arrays of a step, `StepMetadata`, from what the scheduler decided.

Block tables and sampling parameters are kept in tables addressed by a sequence's row; a step writes only the entries
that changed and gathers the rows it needs. Knows numpy and the step's layout. Does not know policy or transport.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.input_batch.sampled_rows import SampledRows
from engine.input_batch.sampling_metadata import NO_BIAS, GrammarBitmask, build_sampling_metadata, wanted_until
from engine.scheduler.output import ScheduledTokens, SchedulerOutput
from engine.scheduler.sequence import Sequence
from workers.protocol import NULL_BLOCK, StepMetadata

_NO_LOGPROBS = -1
_SAMPLE = -1
_NOT_KNOWN = -1


class BuiltStep(NamedTuple):
    """A step for the ranks, and what writes its `mask_bits` after its submission; None when they are complete."""

    step: StepMetadata
    masks: GrammarBitmask | None


class InputBatch:
    """Builds `StepMetadata` from `SchedulerOutput`. The arrays of a step are not changed by later ones."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._sampled_rows = SampledRows(max_num_seqs)
        self._tables = np.full((max_num_seqs, -(-max_model_len // block_size)), NULL_BLOCK, np.int32)
        # by row, written when a sequence gets the row
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_p = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs = np.zeros(max_num_seqs, np.int32)
        self._unconstrained_from = np.zeros(
            max_num_seqs, np.int64
        )  # position from which on no bias, penalty or mask is needed

    def build(self, output: SchedulerOutput) -> BuiltStep:
        """Arrays for `output`. Building the same output twice gives the same arrays."""
        for seq in output.new_rows:
            if seq.row >= 0:
                self._assign(seq)
        for row, column, block in output.new_blocks:
            self._tables[row, column] = block
        scheduled = output.scheduled
        rows = np.array([item.seq.row for item in scheduled], np.int64)  # [S]
        starts = np.array([item.start for item in scheduled], np.int64)  # [S]
        counts = np.array([item.num_tokens for item in scheduled], np.int64)  # [S]
        query_start_loc = np.zeros(len(scheduled) + 1, np.int64)  # [S + 1]
        np.cumsum(counts, out=query_start_loc[1:])
        seq_lens = starts + counts  # [S]
        if len(scheduled) == query_start_loc[-1]:  # every sequence decodes
            newest = [
                known[item.start] if item.start < len(known := item.seq.token_ids) else _NOT_KNOWN for item in scheduled
            ]
            token_ids = np.array(newest, np.int32)
            positions, row_of_token = starts, rows
        else:
            token_ids = np.array(_concatenated(scheduled), np.int32)
            first = np.repeat(starts - query_start_loc[:-1], counts)
            positions, row_of_token = first + np.arange(len(token_ids)), np.repeat(rows, counts)  # [T]
        blocks = self._tables[row_of_token, positions // self.block_size].astype(np.int64)  # [T]
        width = -(-int(seq_lens.max()) // self.block_size)
        rows_of_logits, columns = self._logits_columns(scheduled, rows, seq_lens, query_start_loc)
        unknown = np.flatnonzero(token_ids == _NOT_KNOWN)
        if len(unknown):
            token_ids[unknown] = self._sampled_rows.references(output.step_id, row_of_token[unknown])
        self._sampled_rows.note(output.step_id, rows_of_logits, columns["target_ids"] == _SAMPLE)
        sampling, masks = self._sampling_metadata(scheduled, rows_of_logits, columns)
        step = StepMetadata(
            step_id=output.step_id,
            token_ids=token_ids,
            positions=positions.astype(np.int32),
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start_loc=query_start_loc.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self._tables[rows, :width],
            **columns,
            **sampling,
        )
        return BuiltStep(step, masks)

    def _assign(self, seq: Sequence) -> None:
        """Write the table entries of the row that `seq` has got."""
        params, row = seq.request.params, seq.row
        self._tables[row] = NULL_BLOCK
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._top_k[row] = params.top_k
        self._min_p[row] = params.min_p
        self._seeds[row] = params.seed
        self._num_logprobs[row] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._unconstrained_from[row] = wanted_until(seq)

    def _logits_columns(
        self, scheduled: list[ScheduledTokens], rows: np.ndarray, seq_lens: np.ndarray, query_start_loc: np.ndarray
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The table row of each of the L rows of logits, int64 [L], and the fields of the step over L."""
        if any(item.num_scored for item in scheduled):
            return self._scoring_columns(scheduled, query_start_loc)
        wants = np.array([item.wants_logits for item in scheduled], bool)  # [S]
        if wants.all():
            last, rows, positions = query_start_loc[1:] - 1, rows, seq_lens
        else:
            last, rows, positions = query_start_loc[1:][wants] - 1, rows[wants], seq_lens[wants]
        targets = np.full(len(rows), _SAMPLE, np.int32)
        return rows, self._columns(rows, last, targets, positions, self._num_logprobs[rows])

    def _scoring_columns(
        self, scheduled: list[ScheduledTokens], query_start_loc: np.ndarray
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The same when prompt tokens are scored: several rows of logits per sequence."""
        rows: list[int] = []
        indices: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        num_logprobs: list[int] = []
        for item, first in zip(scheduled, query_start_loc.tolist(), strict=False):
            seq, params = item.seq, item.seq.request.params
            end = item.score_from + item.num_scored
            rows += [seq.row] * (item.num_scored + item.wants_logits)
            indices += range(first + item.score_from - item.start, first + end - item.start)
            targets += seq.token_ids[item.score_from + 1 : end + 1]
            positions += range(item.score_from + 1, end + 1)
            num_logprobs += [params.prompt_logprobs or 0] * item.num_scored
            if item.wants_logits:
                indices.append(first + item.num_tokens - 1)
                targets.append(_SAMPLE)
                positions.append(item.start + item.num_tokens)
                num_logprobs.append(_NO_LOGPROBS if params.logprobs is None else params.logprobs)
        rows_of_logits = np.array(rows, np.int64)
        return rows_of_logits, self._columns(
            rows_of_logits,
            np.array(indices, np.int64),
            np.array(targets, np.int32),
            np.array(positions, np.int64),
            np.array(num_logprobs, np.int32),
        )

    def _columns(
        self,
        rows: np.ndarray,
        logits_indices: np.ndarray,
        target_ids: np.ndarray,
        sample_positions: np.ndarray,
        num_logprobs: np.ndarray,
    ) -> dict[str, Any]:
        return {
            "logits_indices": logits_indices.astype(np.int32),
            "target_ids": target_ids,
            "sample_positions": sample_positions.astype(np.int32),
            "temperature": self._temperature[rows],
            "top_p": self._top_p[rows],
            "top_k": self._top_k[rows],
            "min_p": self._min_p[rows],
            "seeds": self._seeds[rows],
            "num_logprobs": num_logprobs,
        }

    def _sampling_metadata(
        self, scheduled: list[ScheduledTokens], rows: np.ndarray, columns: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], GrammarBitmask | None]:
        """Bias, penalties and masks of the rows of logits that ask for any."""
        is_early = columns["sample_positions"] < self._unconstrained_from[rows]  # [L]
        more = (columns["target_ids"] == _SAMPLE) & is_early  # [L]
        if not more.any():
            return NO_BIAS, None
        indices = np.flatnonzero(more)
        seq_of_row = {item.seq.row: item.seq for item in scheduled}
        asking = []
        for index, row, position in zip(indices, rows[indices], columns["sample_positions"][indices], strict=True):
            seq = seq_of_row[int(row)]
            asking.append((int(index), seq, int(position) - seq.num_prompt_tokens))
        return build_sampling_metadata(asking, self.vocab_size)


def _concatenated(scheduled: list[ScheduledTokens]) -> list[int]:
    token_ids: list[int] = []
    for item in scheduled:
        known = item.seq.token_ids[item.start : item.start + item.num_tokens]
        token_ids += known or [_NOT_KNOWN]
    return token_ids
