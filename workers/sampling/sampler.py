"""Sampling of one token for each row of logits, which are sharded over the ranks by vocabulary.

`workers/sampling_parameters.py` defines the order of operations, whose step numbers are used here.

Logprobs and ranks are of the raw logits, before step 1. A row with NaN, with +inf or without any finite value is
reported as not finite, and a row whose ids are all banned as banned; neither changes other rows. Steps 1 to 3 keep
broken logits visible: NaN stays NaN, and +inf stays or becomes NaN, so the largest logit after them shows both.

Every rank makes the same collective calls: one gather per step, and more only for rows with only top-p, for logprobs
and for kept sets beyond the short lists. A single rank with the C++ kernels does all of it in one call, with the same
steps (`csrc/sampling/sampling.cpp`) and the same bits.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.topology import vocab_slice
from oarlock.workers.kernels.cpu.sampling import can_serve, log_totals
from oarlock.workers.kernels.cpu.sampling import sample as kernel_sample
from oarlock.workers.protocol import ALL_BANNED, FINITE, NONFINITE, StepMetadata, StepOutput
from oarlock.workers.sampling.candidates import decode
from oarlock.workers.sampling.logits_processors import apply_logits_processors, bans_all
from oarlock.workers.sampling.logits_shard import LogitsShard, LogitsShards, floors, total_mass
from oarlock.workers.sampling.noise import row_keys
from oarlock.workers.sampling.token_histories import Histories, TokenHistories
from oarlock.workers.sampling.top_k_top_p import (
    CANDIDATES,
    Filters,
    draw_from_list,
    draw_from_long_list,
    draw_in_rounds,
)
from oarlock.workers.sampling_parameters import ROW_NAMES, have_floor

_KEPT = 64  # cached arrays of states, each for a different number of rows


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Logprobs of R rows; the same on every rank."""

    logprobs: Tensor  # float64 [R]
    ranks: Tensor  # int64 [R]   1: most likely; equal logits share the best rank
    top_ids: Tensor  # int64 [R, K]
    top_logprobs: Tensor  # float64 [R, K]


def raw_logprobs(tp: TensorParallel, shard: LogitsShard, rows: Tensor, tokens: Tensor, count: int) -> RawLogprobs:
    """Return logprobs of `tokens` [R] in `rows` [R] of the raw logits, with the `count` most likely of each row.

    Each rank contributes its sums of exponentials, its largest logits and its counts.
    """
    index = tokens - shard.first_id
    width = shard.x.shape[1]
    is_local = (index >= 0) & (index < width)
    value = shard.x[rows, index.clamp(0, width - 1)].masked_fill(~is_local, float("-inf"))
    keys = shard.best(rows, count) if count else tokens.new_empty(len(rows), 0)
    numbers = torch.stack([shard.top[rows].double(), value.double()], 1).view(torch.int64)
    gathered = tp.all_gather(torch.cat([numbers, keys], 1))  # [ranks, R, 2 + K]
    tops, values = gathered[..., :2].contiguous().view(torch.float64).unbind(2)  # each [ranks, R]
    peak = tops.amax(0)
    mass = total_mass(tp, shard, rows, torch.ones_like(peak), peak.float())
    total = log_totals(peak, mass) if can_serve(peak.device) else peak + mass.log()
    value = values.amax(0)  # [R]   only one rank has the token
    merged = gathered[..., 2:].transpose(0, 1).flatten(1).topk(count).values
    top_values, top_ids = decode(merged)
    ranks = 1 + tp.all_gather(shard.count_above(rows, value.float())).sum(0)
    return RawLogprobs(value - total, ranks, top_ids, top_values.double() - total.unsqueeze(1))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows among the L by their sampling algorithm: indices on the device."""

    greedy: Tensor
    drawn: Tensor  # sampled from all ids
    filtered: Tensor  # sampled from the ids that floors, top-k or top-p keep
    massed: Tensor  # indices into `filtered` of the rows whose total mass is needed


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The merged results of the first gather; the same on every rank."""

    peak: Tensor  # float32 [L]   largest adjusted logit; NaN if any logit is NaN
    tokens: Tensor  # int64 [L]   of greedy and drawn rows
    keys: Tensor  # int64 [F, C]   the best candidates of filtered rows
    totals: Tensor  # float64 [F]   their total masses if needed, see `draw_from_list`


class Sampler:
    """Sampler of the logits of `vocab_local` ids from `vocab_start` on; ids from `vocab_size` on are padding (-inf)."""

    def __init__(
        self, tp: TensorParallel, vocab_start: int, vocab_local: int, vocab_size: int, histories: Histories
    ) -> None:
        """Set the shard. `histories`: of the rows with penalties; the caller writes them and adds to them."""
        self.tp = tp
        self.histories = histories
        self.vocab_size = vocab_size
        self._shards = LogitsShards(vocab_start, vocab_local, vocab_slice(vocab_size, tp.size))

    def sample(self, logits: Tensor, step: StepMetadata) -> tuple[Tensor, StepOutput | None]:
        """Return the tokens, integers [L], on every rank, and the step's output on rank 0, None on others.

        `logits`: this rank's float32 [L, vocab_local]; overwritten.
        """
        logits = logits.contiguous()
        if self.tp.size == 1 and can_serve(logits.device):
            assert isinstance(self.histories, TokenHistories)
            histories = self.histories.entries(step) if len(step.penalty_rows) else ()
            tops, columns = kernel_sample(logits, step, histories, self.vocab_size)
            finite = _all_finite(len(logits)) if tops is None else _states(step, tops, self.vocab_size)
            output = StepOutput(step.step_id, finite=finite, out_of_memory=False, **columns)
            return torch.from_numpy(output.token_ids), output
        reporting = (step.num_logprobs >= 0) | (step.target_ids >= 0)
        adjusted = apply_logits_processors(logits, step, self.histories, self._shards.first_id, reporting)
        shard = self._shards(logits)
        tokens, peak = self._choose(shard, step)
        scored = torch.from_numpy(step.target_ids).to(logits.device, torch.int64)
        tokens = torch.where(scored >= 0, scored, tokens)
        reported_rows = np.flatnonzero(reporting)
        answers = None
        if len(reported_rows):
            if adjusted is not None:
                adjusted.undo(logits)
                shard = self._shards(logits)
            rows = torch.from_numpy(reported_rows).to(logits.device)
            answers = raw_logprobs(self.tp, shard, rows, tokens[rows], max(0, step.max_num_logprobs))
        if self.tp.rank > 0:
            return tokens, None
        return tokens, _output(step, tokens, _states(step, peak.cpu().numpy(), self.vocab_size), reported_rows, answers)

    def _choose(self, shard: LogitsShard, step: StepMetadata) -> tuple[Tensor, Tensor]:
        """Run steps 4 to 9: tokens int64 [L], 0 for scored and broken rows, and the largest logits [L]."""
        rows = _row_kinds(step, self.vocab_size, shard.x.device)
        filters = _columns(step, self.vocab_size, shard.x.device)
        first = self._first_round(shard, rows, filters)
        finite = first.peak.isfinite()
        tokens = first.tokens
        if len(rows.filtered):
            few = filters.take(rows.filtered)
            few.floor = floors(self.tp, shard, rows.filtered, first.peak[rows.filtered], few)
            tokens[rows.filtered] = self._draw_filtered(shard, rows.filtered, first, few, finite)
        return tokens.masked_fill_(~finite, 0), first.peak

    def _first_round(self, shard: LogitsShard, rows: _Rows, filters: Filters) -> _Gathered:
        """Compute maxima, scores and candidates of this rank's shard, and merge those of all ranks by one gather."""
        top = shard.top.double()
        size = len(top)
        scores = top.clone()
        ids = torch.zeros(size, dtype=torch.int64, device=top.device)
        if len(rows.greedy):
            ids[rows.greedy] = shard.argmax(rows.greedy)
        if len(rows.drawn):
            drawn = filters.take(rows.drawn)
            low = torch.full_like(drawn.temperature, float("-inf"), dtype=torch.float32)
            scores[rows.drawn], ids[rows.drawn] = shard.draw(
                rows.drawn, drawn.temperature, drawn.keys, low, torch.zeros_like(rows.drawn)
            )
        few = rows.filtered
        keys = shard.best(few, CANDIDATES)  # [F, C]
        parts = [top.view(torch.int64), scores.view(torch.int64), ids + shard.first_id]
        gathered = self.tp.all_gather(torch.cat([*parts, keys.flatten()]))
        tops, scores = gathered[:, : 2 * size].view(torch.float64).unflatten(1, (2, size)).unbind(1)  # [ranks, L]
        winner = scores.argmax(0, keepdim=True)  # on equal scores the first rank wins, which has the lowest ids
        tokens = gathered[:, 2 * size : 3 * size].gather(0, winner).squeeze(0)
        peak = tops.amax(0)
        keys = gathered[:, 3 * size :].reshape(self.tp.size, len(few), CANDIDATES).transpose(0, 1).flatten(1)
        return _Gathered(peak.float(), tokens, keys.topk(CANDIDATES).values, self._totals(shard, rows, peak, filters))

    def _totals(self, shard: LogitsShard, rows: _Rows, peak: Tensor, filters: Filters) -> Tensor:
        """Return the masses of filtered rows, float64 [F]; 0 for rows whose nucleus does not need it."""
        totals = torch.zeros_like(filters.temperature[rows.filtered])
        if len(rows.massed):
            wanted = rows.filtered[rows.massed]
            totals[rows.massed] = total_mass(self.tp, shard, wanted, filters.temperature[wanted], peak[wanted].float())
        return totals

    def _draw_filtered(
        self, shard: LogitsShard, few: Tensor, first: _Gathered, filters: Filters, finite: Tensor
    ) -> Tensor:
        """Return the tokens int64 [F] of the filtered rows: from the short lists, else from longer lists or in
        rounds."""
        tokens, enough = draw_from_list(first.keys, filters, first.totals)
        short = ~enough & finite[few]
        longer = (short & (filters.top_k > 0)).nonzero().squeeze(1)
        if len(longer):
            tokens[longer] = draw_from_long_list(self.tp, shard, few[longer], filters.take(longer))
        rounds = (short & (filters.top_k == 0)).nonzero().squeeze(1)
        if len(rounds):
            tokens[rounds] = draw_in_rounds(
                self.tp, shard, few[rounds], first.peak[few[rounds]], filters.take(rounds), first.totals[rounds]
            )
        return tokens


def _row_kinds(step: StepMetadata, vocab_size: int, device: torch.device) -> _Rows:
    """Sort rows by their sampling algorithm. Rows that only score a given token are in none of the groups."""
    chosen = step.target_ids < 0
    greedy = chosen & ((step.temperature == 0) | (step.top_k == 1))
    filtering = (step.top_p < 1) | have_floor(step) | ((step.top_k > 0) & (step.top_k < vocab_size))
    filtered = chosen & ~greedy & filtering
    drawn = chosen & ~greedy & ~filtering

    def indices(mask: np.ndarray) -> Tensor:
        return torch.from_numpy(np.flatnonzero(mask)).to(device)

    massed = _needs_total(step, vocab_size)[filtered]
    return _Rows(indices(greedy), indices(drawn), indices(filtered), indices(massed))


def _needs_total(step: StepMetadata, vocab_size: int) -> np.ndarray:
    """Return the rows sampled with top-p as the only filter: bool [L]."""
    without_top_k = (step.top_k == 0) | (step.top_k >= vocab_size)
    return (step.target_ids < 0) & (step.top_p < 1) & ~have_floor(step) & without_top_k


def _columns(step: StepMetadata, vocab_size: int, device: torch.device) -> Filters:
    columns = {}
    for name in ROW_NAMES:
        array = torch.from_numpy(getattr(step, name)).to(device)
        columns[name] = array.to(torch.float64 if array.is_floating_point() else torch.int64)
    columns["top_k"] = torch.where(columns["top_k"] < vocab_size, columns["top_k"], 0)
    keys = torch.from_numpy(row_keys(step.seeds, step.sample_positions)).to(device)
    return Filters(**columns, keys=keys, floor=torch.full_like(columns["temperature"], float("-inf")))


@lru_cache(_KEPT)
def _all_finite(rows: int) -> np.ndarray:
    states = np.full(rows, FINITE, np.uint8)
    states.flags.writeable = False  # shared by many outputs
    return states


def _states(step: StepMetadata, peaks: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return `StepOutput.finite` for each row's largest adjusted logit, which is -inf if every allowed logit is."""
    are_finite = np.isfinite(peaks)
    if are_finite.all():
        return _all_finite(len(peaks))
    states = np.where(are_finite, FINITE, NONFINITE).astype(np.uint8)
    for row in np.flatnonzero(np.isneginf(peaks)):
        if bans_all(step, row, vocab_size):
            states[row] = ALL_BANNED
    return states


def _output(
    step: StepMetadata, tokens: Tensor, states: np.ndarray, reported_rows: np.ndarray, answers: RawLogprobs | None
) -> StepOutput:
    """Return the step's output.

    Rows without logprobs hold zeros. Columns beyond a row's own number of logprobs hold id -1.
    """
    rows = len(tokens)
    out = StepOutput(step.step_id, tokens.cpu().numpy().astype(np.int32), states)
    if answers is None:
        return out
    count = answers.top_ids.shape[1]
    out.logprobs = np.zeros(rows, np.float32)
    out.ranks = np.zeros(rows, np.int32)
    out.top_ids = np.full((rows, count), -1, np.int32)
    out.top_logprobs = np.full((rows, count), -np.inf, np.float32)
    wanted = np.arange(count) < step.num_logprobs[reported_rows, None]
    out.logprobs[reported_rows] = answers.logprobs.cpu().numpy()
    out.ranks[reported_rows] = answers.ranks.cpu().numpy()
    out.top_ids[reported_rows] = np.where(wanted, answers.top_ids.cpu().numpy(), -1)
    out.top_logprobs[reported_rows] = np.where(wanted, answers.top_logprobs.cpu().numpy(), -np.inf)
    return out


def num_accepted(step: StepMetadata, sampled: Tensor) -> Tensor:
    """Return the number of correct drafts of each sequence: int32 [S]. Waits for no device.

    `sampled` integers [L]: the tokens of all rows of logits. `step.num_drafts` must not be empty.

    A draft is correct if it and all drafts before it equal the tokens sampled at their positions. Noise is keyed by
    seed and position, so the token sampled after correct drafts is the token that would have been sampled without
    drafts. Accepting while sample and draft are equal is therefore exact for greedy and for seeded sampling.
    """
    drafts = step.num_drafts
    most = int(drafts.max(initial=0))
    firsts = step.query_start_loc[1:] - drafts  # [S]   first draft, an index among the T tokens
    rows = np.searchsorted(step.logits_indices, firsts - 1)  # [S]   row of the newest token among the L rows
    offset = np.arange(most)
    is_draft = offset < drafts[:, None]  # [S, most]
    guesses = step.token_ids[np.where(is_draft, firsts[:, None] + offset, 0)]
    positions = np.where(is_draft, rows[:, None] + offset, 0)
    guesses = torch.from_numpy(np.where(is_draft, guesses, -1).astype(np.int64)).to(sampled.device, non_blocking=True)
    right = sampled[torch.from_numpy(positions).to(sampled.device, non_blocking=True)] == guesses
    return right.int().cumprod(1).sum(1, dtype=torch.int32)
