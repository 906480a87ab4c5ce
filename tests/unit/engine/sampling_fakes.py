"""Which ids a request may sample next, by the definition of each parameter, and the same read from a step."""

from collections import Counter

import numpy as np

from oarlock.engine.types import Grammar, SamplingParams
from oarlock.workers.protocol import StepMetadata

VOCAB = 64


def allowed_ids(params: SamplingParams, generated: list[int]) -> set[int]:
    """The ids that `params` allow after `generated`, by their definition."""
    banned = {token for token, value in params.logit_bias if value == -100}
    banned |= {w[-1] for w in params.bad_words if generated[len(generated) - len(w) + 1 :] == list(w[:-1])}
    if len(generated) < params.min_tokens:
        banned |= {*params.eos_token_ids, *params.stop_token_ids}
    allowed = set(range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids) - banned
    if params.grammar is not None:
        allowed &= CountingGrammar.next_ids(len(generated))
    return allowed & {token for token, value in params.logit_bias if value == 100} or allowed


def past_of(params: SamplingParams, prompt: tuple[int, ...], generated: list[int]) -> list[tuple]:
    """The additions and penalties of the next token, by their definition."""
    numbers = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    past: list[tuple] = [(token, value) for token, value in params.logit_bias if abs(value) < 100]
    if numbers != (1.0, 0.0, 0.0):
        counts = dict.fromkeys(prompt if params.repetition_penalty != 1 else (), 0) | Counter(generated)
        past += [(*np.float32(numbers).tolist(), token, count) for token, count in counts.items()]
    return sorted(past)


class CountingGrammar:
    """A matcher that allows every third id in turn and is complete after a number of tokens."""

    expected_s = 0.0

    def __init__(self, grammar: Grammar) -> None:
        self.num_left = int(grammar.text)
        self.num_accepted = 0
        self.knows_end = self.num_left % 2 == 0

    @staticmethod
    def next_ids(num_accepted: int) -> set[int]:
        return {token for token in range(VOCAB) if token % 3 == num_accepted % 3}

    def fill_masks(self, drafts, into: np.ndarray) -> int | None:
        """Grammars of an odd number of tokens find out here that they are complete, and the others in `accept`."""
        for row, mask in enumerate(into):
            num_accepted = self.num_accepted + row
            if num_accepted >= self.num_left:
                into[row:] = 0xFFFFFFFF
                self.knows_end = True
                return row
            mask[:] = 0
            for token in self.next_ids(num_accepted):
                mask[token // 32] |= np.uint32(1 << token % 32)
            if row < len(drafts) and drafts[row] not in self.next_ids(num_accepted):
                into[row + 1 :] = 0xFFFFFFFF
                break
        return None

    def accept(self, token_ids) -> bool:
        for token in token_ids:
            assert token in self.next_ids(self.num_accepted), "a token that the mask forbids"
            self.num_accepted += 1
        return self.num_accepted >= self.num_left and self.knows_end

    def only_end_is_left(self) -> bool:
        return self.num_accepted >= self.num_left


class BreakingGrammar(CountingGrammar):
    """One that raises where it should be complete: for its mask (`regex`), or when a token comes (`choice`). If only
    drafts lead there, it raises when they are accepted."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__(grammar)
        self._is_mask = grammar.kind == "regex"

    def fill_masks(self, drafts, into: np.ndarray) -> int | None:
        if self._is_mask and self.num_accepted == self.num_left:
            raise RuntimeError("no such rule")
        known = self.num_left - self.num_accepted  # rows
        super().fill_masks(drafts[: known - 1], into[:known])
        into[known:] = 0xFFFFFFFF
        return None

    def accept(self, token_ids) -> bool:
        if self.num_accepted + len(token_ids) >= self.num_left + self._is_mask:
            raise RuntimeError("no such token")
        super().accept(token_ids)
        return False


def matcher_of(grammar: Grammar) -> CountingGrammar:
    return (CountingGrammar if grammar.kind == "lark" else BreakingGrammar)(grammar)


class FakeHistories:
    """How often each id was generated in each row of the engine, as ranks keep it."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, int]] = {}

    def write(self, step: StepMetadata) -> None:
        for number, row in enumerate(step.history_rows.tolist()):
            here = slice(step.history_starts[number], step.history_starts[number + 1])
            ids, counts = step.history_ids[here].tolist(), step.history_counts[here].tolist()
            self._counts[row] = dict(zip(ids, counts, strict=True))

    def spoil(self, row: int) -> None:
        self._counts.pop(row, None)

    def of(self, step: StepMetadata, p: int) -> dict[int, int]:
        """Counts of the tokens before the one that the row `p` with penalties samples, drafts included."""
        counts = dict(self._counts[self._row(step, p)])
        for draft in self._drafts(step, p):
            counts[draft] = counts.get(draft, 0) + 1
        return counts

    def add(self, step: StepMetadata, tokens: list[int]) -> None:
        for p, row in enumerate(step.penalty_rows.tolist()):
            drafts = self._drafts(step, p)
            if drafts == tokens[row - len(drafts) : row]:
                counts = self._counts[self._row(step, p)]
                counts[tokens[row]] = counts.get(tokens[row], 0) + 1

    def _seq(self, step: StepMetadata, p: int) -> int:
        return int(np.searchsorted(step.query_start_loc, step.logits_indices[step.penalty_rows[p]], "right")) - 1

    def _row(self, step: StepMetadata, p: int) -> int:
        return int(step.rows[self._seq(step, p)])

    def _drafts(self, step: StepMetadata, p: int) -> list[int]:
        seq, index = self._seq(step, p), int(step.logits_indices[step.penalty_rows[p]])
        num_drafts = int(step.num_drafts[seq]) if len(step.num_drafts) else 0
        return step.token_ids[step.query_start_loc[seq + 1] - num_drafts : index + 1].tolist()


def choices_of(step: StepMetadata, histories: FakeHistories) -> tuple[list[set[int]], list[list[tuple]]]:
    """By row of logits: banned ids, and what else moves logits, as in `past_of`."""
    histories.write(step)
    banned: list[set[int]] = [set() for _ in step.logits_indices]
    past: list[list[tuple]] = [[] for _ in step.logits_indices]
    for row, token, value in zip(step.bias_rows, step.bias_ids.tolist(), step.bias_values.tolist(), strict=True):
        if value == -np.inf:
            banned[row].add(token)
        else:
            past[row].append((token, value))
    for row, words in zip(step.mask_rows, step.mask_bits, strict=True):
        assert len(words) == VOCAB // 32
        banned[row] |= {token for token in range(VOCAB) if not int(words[token // 32]) >> token % 32 & 1}
    for p, row in enumerate(step.penalty_rows):
        numbers = (float(step.repetition[p]), float(step.frequency[p]), float(step.presence[p]))
        past[row] += [(*numbers, token, count) for token, count in histories.of(step, p).items()]
    return banned, past
