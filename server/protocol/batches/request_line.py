"""One line of a file of requests, as OpenAI's batch API has them: who asks what of which endpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from json.decoder import JSONDecodeError, JSONDecoder
from re import compile as pattern
from typing import Any

from oarlock.engine.errors import StartupError

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
MAX_CUSTOM_ID = 512  # characters
SHAPE = (
    'Each line is {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}; '
    "docs/offline.md has an example."
)
_MEMBERS = ("custom_id", "method", "url", "body")
_SPACE = pattern(r"[ \t\r\n]*")
_NAME = pattern(r'[ \t\r\n]*("(?:[^"\\\x00-\x1f]|\\.)*")[ \t\r\n]*:[ \t\r\n]*')  # of a member
_END = pattern(r"[ \t\r\n]*([,}])")  # of a member's value
_DECODER = JSONDecoder()


class WrongBatchError(StartupError):
    """The file of requests is wrong. `line`: the first wrong one, from 1, if it is one; `code`: for programs."""

    def __init__(self, cause: str, fix: str, line: int | None = None, code: str = "invalid_json_line") -> None:
        super().__init__(cause, fix)
        self.line = line
        self.code = code


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the file of requests."""

    custom_id: str
    url: str
    body: bytes  # JSON, as it was written


def read_line(line: bytes, number: int, name: str) -> BatchRequest:
    """Parse line `number` of the file `name`. Raises `WrongBatchError`."""
    where = f"Line {number} of {name}"
    try:
        members = _members(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WrongBatchError(f"{where} is not valid JSON: {error}.", SHAPE, number) from None
    if members is None:
        raise WrongBatchError(f"{where} is no JSON object.", SHAPE, number)
    missing = [member for member in _MEMBERS if member not in members]
    if missing:
        raise WrongBatchError(f"{where} has no '{missing[0]}'.", SHAPE, number, "missing_member")
    (custom_id, _), (method, _), (url, _), (body, written) = (members[member] for member in _MEMBERS)
    if not isinstance(custom_id, str) or not custom_id or not _is_encodable(custom_id):
        cause = f"{where} has custom_id {custom_id!r:.80}, which is no text."
        raise WrongBatchError(cause, SHAPE, number, "invalid_custom_id")
    if len(custom_id) > MAX_CUSTOM_ID:
        cause = f"{where} has a custom_id of {len(custom_id)} characters, at most {MAX_CUSTOM_ID} are read."
        raise WrongBatchError(cause, "Give the request a shorter custom_id.", number, "custom_id_too_long")
    if method != "POST":
        cause = f"{where} has method {method!r:.80}, but only POST is known."
        raise WrongBatchError(cause, SHAPE, number, "invalid_method")
    if url not in URLS:
        cause = f"{where} has url {url!r:.80}, which is not served."
        raise WrongBatchError(cause, f"Served: {', '.join(URLS)}.", number, "invalid_url")
    if not isinstance(body, dict):
        raise WrongBatchError(f"{where} has a body that is no JSON object.", SHAPE, number, "invalid_body")
    return BatchRequest(custom_id, url, written.encode())


def _members(text: str) -> dict[str, tuple[Any, str]] | None:
    """The members of an object: the value of each, and its text. None: it is no object. Raises `ValueError`.

    The text of a body is kept, since what is made of its value would hide a field that is there twice.
    """
    place = _after_space(text, 0)
    if not text.startswith("{", place):
        json.loads(text)  # raises, unless it is some other value
        return None
    members: dict[str, tuple[Any, str]] = {}
    place += 1
    mark = _END.match(text, place)
    while mark is None or mark[1] == ",":
        found = _NAME.match(text, place)
        if found is None:
            raise JSONDecodeError("Expecting the name of a member", text, place)
        name, start = json.loads(found[1]), found.end()
        if name in members:
            raise JSONDecodeError("Expecting each name once", text, place)
        value, end = _DECODER.raw_decode(text, start)
        members[name] = value, text[start:end]
        mark = _END.match(text, end)
        if mark is None:
            raise JSONDecodeError("Expecting ',' delimiter", text, end)
        place = mark.end()
    if _after_space(text, mark.end()) != len(text):
        raise JSONDecodeError("Extra data", text, mark.end())
    return members


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    assert match is not None, "it matches nothing, too"
    return match.end()


def _is_encodable(text: str) -> bool:
    """Whether it has no lone surrogates, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
