"""Matching of one sequence with its grammar: the mask of its next token, and whether the grammar is complete.

Adds two things to llguidance's matcher: the sequence's end tokens at points at which the text may end, and a bound on
the digits of a JSON number, because a model that has begun to write digits may never stop. `MaskBatch` computes the
masks of one step within a time limit. Masks of different grammars are computed in parallel threads. Matchers of one
compiled grammar share a cache with one lock, so they run one after the other, and so do slow matchers. Does not know
steps, rows, or how a grammar is compiled.
"""

import copy
import math
import os
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from itertools import takewhile
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher

from oarlock.engine.errors import BrokenGrammarError, MaskPostponedError
from oarlock.engine.panics import panic_error
from oarlock.engine.structured_output.compiler import Compiled, Compiler
from oarlock.engine.structured_output.mask_costs import FAST_S, JUMP_S, STEP_S

# Enough for any double or 64-bit integer; a token may exceed it by its own length.
MAX_DIGITS = 20

ALL = 0xFFFFFFFF
_QUOTE, _BACKSLASH, _NEWLINE = b'"\\\n'
# Stack of each thread: as large as the engine's, four times the stack that the sandbox allows a grammar.
_THREAD_STACK_BYTES = 8 << 20
_NUM_AT_ONCE = 16  # fast masks computed between two checks of the time
_FULL = "too many states"  # part of the library's error for a full cache of lexer states; no stop reason shows it
# A `GrammarMatcher`, the tokens drafted after the known tokens, and the masks to write: uint32 [1 + drafts, W].
Rows = tuple[Any, tuple[int, ...], np.ndarray]


class GrammarMatcher:
    """Implements `GrammarMatcherProtocol` of the scheduler, which describes its life cycle.

    The library consumes an accepted token at once if its grammar is fast. Otherwise it does so when the next mask is
    computed, within the time limit.
    """

    def __init__(self, compiler: Compiler, compiled: Compiled, end_ids: Iterable[int], client: str = "") -> None:
        """`end_ids`: end the sequence if the grammar allows it; without any, the sequence ends only if it must.
        `client`: pays for slow masks.
        """
        self.compiler = compiler
        self._compiled = compiled
        self.origin: LLMatcher = compiled.matcher  # matcher whose cache it shares
        self.matcher: LLMatcher = self.origin.deep_copy()
        self._accepted: list[int] = []
        self._unconsumed: list[int] = []  # the last accepted tokens, not yet consumed by the library
        self._renewed_at: int | None = None  # number of accepted tokens when it last got an empty cache
        self._consumed_s = 0.0  # CPU time spent on late tokens since the last mask
        # (n, tokens): only the end is left after these tokens follow the first n
        self._completion: tuple[int, list[int]] | None = None
        self._end_ids = tuple(end_ids)
        self._digits = _DigitRun() if compiled.is_json else None
        self._client = client

    @property
    def expected_s(self) -> float:
        """As in `GrammarMatcherProtocol`."""
        return self._compiled.costs.expected_s

    @property
    def is_fast(self) -> bool:
        """Whether its next mask needs no measurement."""
        return not self._unconsumed and not self._compiled.costs.expected_s

    def note_slow(self, seconds: float) -> None:
        """Record that masks of this grammar or of others in its group took `seconds` each, so it may be measured
        separately.
        """
        self._compiled.costs.expect(seconds, seconds)

    def _observe(self, seconds: float, clock_s: float) -> None:
        """Record the time of a mask and its tokens, and charge the client. Raises `BrokenGrammarError`."""
        seconds, self._consumed_s = seconds + self._consumed_s, 0.0
        self._compiled.costs.expect(seconds, clock_s)
        self._compiled.costs.charge(seconds, self._client)

    def fill_masks(self, drafts: Tokens[int], into: np.ndarray) -> int | None:
        """Implement `GrammarMatcherProtocol.fill_masks`. Raises `BrokenGrammarError`."""
        return self.fill_within(math.inf, drafts, into)

    def fill_within(self, limit_s: float, drafts: Tokens[int], into: np.ndarray) -> int | None:
        """Fill the masks and charge the client for them.

        Raises `MaskPostponedError` if unconsumed tokens are left after `limit_s` of CPU time.
        """
        begun_s, clock_s = time.thread_time(), time.monotonic()
        try:
            self._consume_all(begun_s + limit_s)
            result = self.fill_untimed(drafts, into)
        except MaskPostponedError:
            self._consumed_s += time.thread_time() - begun_s
            raise
        except Exception:
            raise
        except BaseException as error:
            raise BrokenGrammarError(str(panic_error(error))) from error
        self._observe(time.thread_time() - begun_s, time.monotonic() - clock_s)
        return result

    def fill_untimed(self, drafts: Tokens[int], into: np.ndarray) -> int | None:
        """Fill the masks of a fast grammar."""
        masks = np.empty((len(into), self.compiler.num_words), np.uint32)
        self.compute(drafts, masks)
        return self.finish_masks(drafts, masks, into)

    def known_drafts(self, drafts: Tokens[int]) -> list[int]:
        """Return the leading `drafts` that are tokens of the grammar's tokenizer."""
        num_tokens = self.compiler.tokens.vocab_size
        return list(takewhile(lambda token: token < num_tokens, drafts))

    def finish_masks(self, drafts: Tokens[int], masks: np.ndarray, into: np.ndarray) -> int | None:
        """Finish `fill_masks` from the library's `masks`, uint32 [1 + drafts, num_words], which are changed."""
        if self.matcher.is_error():
            self._compute_anew(drafts, masks)
        known_drafts = self.known_drafts(drafts) if drafts else ()
        digits = self._digits_so_far(to_change=len(known_drafts) > 0)
        for row in range(len(masks)):
            mask, may_end = self._finish_mask(masks[row], digits, into[row])
            is_only_end_left = may_end and not np.count_nonzero(mask)
            if is_only_end_left:
                self._completion = len(self._accepted), list(drafts[:row])
            if is_only_end_left or row == len(known_drafts) or not mask[drafts[row] // 32] >> drafts[row] % 32 & 1:
                into[row + 1 :] = ALL
                return row if is_only_end_left else None
            if digits is not None:
                digits.push(self.compiler.tokens.decode_bytes([drafts[row]]))
        raise AssertionError("there is a row after the last draft")

    def _finish_mask(self, mask: np.ndarray, digits: "_DigitRun | None", into: np.ndarray) -> tuple[np.ndarray, bool]:
        """Write one row, uint32 [W]. Return the ids that may follow, uint32 [num_words], and if the text may end."""
        compiler, num_words = self.compiler, len(into)
        # The library allows the tokenizer's own end token if the text may end.
        end = mask.item(compiler.end_word)
        may_end = bool(end >> compiler.end_bit & 1)
        if may_end:
            mask[compiler.end_word] = end ^ 1 << compiler.end_bit
        if digits is not None:
            mask = self._bounded_number(mask, digits, can_end=may_end)
        if num_words <= len(mask):
            into[:] = mask[:num_words]
        else:
            into[: len(mask)] = mask
            into[len(mask) :] = 0
        if may_end:
            for token in self._end_ids:
                into[token // 32] |= np.uint32(1 << token % 32)
        return mask, may_end

    def accept(self, token_ids: Tokens[int]) -> bool:
        """Implement `GrammarMatcherProtocol.accept`. Raises `BrokenGrammarError`."""
        self._accepted += token_ids
        if self.is_fast:
            self._consume(token_ids)
        else:
            self._unconsumed += token_ids
        if self._completion is not None:
            first, tokens = self._completion
            if self._accepted[first:] == tokens:
                return True
        return not self._unconsumed and self.matcher.is_stopped()

    def _consume(self, token_ids: Tokens[int]) -> None:
        begun_s = time.monotonic()
        try:
            self.matcher.consume_tokens(list(token_ids))
            is_error = self.matcher.is_error()
        except BaseException as error:
            raise BrokenGrammarError(str(panic_error(error))) from error
        if is_error:
            self._renew()
        elif (seconds := time.monotonic() - begun_s) > JUMP_S:
            self.note_slow(seconds)  # other sequences with this grammar should not follow at once

    def only_end_is_left(self) -> bool:
        """Implement `GrammarMatcherProtocol.only_end_is_left`. Raises `BrokenGrammarError`."""
        if not self._unconsumed and not self.matcher.is_accepting():
            return False
        return self.fill_masks((), np.empty((1, self.compiler.num_words), np.uint32)) == 0

    def _consume_all(self, until_s: float = math.inf) -> None:
        """Let the library consume all accepted tokens.

        Raises `MaskPostponedError` if the thread's CPU time reaches `until_s` first.
        """
        while self._unconsumed:
            if time.thread_time() >= until_s:
                raise MaskPostponedError
            self.matcher.consume_token(self._unconsumed[0])
            if self.matcher.is_error():
                self._renew()
            else:
                del self._unconsumed[0]

    def compute(self, drafts: Tokens[int], masks: np.ndarray) -> None:
        """Write the library's masks as far as it can accept the drafts; later rows allow every id.

        The matcher's state is unchanged afterwards, unless there was an error.
        """
        address, num_bytes, num_accepted = masks.ctypes.data, masks.shape[1] * masks.itemsize, 0
        self.matcher.unsafe_compute_mask_ptr(address, num_bytes)
        if not drafts:
            return
        masks[1:] = ALL
        for draft in self.known_drafts(drafts):
            if self.matcher.is_stopped() or not self.matcher.try_consume_tokens([draft]):
                break
            num_accepted += 1
            self.matcher.unsafe_compute_mask_ptr(address + num_accepted * num_bytes, num_bytes)
        if num_accepted:
            self.matcher.rollback(num_accepted)

    def _compute_anew(self, drafts: Tokens[int], masks: np.ndarray) -> None:
        """Compute the masks again after an error, without the drafts if they cause it: such a draft fails when
        accepted.
        """
        if self._is_full():
            self._renew()
            self._consume_all()
            self.compute(drafts, masks)
        if self.matcher.is_error() and drafts:
            self._start_over()
            self._consume_all()
            self.compute((), masks)
            masks[1:] = ALL
        if self.matcher.is_error():
            raise self._grammar_error()

    def _digits_so_far(self, *, to_change: bool) -> "_DigitRun | None":
        digits = self._digits
        if digits is None:
            return None
        if digits.num_tokens < len(self._accepted):
            digits.push(self.compiler.tokens.decode_bytes(self._accepted[digits.num_tokens :]))
            digits.num_tokens = len(self._accepted)
        return copy.copy(digits) if to_change else digits

    def _bounded_number(self, mask: np.ndarray, digits: "_DigitRun", *, can_end: bool) -> np.ndarray:
        """Remove exponents, and further digits after `MAX_DIGITS`, from `mask` unless nothing else would be allowed."""
        if digits.is_in_string:
            return mask
        compiler, length = self.compiler, digits.length
        wanted = [compiler.no_exponent_after_digit if length else compiler.no_number_with_exponent]
        if length >= MAX_DIGITS:
            wanted.append(compiler.no_more_digits)
        for bits in wanted:
            left = mask & bits
            if can_end or np.count_nonzero(left):
                mask = left
        return mask

    def _is_full(self) -> bool:
        """Return whether the matcher failed because its shared cache is full."""
        return _FULL in self.matcher.get_error()

    def _renew(self) -> None:
        """Start over after an error, with an empty cache of the library.

        Raises `BrokenGrammarError` if the cache is not the cause, or was already empty for the same token.
        """
        if not self._is_full() or self._renewed_at == len(self._accepted):
            raise self._grammar_error()
        self._renewed_at = len(self._accepted)
        self.origin = self._compiled.renew(self.origin)
        self._start_over()

    def _start_over(self) -> None:
        """Match all tokens again from the start."""
        self.matcher = self.origin.deep_copy()
        self._unconsumed = list(self._accepted)

    def _grammar_error(self) -> BrokenGrammarError:
        return BrokenGrammarError(" ".join(self.matcher.get_error().replace("<non-verbose/>", "").split())[:300])


class _DigitRun:
    """Counts the digits at the end of the text, outside of JSON strings."""

    __slots__ = ("_escaped", "is_in_string", "length", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0  # number of pushed tokens; written by the caller
        self.length = 0
        self.is_in_string = False
        self._escaped = False

    def push(self, data: bytes) -> None:
        for byte in data:
            if self.is_in_string:
                # A JSON string has no line end, and text before the JSON may have had any number of quotes.
                self.is_in_string = byte != _NEWLINE and (byte != _QUOTE or self._escaped)
                self._escaped = byte == _BACKSLASH and not self._escaped
                self.length = 0
            elif byte == _QUOTE:
                self.is_in_string, self._escaped, self.length = True, False, 0
            else:
                self.length = self.length + 1 if 48 <= byte <= 57 else 0


class MaskBatch:
    """Fills masks like `GrammarMatcher.fill_masks`, but many at once. Its threads start when first needed."""

    def __init__(self) -> None:
        self._threads: LLExecutor | None = None
        self._masks = np.empty((0, 0), np.uint32)  # buffer that the library writes into; reused

    def fill_masks(self, batch: list[Rows]) -> list[int | Exception | None]:
        """Fill the masks of every matcher.

        Return for each matcher the result or the exception of its `fill_masks`, or `MaskPostponedError`. At least one
        is not postponed.
        """
        results: list[int | Exception | None] = [None] * len(batch)
        fast, slow = [], []
        for number, (matcher, _, _) in enumerate(batch):
            (fast if matcher.is_fast else slow).append(number)
        left_s, is_first, begun_s = STEP_S, True, time.process_time()
        share_cache = len({id(matcher.origin) for matcher, _, _ in batch}) == 1
        for first in range(0, len(fast), _NUM_AT_ONCE):
            some = fast[first : first + _NUM_AT_ONCE]
            if left_s > 0:
                left_s -= self._fill_fast(batch, some, results, begun_s, share_cache=share_cache)
            else:
                for number in some:
                    results[number] = MaskPostponedError()
            is_first = False
        for number in slow:
            matcher, drafts, into = batch[number]
            if left_s <= 0 and not is_first:
                results[number] = MaskPostponedError()
                continue
            slow_s, is_first = time.thread_time(), False
            results[number] = _outcome(matcher.fill_within, left_s, drafts, into)
            left_s -= time.thread_time() - slow_s
        return results

    def _fill_fast(
        self,
        batch: list[Rows],
        numbers: list[int],
        results: list[int | Exception | None],
        begun_s: float,
        *,
        share_cache: bool,
    ) -> float:
        """Fill the masks of `numbers`, whose grammars are fast, and return the CPU time beyond the limit of fast masks.

        If it is above 0, each of these grammars is measured separately from then on. `begun_s`: CPU time of this
        process when the step's masks were begun.
        """
        clock_s = time.monotonic()
        computed = None if share_cache else _outcome(self._computed, [batch[number] for number in numbers])
        is_late = False
        for index, number in enumerate(numbers):
            matcher, drafts, into = batch[number]
            if is_late and computed is None:
                results[number] = MaskPostponedError()
            elif isinstance(computed, list):
                results[number] = _outcome(matcher.finish_masks, drafts, computed[index], into)
            else:  # the library's error does not show which matcher failed
                results[number] = _outcome(matcher.fill_untimed, drafts, into)
                seconds = time.monotonic() - clock_s
                is_late = seconds > STEP_S and time.process_time() - begun_s > STEP_S
        seconds = time.monotonic() - clock_s
        if seconds >= len(numbers) * FAST_S:  # otherwise it is not worth reading the CPU time, which takes longer
            seconds = min(seconds * _num_threads(), time.process_time() - begun_s)
        if seconds < len(numbers) * FAST_S:
            return 0.0
        for number in numbers:
            batch[number][0].note_slow(seconds / len(numbers))
        return seconds - len(numbers) * FAST_S

    def _computed(self, batch: list[Rows]) -> list[np.ndarray]:
        """Return the library's masks of each matcher: uint32 [1 + drafts, num_words]."""
        ends = np.cumsum([1 + len(drafts) for _, drafts, _ in batch]).tolist()
        masks = self._room_for(ends[-1], batch[0][0].compiler.num_words)
        plain, drafted = [], []
        for (matcher, drafts, _), first, last in zip(batch, [0, *ends], ends, strict=False):
            if known_drafts := matcher.known_drafts(drafts):
                masks[first + 1 : last] = ALL
                drafted.append((matcher.matcher, first, known_drafts))
            else:
                plain.append((matcher.matcher, first))
        buffer = (masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))
        if self._threads is None:
            os.environ.setdefault("RUST_MIN_STACK", str(_THREAD_STACK_BYTES))  # read by the library's threads
            self._threads = LLExecutor(_num_threads())
        if plain:
            self._threads.unsafe_compute_mask_ptr(plain, *buffer)
        if drafted:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *buffer)
        return np.split(masks, ends[:-1])

    def _room_for(self, num_rows: int, num_words: int) -> np.ndarray:
        if len(self._masks) < num_rows or self._masks.shape[1] != num_words:
            self._masks = np.empty((num_rows, num_words), np.uint32)
        return self._masks[:num_rows]


def _num_threads() -> int:
    """Return the number of threads for masks: four fifths of the CPUs, as the library would choose."""
    return min(32, max(1, len(os.sched_getaffinity(0)) * 4 // 5))


def _outcome(fill: Callable[..., Any], *arguments: object) -> Any:
    """Return the result or the exception of `fill`. A panic of the library is the grammar's fault."""
    try:
        return fill(*arguments)
    except Exception as error:
        return error
    except BaseException as error:
        return BrokenGrammarError(str(panic_error(error)))
