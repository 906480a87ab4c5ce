"""Workloads of a run: conversations of one or more turns from random prompts, and the times at which they arrive.

random          every prompt is new shared-prefix   one of a few prefixes, then a new part multi-turn      every turn
includes all earlier messages and the server's responses trace           lengths, and shared blocks, of a file

A prompt depends only on seed, key and length, so every server gets the same prompts with the same seed: as token ids,
or as words for servers that take only text.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from oarlock.base.errors import StartupError

# Words that are one token, with the space before them, in the vocabularies of the large model families.
_TEXT = """
the of and to in for is on with as by this be at from or if it not an that are which but has have can all when no one
new time first name number list value type data string set line file code object class function return
"""
WORDS = tuple(_TEXT.split())
Piece = list[int] | str


@dataclass(frozen=True, slots=True)
class IdPrompts:
    """Prompts of token ids. Special tokens are at either end of a vocabulary, so its first and last sixteenth are not
    drawn."""

    vocab_size: int
    seed: int

    def piece(self, key: str, tokens: int, *, begins: bool = False) -> list[int]:
        """Draw `tokens` ids. `begins` makes no difference: nothing is put before ids."""
        margin = self.vocab_size // 16
        return _draw(self.seed, key).integers(margin, self.vocab_size - margin, tokens).tolist()


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Prompts of words. Their number of tokens was measured by asking the server (see `client.choose_prompts`)."""

    seed: int
    tokens_per_word: float = 1.0
    overhead: float = 0.0  # tokens that the server adds: a beginning-of-sequence token, a chat template

    def piece(self, key: str, tokens: int, *, begins: bool = False) -> str:
        """Draw words of `tokens` tokens, each with a space before it. `begins`: the tokens that the server adds are
        included."""
        wanted = tokens - self.overhead if begins else tokens
        count = max(1, round(wanted / self.tokens_per_word))
        return "".join(f" {WORDS[number]}" for number in _draw(self.seed, key).integers(0, len(WORDS), count))


Prompts = IdPrompts | TextPrompts


def joined(pieces: list[Piece]) -> Piece:
    """Join pieces of one kind into one prompt."""
    if isinstance(pieces[0], str):
        return "".join(piece for piece in pieces if isinstance(piece, str))
    return [number for piece in pieces for number in piece if isinstance(number, int)]


def drawn_length(mean: int, spread: float, seed: int, key: str) -> int:
    """Draw an integer number of tokens, at least 1, uniform in mean * (1 - spread) ... mean * (1 + spread)."""
    if not spread:
        return mean
    return max(1, int(_draw(seed, key).integers(round(mean * (1 - spread)), round(mean * (1 + spread)) + 1)))


def _draw(seed: int, key: str) -> np.random.Generator:
    return np.random.default_rng([seed, *key.encode()])


def constant_arrivals(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Return the seconds from the start at which `count` requests are sent, at `rate` per second: shape [count],
    ascending.

    As in `get_request` of vllm/benchmarks/serve.py, intervals are gamma-distributed with shape `burstiness` and mean 1
    / rate. So 1 is a Poisson process, below 1 requests come in bursts, above 1 more evenly, and at infinity evenly.
    They are scaled so that the last of n requests is sent at n / rate exactly.
    """
    if math.isinf(rate):
        return np.zeros(count)
    times = np.cumsum(_intervals(np.full(count, rate), burstiness, seed))
    return times * (count / rate / times[-1])


def ramp_arrivals(count: int, first: float, last: float, burstiness: float, seed: int) -> np.ndarray:
    """Return arrival times at a rate that changes from `first` to `last` in equal steps per request: shape [count].

    Unlike in `constant_arrivals`, they are not scaled to the mean duration, as in vLLM.
    """
    rates = first + (last - first) * np.arange(count) / max(count - 1, 1)
    return np.cumsum(_intervals(rates, burstiness, seed))


def ramp_count(seconds: float, first: float, last: float) -> int:
    """Return the number of requests of a ramp that take `seconds` on average, at least 1."""
    mean_interval = 1 / first if first == last else math.log(last / first) / (last - first)
    return max(1, round(seconds / mean_interval))


def _intervals(rates: np.ndarray, burstiness: float, seed: int) -> np.ndarray:
    if math.isinf(burstiness):
        return 1 / rates
    return np.random.default_rng(seed).gamma(burstiness, 1 / (rates * burstiness))


_BLOCK_TOKENS = 512
_FORM = '{"timestamp": 1500, "input_length": 128, "output_length": 64}'


@dataclass(frozen=True, slots=True)
class Traced:
    """One line of a trace. `at_s`: seconds after the first."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(file: Path) -> list[Traced]:
    """Return the requests of a trace in the order of their times. Raises `StartupError` with the line that is wrong.

    The format is that of the traces published with Mooncake (github.com/kvcache-ai/Mooncake): each of `hash_ids`
    identifies a block of 512 prompt tokens, and requests with equal ids have equal blocks.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--trace {file} cannot be read: {error}.", "Give a file of JSON lines.") from None
    found = [_request(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise StartupError(f"--trace {file} is empty.", f"Each request is a line such as {_FORM}.")
    found.sort(key=lambda request: request.at_s)
    begin = found[0].at_s
    return [Traced(each.at_s - begin, each.input_tokens, each.output_tokens, each.blocks) for each in found]


def _request(line: str, location: str) -> Traced:
    fix = f"A line is such as {_FORM}; timestamps are in milliseconds."
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise StartupError(f"{location} is not JSON: {error}.", fix) from None
    if not isinstance(fields, dict):
        raise StartupError(f"{location} is not a JSON object.", fix)
    at = fields.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not at >= 0:
        raise StartupError(f"{location}: timestamp is {at!r}, not a number of at least 0.", fix)
    lengths = []
    for name in ("input_length", "output_length"):
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StartupError(f"{location}: {name} is {value!r}, not an integer of at least 1.", fix)
        lengths.append(value)
    blocks = fields.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise StartupError(
            f"{location}: hash_ids is not a list of integers.", "Correct the line, or remove every hash_ids."
        )
    return Traced(at / 1e3, lengths[0], lengths[1], tuple(blocks))


NAMES = ("random", "shared-prefix", "multi-turn", "trace")


@dataclass(frozen=True, slots=True)
class WorkloadTurn:
    """One request: the new part of its prompt, and the requested number of tokens."""

    prompt: Piece
    input_tokens: int
    output_tokens: int


class Workload(Protocol):
    """Conversations by number; the same number gives the same conversation."""

    def conversation(self, number: int) -> Sequence[WorkloadTurn]: ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt (of its new part) and of a completion, and their largest relative deviation: 0 to below 1."""

    input_tokens: int
    output_tokens: int
    spread: float = 0.0

    def drawn(self, seed: int, key: str) -> tuple[int, int]:
        """Draw prompt length and completion length for one request."""
        return (
            drawn_length(self.input_tokens, self.spread, seed, f"{key} in"),
            drawn_length(self.output_tokens, self.spread, seed, f"{key} out"),
        )


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    prompts: Prompts
    lengths: Lengths
    label: str = "random"  # part of the key: other labels give other prompts

    def conversation(self, number: int) -> Sequence[WorkloadTurn]:
        key = f"{self.label} {number}"
        input_tokens, output_tokens = self.lengths.drawn(self.prompts.seed, key)
        return [WorkloadTurn(self.prompts.piece(key, input_tokens, begins=True), input_tokens, output_tokens)]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Request n begins with prefix n mod `num_prefixes`, of `prefix_tokens` tokens."""

    prompts: Prompts
    lengths: Lengths
    prefix_tokens: int
    num_prefixes: int

    def conversation(self, number: int) -> Sequence[WorkloadTurn]:
        key = f"suffix {number}"
        input_tokens, output_tokens = self.lengths.drawn(self.prompts.seed, key)
        prefix = self.prompts.piece(f"prefix {number % self.num_prefixes}", self.prefix_tokens, begins=True)
        prompt = joined([prefix, self.prompts.piece(key, input_tokens)])
        return [WorkloadTurn(prompt, self.prefix_tokens + input_tokens, output_tokens)]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Every turn adds a new part to the earlier messages."""

    prompts: Prompts
    lengths: Lengths
    turns: int

    def conversation(self, number: int) -> Sequence[WorkloadTurn]:
        found = []
        for turn in range(self.turns):
            key = f"turn {number} {turn}"
            input_tokens, output_tokens = self.lengths.drawn(self.prompts.seed, key)
            found.append(
                WorkloadTurn(self.prompts.piece(key, input_tokens, begins=turn == 0), input_tokens, output_tokens)
            )
        return found


@dataclass(frozen=True, slots=True)
class TracedPrompts:
    prompts: Prompts
    trace: Sequence[Traced]

    def conversation(self, number: int) -> Sequence[WorkloadTurn]:
        request = self.trace[number]
        pieces: list[Piece] = []
        left = request.input_tokens
        for block in request.blocks:
            length = min(left, _BLOCK_TOKENS)
            if length:
                pieces.append(self.prompts.piece(f"block {block}", length, begins=not pieces))
            left -= length
        if left:
            pieces.append(self.prompts.piece(f"traced {number}", left, begins=not pieces))
        return [WorkloadTurn(joined(pieces), request.input_tokens, request.output_tokens)]
