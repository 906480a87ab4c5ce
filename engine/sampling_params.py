"""Sampling parameters of one request: plain numbers, checked by the server, read by the engine."""

from dataclasses import dataclass
from operator import attrgetter

from oarlock.workers.sampling_parameters import PENALTIES, ScalarParams

_penalties, _NO_PENALTIES = attrgetter(*(row.name for row in PENALTIES)), tuple(row.off for row in PENALTIES)
BAN, FORCE = -100.0, 100.0  # values of `logit_bias`: the id is never chosen; only forced ids are chosen


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole answer must match."""

    kind: str  # json_schema | regex | lark | choice | json_object
    text: str  # the schema or choices as JSON, the expression, or the grammar; empty for json_object
    param: str = "structured_outputs"  # the field of the request to blame when it does not compile


@dataclass(frozen=True, slots=True)
class SamplingParams(ScalarParams):
    """Parameters that choose tokens; those that are one number are fields of `ScalarParams`.

    The server checks their ranges, the engine their ids against the vocabulary. top-p is above 0 and top-k not below:
    what means greedy there is temperature 0 here.
    """

    max_tokens: int = 16  # the most to generate; the context may end it earlier. 0: only score the prompt
    seed: int = 0  # always drawn by the server: nothing below it is random
    min_tokens: int = 0  # stop tokens are banned until this many are generated
    eos_token_ids: tuple[int, ...] = ()  # empty when the caller ignores them
    stop_token_ids: tuple[int, ...] = ()  # asked for by the caller
    logprobs: int | None = None  # None: none; k: the sampled token's and the k best
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit); BAN and FORCE as named above
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    grammar: Grammar | None = None


def penalises(params: SamplingParams) -> bool:
    return _penalties(params) != _NO_PENALTIES


def banned_always(params: SamplingParams) -> list[int]:
    """Ids that no step of the request may choose: those `logit_bias` bans and bad words of a single token."""
    ids = [token for token, value in params.logit_bias if value <= BAN]
    return ids + [word[0] for word in params.bad_words if len(word) == 1]
