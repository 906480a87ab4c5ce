"""Which ids a request may sample next, by the definition of each parameter, and the same read from a step."""

from collections import Counter

import numpy as np

from engine.sampling_params import Grammar, SamplingParams
from workers.protocol import StepMetadata

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

    def __init__(self, grammar: Grammar) -> None:
        self.num_left = int(grammar.text)
        self.num_accepted = 0

    @staticmethod
    def next_ids(num_accepted: int) -> set[int]:
        return {token for token in range(VOCAB) if token % 3 == num_accepted % 3}

    def fill_mask(self, into: np.ndarray) -> None:
        into[:] = 0
        for token in self.next_ids(self.num_accepted):
            into[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token_ids) -> bool:
        for token in token_ids:
            assert token in self.next_ids(self.num_accepted), "a token that the mask forbids"
            self.num_accepted += 1
        return self.num_accepted >= self.num_left


def choices_of(step: StepMetadata) -> tuple[list[set[int]], list[list[tuple]]]:
    """By row of logits: banned ids, and what else moves logits, as in `past_of`."""
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
        here = slice(step.history_starts[p], step.history_starts[p + 1])
        entries = zip(step.history_ids[here].tolist(), step.history_counts[here].tolist(), strict=True)
        past[row] += [(*numbers, token, count) for token, count in entries]
    return banned, past
