"""Random prompts of a wanted number of tokens: as token ids, or as words for servers that take only text.

A piece is a function of seed, key and length alone, so every server asked with one seed gets the same prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Words that are one token, with the space before them, in the vocabularies of the large model families.
_TEXT = """
the of and to in for is on with as by this be at from or if it not an that are which but has have can all when no one
new time first name number list value type data string set line file code object class function return
"""
WORDS = tuple(_TEXT.split())
Piece = list[int] | str


@dataclass(frozen=True, slots=True)
class IdPrompts:
    """Token ids. Special tokens lie at either end of a vocabulary, so its first and last sixteenth are not drawn."""

    vocab_size: int
    seed: int

    def piece(self, key: str, tokens: int, *, begins: bool = False) -> list[int]:
        """Draw `tokens` ids. `begins` makes no difference: nothing is put before ids."""
        margin = self.vocab_size // 16
        return _draw(self.seed, key).integers(margin, self.vocab_size - margin, tokens).tolist()


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Words. How many tokens they become was measured by asking the server (see `server_probe`)."""

    seed: int
    tokens_per_word: float = 1.0
    overhead: float = 0.0  # tokens that the server adds: a beginning-of-sequence token, a chat template

    def piece(self, key: str, tokens: int, *, begins: bool = False) -> str:
        """Words of `tokens` tokens, each with a space before it. `begins`: what the server adds is part of them."""
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
    """A whole number of tokens, at least 1, uniform in mean * (1 - spread) ... mean * (1 + spread)."""
    if not spread:
        return mean
    return max(1, int(_draw(seed, key).integers(round(mean * (1 - spread)), round(mean * (1 + spread)) + 1)))


def _draw(seed: int, key: str) -> np.random.Generator:
    return np.random.default_rng([seed, *key.encode()])
