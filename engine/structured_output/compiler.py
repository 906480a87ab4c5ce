"""Compilation of a grammar's text to a matcher over the model's tokens (with llguidance).

JSON is compact: no space between its parts, properties in the order of the schema. Limits bound the work of one
compilation and of one token, except for recursion, which the library does not count and which can overflow the stack.
The engine therefore compiles only grammars that the sandbox process has compiled before (`sandbox.py`).

Knows llguidance and the tokenizer's file. Does not know requests, sequences, threads or processes.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from oarlock.engine.panics import LibraryPanicError, panics_as_errors
from oarlock.engine.structured_output.ebnf import lark_of
from oarlock.engine.structured_output.json_schema import rewritten, rewritten_in_lark, schemas_in_lark
from oarlock.engine.structured_output.mask_costs import MaskCosts
from oarlock.engine.structured_output.schema_faults import fault_of
from oarlock.engine.types import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_OBJECT_DEPTH = 16  # nesting of `json_object`
_COMPACT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_MAX_REASON = 300
# Sets of tokens that llguidance adds to a mask as a whole if all of them are allowed: white space, and pieces of JSON
# strings up to some length, which makes strings with a bounded length cheaper.
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRING}{{1,{most}}}" for most in (10, 20, 30)), f"{_IN_STRING}+"]
# The number of items bounds the time of one mask, which grows with its square. In EBNF, a rule of 400 alternatives of
# many characters needs more than 4,000 items.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=8_000,
    max_lexer_states=10_000,  # about 0.5 KB each; when all are used, `Compiled.renew` is called
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarError(Exception):
    """Raised for a faulty grammar. The text is for the client that sent it."""


class Compiled:
    """A matcher at the start of its grammar, to be copied for each sequence.

    Copies share the library's cache of lexer states, which makes them fast, and its limit: after very many tokens the
    cache is full and every copy fails. Then `renew` returns a matcher with an empty cache.
    """

    def __init__(self, compiler: "Compiler", source: str, is_json: bool) -> None:
        self._compiler = compiler
        self._source = source
        self.is_json = is_json  # numbers outside of strings are JSON numbers
        self.num_bytes = 0  # memory that it takes, as measured by the sandbox
        self.client = ""  # client that asked for it first
        self.costs = MaskCosts()
        self.matcher = compiler.matcher(source)

    def renew(self, full: LLMatcher) -> LLMatcher:
        """Return the successor of `full`, made once for all sequences that shared it."""
        if self.matcher is full:
            self.matcher = self._compiler.matcher(self._source)
        return self.matcher


class Compiler:
    """Compiler for one model's tokens. Creating it takes seconds for a large vocabulary, and holds the GIL."""

    def __init__(self, tokenizer_file: Path) -> None:
        """Read the vocabulary. Raises `ValueError` if the file cannot be read, or tokens cannot be mapped to bytes."""
        try:
            text = tokenizer_file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{tokenizer_file} cannot be read: {error.strerror}") from error
        if not text.lstrip().startswith("{"):  # the library takes anything else for the path of another file
            raise ValueError(f"{tokenizer_file} is not a JSON object")
        with panics_as_errors():
            self._read_tokens(text)

    def _read_tokens(self, text: str) -> None:
        self.tokens = LLTokenizer(text, slices=_SLICES)
        # Masks without the tokens that begin with digits, that add an exponent to digits, or that are a number
        # with an exponent.
        self.no_more_digits = ~self._mask(r"[0-9](?s:.)*")
        after_digit, number = r"[0-9]*(\.[0-9]*)?", r"-?[0-9]*\.?[0-9]+"
        self.no_exponent_after_digit = ~self._mask(after_digit + r"[eE](?s:.)*") | self._mask(after_digit)
        self.no_number_with_exponent = ~self._mask(number + r"[eE](?s:.)*") | self._mask(number)
        end = self.tokens.eos_token
        self.end_word, self.end_bit = divmod(end, 32)

    @property
    def num_words(self) -> int:
        """Number of uint32 words in a mask; the model's vocabulary may be larger or smaller."""
        return -(-self.tokens.vocab_size // 32)

    def _mask(self, expression: str) -> np.ndarray:
        """Return the mask of the tokens that can begin a text matching `expression`: uint32 [num_words]."""
        matcher = LLMatcher(self.tokens, LLMatcher.grammar_from_regex(expression), log_level=0)
        return np.frombuffer(matcher.compute_bitmask(), np.uint32, self.num_words)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile `grammar`. Raises `GrammarError`. May take long or crash the process for a hostile text."""
        try:
            with panics_as_errors():
                return self._compile(grammar)
        except LibraryPanicError as error:
            raise GrammarError(_short(str(error))) from error

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            source = _source(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_short(str(error))) from error
        is_json = grammar.kind in ("json_schema", "json_object") or (grammar.kind == "lark" and "%json" in grammar.text)
        try:
            compiled = Compiled(self, source, is_json)
        except GrammarError as error:
            fault = next((found for schema in _schemas(grammar) if (found := fault_of(schema, str(error)))), None)
            raise error if fault is None else GrammarError(_short(fault)) from error
        self._check_beginning(compiled.matcher.deep_copy())
        # The first mask fills caches that all sequences share, so the second shows the usual cost of a mask.
        begun_s = time.thread_time()
        compiled.matcher.deep_copy().compute_bitmask()
        seconds = time.thread_time() - begun_s
        compiled.costs.expect(seconds, seconds)
        return compiled

    def matcher(self, source: str) -> LLMatcher:
        """Return a matcher at the start of `source`. Raises `GrammarError`."""
        matcher = LLMatcher(self.tokens, source, log_level=0, limits=_LIMITS)
        _raise_error(matcher)
        return matcher

    def _check_beginning(self, matcher: LLMatcher) -> None:
        """Raise `GrammarError` unless some token other than the end is allowed first."""
        first = matcher.compute_bitmask()
        _raise_error(matcher)
        if not any(first) or (matcher.is_accepting() and _popcount(first) <= len(self.tokens.eos_tokens)):
            raise GrammarError("no text matches it, or only the empty text")


def _popcount(mask: bytes) -> int:
    return int.from_bytes(mask, "little").bit_count()


def _raise_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))


def _short(reason: str) -> str:
    """Shorten a reason to one line of bounded length."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    if line.startswith("NoExtension"):
        line = "no text matches it"
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + " …"


def _source(grammar: Grammar) -> str:
    """Return the grammar in the format of llguidance. Raises `ValueError`."""
    if grammar.kind == "json_schema":
        schema = rewritten(json.loads(grammar.text))
        if schema is False:
            raise ValueError("no value matches the schema")
        return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=_COMPACT)
    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_json_schema(_any_object(), overrides=_COMPACT)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(rewritten_in_lark(grammar.text))
    if grammar.kind == "ebnf":
        return LLMatcher.grammar_from_lark(lark_of(grammar.text))
    raise ValueError(f"unknown kind of grammar: {grammar.kind!r}")


def _schemas(grammar: Grammar) -> list[Any]:
    """Return the client's schemas in `grammar`."""
    if grammar.kind == "lark":
        return schemas_in_lark(grammar.text)
    return [json.loads(grammar.text)] if grammar.kind == "json_schema" else []


def _any_object() -> str:
    """Return the JSON schema of an object with any content, nested at most `MAX_OBJECT_DEPTH` deep."""
    values = {}
    for depth in range(1, MAX_OBJECT_DEPTH + 1):
        inner = {"$ref": f"#/$defs/value{depth + 1}"}
        forms: list[dict[str, object]] = [{"type": name} for name in ("string", "number", "boolean", "null")]
        if depth < MAX_OBJECT_DEPTH:
            forms += [{"type": "object", "additionalProperties": inner}, {"type": "array", "items": inner}]
        values[f"value{depth}"] = {"anyOf": forms}
    return json.dumps({"type": "object", "additionalProperties": {"$ref": "#/$defs/value1"}, "$defs": values})
