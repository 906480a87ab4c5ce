"""Incremental, byte-exact detokenization: a character is returned when its last byte has arrived.

The tokenizer's decoder determines the algorithm. `TokenBytes` has the bytes of every token (byte-level BPE, and
SentencePiece with byte fallback): constant work per token, and the bytes for logprobs. For other decoders, a sliding
window over the library's own `decode` is used.

Stop strings are found in the text regardless of how it is split into pieces. A match ends at the first character that
completes a stop string; if several are complete there, the longest wins. Text is held back only while it may be the
start of a stop string.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from oarlock.engine.errors import RequestError
from oarlock.engine.panics import ENDS_TASK
from oarlock.server.hub.pre_tokenizers import BYTE_OF
from oarlock.server.observability.logs import event, logger

# Limit for ids that wait for the rest of a character, so that the window is bounded; a character has up to four bytes.
_MOST_PENDING = 32
_log = logger("tokenizer")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(RequestError):
    """Raised if the checkpoint's tokenizer fails on a text or on token ids, or would need too much memory for them."""


def tokenizer_error(error: BaseException, subject: str) -> BaseException:
    """Return the exception to raise for `error`, which the `tokenizers` library raised on `subject`.

    The library raises bare `Exception`, and a Rust panic is a `BaseException` that ordinary handlers do not catch. Its
    message may contain the client's text, so neither the response nor the log includes it.
    """
    if isinstance(error, ENDS_TASK):
        return error
    _log.warning(event("tokenizer_failed", cause=type(error).__name__, subject=subject))
    return TokenizerError(f"The tokenizer of this model fails on {subject}. Send another text, or a shorter one.")


class Backend(Protocol):
    """Methods of `tokenizers.Tokenizer` that are used here."""

    def id_to_token(self, id: int) -> str | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer(Protocol):
    """Incremental decoder of one sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        ...

    def flush(self) -> str:
        """Return the rest of the text at the end of the sequence: an incomplete character becomes U+FFFD."""
        ...


class TokenBytes:
    """Bytes of each token id, computed on first use and cached.

    `skipped`: special ids, which have a name but add nothing to the text.
    """

    def __init__(self, backend: Backend, style: str, skipped: frozenset[int], strip_first_space: bool) -> None:
        self._backend = backend
        self._style = style  # "byte_level" or "metaspace"
        self.skipped = skipped
        self.strip_first_space = strip_first_space
        self.known: dict[int, bytes] = {}  # token id -> bytes, for the ids requested so far

    def __call__(self, token_id: int) -> bytes:
        known = self.known.get(token_id)
        if known is None:
            known = self.known[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # padding of the vocabulary: an id without a token
            return b""
        if token_id in self.skipped:
            return token.encode()
        if self._style == "byte_level":
            if all(character in BYTE_OF for character in token):
                return bytes(BYTE_OF[character] for character in token)
            return token.encode()  # an added token is written literally
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


class BytesDetokenizer:
    """Incremental decoder that uses `TokenBytes`."""

    def __init__(
        self, token_bytes: TokenBytes, prompt_ids: Sequence[int] = (), kept_special_ids: frozenset[int] = frozenset()
    ) -> None:
        self._bytes = token_bytes
        self._skipped = token_bytes.skipped  # in the prompt all special tokens are skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = token_bytes.strip_first_space
        # A prompt may end inside a character, and it determines whether this is the start of the text.
        for token_id in prompt_ids[-8:]:
            self.push((token_id,))
        if self._strip and any(i not in token_bytes.skipped and token_bytes(i) for i in prompt_ids):
            self._strip = False
        self._skipped = token_bytes.skipped - kept_special_ids

    def push(self, ids: Sequence[int]) -> str:
        known, skipped = self._bytes.known, self._skipped
        parts: list[bytes] = []
        for token_id in ids:
            if token_id not in skipped:
                piece = known.get(token_id)
                parts.append(self._bytes(token_id) if piece is None else piece)
        data = b"".join(parts)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Incremental decoder for any tokenizer: the difference of two decodes of a short window of ids."""

    def __init__(
        self, backend: Backend, prompt_ids: Sequence[int] = (), kept_special_ids: frozenset[int] = frozenset()
    ) -> None:
        self._backend = backend
        self._kept_special_ids = kept_special_ids  # `decode` drops them, so they are written by name
        self._ids = list(prompt_ids[-8:])
        self._start = 0  # index of the window's first id
        self._returned = len(self._ids)  # number of ids whose text has been returned

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_special(i) if i in self._kept_special_ids else self._push(i) for i in ids])

    def _push_special(self, token_id: int) -> str:
        """Return the pending text, which is complete before a special token, and the token's name."""
        pending = self.flush()
        return pending + (self._backend.id_to_token(token_id) or "")

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text, before = self._window()
        is_pending = len(text) <= len(before) or text.endswith("\ufffd")
        if is_pending and len(self._ids) - self._returned < _MOST_PENDING:
            return ""
        self._start, self._returned = self._returned, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        text, before = self._window()
        self._start = self._returned = len(self._ids)
        return text[len(before) :]

    def _window(self) -> tuple[str, str]:
        decode = self._backend.decode
        try:
            before = decode(self._ids[self._start : self._returned], skip_special_tokens=True)
            return decode(self._ids[self._start :], skip_special_tokens=True), before
        except BaseException as error:
            raise tokenizer_error(error, "these token ids") from None


def token_bytes_for(backend: Backend, decoder: dict[str, Any] | None, special_ids: frozenset[int]) -> TokenBytes | None:
    """Return the byte table for the decoder of `tokenizer.json`, or None if only the library can decode it."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(backend, "byte_level", special_ids, strip_first_space=False)
    if "Metaspace" in kinds or _replaces_metaspace(steps):
        if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return None
        strip = any(
            (step["type"] == "Strip" and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        return TokenBytes(backend, "metaspace", special_ids, strip_first_space=strip)
    return None


def _replaces_metaspace(steps: list[dict[str, Any]]) -> bool:
    return any(step["type"] == "Replace" and step.get("pattern") == {"String": "▁"} for step in steps)


class StopStrings:
    """Stop strings with their failure tables: built once per request, shared by its choices."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        self.failures = [_failure_table(stop) for stop in self.stops]
        self.first_characters = frozenset(stop[0] for stop in self.stops)

    def __bool__(self) -> bool:
        return bool(self.stops)


class StopStringMatcher:
    """Finds stop strings in incremental text. `push` returns the text that may be shown and the stop string, if any."""

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._set = stops
        self._include = include  # the match itself is shown, so nothing is held back
        self._matched = [0] * len(stops.stops)  # per stop string: length of its longest prefix that ends the text
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """Process a piece of text. After a match all text is dropped. Without `may_end` nothing is searched."""
        if self.found is not None:
            return "", self.found
        if not (self._set and may_end):
            return text, None
        for position, character in enumerate(text):
            longest = self._step(character)
            if longest is not None:
                self.found = longest
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(longest)], longest
        if self._include:
            return text, None
        whole = self._held + text
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def finish(self, text: str, is_ended: bool) -> tuple[str, str | None]:
        """Process the last piece: as `push`, but nothing stays held back."""
        shown, found = self.push(text)
        return shown + self.flush(), found

    def take(self) -> None:
        """Return None: stop strings are searched in the plain text, so there are no parsed events."""

    def flush(self) -> str:
        """Return the text that was held back, if the text ends for another reason."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._matched)
        return held

    def _step(self, character: str) -> str | None:
        """Advance every partial match; return the longest stop string that `character` completes."""
        matched = self._matched
        if character not in self._set.first_characters and not any(matched):
            return None
        longest = None
        for index, stop in enumerate(self._set.stops):
            failure = self._set.failures[index]
            size = matched[index]
            while size and stop[size] != character:
                size = failure[size - 1]
            if stop[size] == character:
                size += 1
            if size == len(stop):
                if longest is None or len(stop) > len(longest):
                    longest = stop
                size = failure[size - 1]  # keeps `stop[size]` in range; the caller stops here anyway
            matched[index] = size
        return longest


def _failure_table(pattern: str) -> list[int]:
    """Return a table: table[i] is the length of the longest proper prefix of pattern[: i + 1] that is also a suffix."""
    table = [0] * len(pattern)
    size = 0
    for index in range(1, len(pattern)):
        while size and pattern[index] != pattern[size]:
            size = table[size - 1]
        if pattern[index] == pattern[size]:
            size += 1
        table[index] = size
    return table
