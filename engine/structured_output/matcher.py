"""How far one sequence has come in its grammar: the mask of its next token, and whether the grammar is complete.

Adds to llguidance's matcher the sequence's own end tokens where the text may end, and a bound on the digits of a JSON
number, because a model that has begun to write digits may never stop. Does not know steps, rows, or how a grammar is
compiled.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Tokens

import numpy as np
from llguidance import LLMatcher

from engine.structured_output.compiler import Compiled, Compiler

# Enough for any double or 64-bit integer; a token may exceed it by its own length.
MAX_DIGITS = 20

_QUOTE, _BACKSLASH, _NEWLINE = b'"\\\n'


class BrokenGrammarError(Exception):
    """The matcher failed: a limit on the work of one token, or a token that its own mask forbids."""


class GrammarMatcher:
    """Implements `GrammarMatcherProtocol` of the scheduler, where its life cycle is described."""

    def __init__(self, compiler: Compiler, compiled: Compiled, end_ids: Iterable[int]) -> None:
        """`end_ids` end the sequence where the grammar allows it; without any it ends only where it must."""
        self._compiler = compiler
        self._compiled = compiled
        self._origin: LLMatcher = compiled.matcher
        self._matcher: LLMatcher = self._origin.deep_copy()
        self._accepted: list[int] = []
        self._next: tuple[np.ndarray, bool] | None = None  # the result of `_compute` for the next token, if known
        self._end_ids = tuple(end_ids)
        self._digits = _DigitRun() if compiled.is_json else None

    def fill_mask(self, into: np.ndarray) -> None:
        """As in `GrammarMatcherProtocol`. Raises `BrokenGrammarError`."""
        mask, may_end = self._next or self._compute()
        shared = min(len(mask), len(into))
        into[:shared] = mask[:shared]
        into[shared:] = 0
        if may_end:
            for token in self._end_ids:
                into[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token_ids: Tokens[int]) -> bool:
        """As in `GrammarMatcherProtocol`. Raises `BrokenGrammarError`."""
        self._next = None
        self._matcher.consume_tokens(list(token_ids))
        self._accepted += token_ids
        if self._matcher.is_error():
            self._start_over()
        if self._matcher.is_stopped():
            return True
        if self._digits is not None:
            self._digits.push(self._compiler.tokens.decode_bytes(list(token_ids)))
        if not self._matcher.is_accepting():
            return False
        # Where only the end is left, the sequence ends without an end token, which may even be banned.
        self._next = mask, _ = self._compute()
        return not mask.any()

    def _compute(self) -> tuple[np.ndarray, bool]:
        """What may follow, uint32 [num_words], without ends; and whether the text may end here."""
        compiler = self._compiler
        mask = np.empty(compiler.num_words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self._start_over()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
        # The library allows the tokenizer's own end token where the text may end.
        may_end = bool(mask[compiler.end_word] >> compiler.end_bit & 1)
        mask[compiler.end_word] &= ~np.uint32(1 << compiler.end_bit)
        if self._digits is not None:
            self._bound_number(mask, can_end=may_end)
        return mask, may_end

    def _bound_number(self, mask: np.ndarray, *, can_end: bool) -> None:
        """Remove exponents, and more digits after `MAX_DIGITS`, from `mask`, unless nothing else would be allowed."""
        assert self._digits is not None
        if self._digits.is_in_string:
            return
        compiler, length = self._compiler, self._digits.length
        unwanted = [compiler.exponent_after_digit if length else compiler.number_with_exponent]
        if length >= MAX_DIGITS:
            unwanted.append(compiler.more_digits)
        for bits in unwanted:
            left = mask & ~bits
            if can_end or left.any():
                mask[:] = left

    def _start_over(self) -> None:
        """Match all tokens again with an empty cache of the library. Raises `BrokenGrammarError` if it fails again."""
        self._origin = self._compiled.renew(self._origin)
        self._matcher = self._origin.deep_copy()
        self._matcher.consume_tokens(self._accepted)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BrokenGrammarError(" ".join(self._matcher.get_error().split())[:300])


class _DigitRun:
    """Counts the digits at the end of the text, outside of JSON strings."""

    __slots__ = ("_escaped", "is_in_string", "length")

    def __init__(self) -> None:
        self.length = 0
        self.is_in_string = False
        self._escaped = False

    def push(self, data: bytes) -> None:
        for byte in data:
            if self.is_in_string:
                # A JSON string has no line end; and text before the JSON may have had any number of quotes.
                self.is_in_string = byte != _NEWLINE and (byte != _QUOTE or self._escaped)
                self._escaped = byte == _BACKSLASH and not self._escaped
                self.length = 0
            elif byte == _QUOTE:
                self.is_in_string, self._escaped, self.length = True, False, 0
            else:
                self.length = self.length + 1 if 48 <= byte <= 57 else 0
