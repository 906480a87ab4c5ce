"""Workloads of a run: conversations of one or more turns, made from random prompts.

random          every prompt is new
shared-prefix   one of a few beginnings, then a new part
multi-turn      every turn carries what was said before, the server's answers included
trace           lengths, and shared blocks, of a file
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from oarlock.server.bench.workload.prompts import Piece, Prompts, drawn_length, joined
from oarlock.server.bench.workload.trace import BLOCK_TOKENS, Traced

NAMES = ("random", "shared-prefix", "multi-turn", "trace")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what is new in its prompt, and how many tokens are asked for."""

    prompt: Piece
    input_tokens: int
    output_tokens: int


class Workload(Protocol):
    """Conversations by number; the same number gives the same one."""

    def conversation(self, number: int) -> Sequence[Turn]: ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt (of its new part) and of an answer, and how far they may lie from that: 0 to below 1."""

    input_tokens: int
    output_tokens: int
    spread: float = 0.0

    def drawn(self, seed: int, key: str) -> tuple[int, int]:
        """Prompt length and answer length drawn for one request."""
        return (
            drawn_length(self.input_tokens, self.spread, seed, f"{key} in"),
            drawn_length(self.output_tokens, self.spread, seed, f"{key} out"),
        )


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    prompts: Prompts
    lengths: Lengths
    label: str = "random"  # part of the key: other labels give other prompts

    def conversation(self, number: int) -> Sequence[Turn]:
        key = f"{self.label} {number}"
        input_tokens, output_tokens = self.lengths.drawn(self.prompts.seed, key)
        return [Turn(self.prompts.piece(key, input_tokens, begins=True), input_tokens, output_tokens)]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Request n begins with prefix n mod `num_prefixes`, of `prefix_tokens` tokens."""

    prompts: Prompts
    lengths: Lengths
    prefix_tokens: int
    num_prefixes: int

    def conversation(self, number: int) -> Sequence[Turn]:
        key = f"suffix {number}"
        input_tokens, output_tokens = self.lengths.drawn(self.prompts.seed, key)
        prefix = self.prompts.piece(f"prefix {number % self.num_prefixes}", self.prefix_tokens, begins=True)
        prompt = joined([prefix, self.prompts.piece(key, input_tokens)])
        return [Turn(prompt, self.prefix_tokens + input_tokens, output_tokens)]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Every turn adds a new part to what was said before."""

    prompts: Prompts
    lengths: Lengths
    turns: int

    def conversation(self, number: int) -> Sequence[Turn]:
        found = []
        for turn in range(self.turns):
            key = f"turn {number} {turn}"
            input_tokens, output_tokens = self.lengths.drawn(self.prompts.seed, key)
            found.append(Turn(self.prompts.piece(key, input_tokens, begins=turn == 0), input_tokens, output_tokens))
        return found


@dataclass(frozen=True, slots=True)
class TracedPrompts:
    prompts: Prompts
    trace: Sequence[Traced]

    def conversation(self, number: int) -> Sequence[Turn]:
        request = self.trace[number]
        pieces: list[Piece] = []
        left = request.input_tokens
        for block in request.blocks:
            length = min(left, BLOCK_TOKENS)
            if length:
                pieces.append(self.prompts.piece(f"block {block}", length, begins=not pieces))
            left -= length
        if left:
            pieces.append(self.prompts.piece(f"traced {number}", left, begins=not pieces))
        return [Turn(joined(pieces), request.input_tokens, request.output_tokens)]
