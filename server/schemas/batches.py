"""The request of `/v1/batches`, and one line of a file of requests, as in OpenAI's batch API."""

import json
from dataclasses import dataclass
from json.decoder import JSONDecodeError, JSONDecoder
from re import compile as pattern
from typing import Annotated, Any, Literal

from pydantic import Field

from oarlock.base.errors import StartupError
from oarlock.server.schemas.strict_model import MAX_METADATA, WHOLE, StrictModel, at_most

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
MAX_CUSTOM_ID = 512  # characters
SHAPE = (
    'Each line is {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}; '
    "docs/offline.md has an example."
)
_MEMBERS = ("custom_id", "method", "url", "body")
_SPACE = pattern(r"[ \t\r\n]*")
_NAME = pattern(r'[ \t\r\n]*("(?:[^"\\\x00-\x1f]|\\.)*")[ \t\r\n]*:[ \t\r\n]*')  # name of a member, with the colon
_END = pattern(r"[ \t\r\n]*([,}])")  # end of a member's value
_DECODER = JSONDecoder()


class WrongBatchError(StartupError):
    """A wrong file of requests. `line`: its first wrong line, from 1, if there is one. `code`: for programs."""

    def __init__(self, cause: str, fix: str, line: int | None = None, code: str = "invalid_json_line") -> None:
        super().__init__(cause, fix)
        self.line = line
        self.code = code


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the file of requests."""

    custom_id: str
    url: str
    body: bytes  # JSON as it was written


def read_line(line: bytes, number: int, name: str) -> BatchRequest:
    """Parse line `number` of the file `name`. Raises `WrongBatchError`."""
    where = f"Line {number} of {name}"
    try:
        members = _members(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WrongBatchError(f"{where} is not valid JSON: {error}.", SHAPE, number) from None
    if members is None:
        raise WrongBatchError(f"{where} is not a JSON object.", SHAPE, number)
    missing = [member for member in _MEMBERS if member not in members]
    if missing:
        raise WrongBatchError(f"{where} has no '{missing[0]}'.", SHAPE, number, "missing_member")
    (custom_id, _), (method, _), (url, _), (body, written) = (members[member] for member in _MEMBERS)
    if not isinstance(custom_id, str) or not custom_id or not _is_encodable(custom_id):
        cause = f"{where} has custom_id {custom_id!r:.80}, which is not a string."
        raise WrongBatchError(cause, SHAPE, number, "invalid_custom_id")
    if len(custom_id) > MAX_CUSTOM_ID:
        cause = f"{where} has a custom_id of {len(custom_id)} characters; at most {MAX_CUSTOM_ID} are allowed."
        raise WrongBatchError(cause, "Give the request a shorter custom_id.", number, "custom_id_too_long")
    if method != "POST":
        cause = f"{where} has method {method!r:.80}, but only POST is supported."
        raise WrongBatchError(cause, SHAPE, number, "invalid_method")
    if url not in URLS:
        cause = f"{where} has url {url!r:.80}, which is not supported in batches."
        raise WrongBatchError(cause, f"Supported: {', '.join(URLS)}.", number, "invalid_url")
    if not isinstance(body, dict):
        raise WrongBatchError(f"{where} has a body that is not a JSON object.", SHAPE, number, "invalid_body")
    return BatchRequest(custom_id, url, written.encode())


def _members(text: str) -> dict[str, tuple[Any, str]] | None:
    """Return an object's members, each as its value and its text, or None if it is not an object. Raises `ValueError`.

    The text of a body is kept, because re-encoding its value would hide a field that occurs twice.
    """
    offset = _after_space(text, 0)
    if not text.startswith("{", offset):
        json.loads(text)  # raises, unless the text is another JSON value
        return None
    members: dict[str, tuple[Any, str]] = {}
    offset += 1
    mark = _END.match(text, offset)
    while mark is None or mark[1] == ",":
        found = _NAME.match(text, offset)
        if found is None:
            raise JSONDecodeError("Expecting the name of a member", text, offset)
        name, start = json.loads(found[1]), found.end()
        if name in members:
            raise JSONDecodeError("Expecting each name once", text, offset)
        value, end = _DECODER.raw_decode(text, start)
        members[name] = value, text[start:end]
        mark = _END.match(text, end)
        if mark is None:
            raise JSONDecodeError("Expecting ',' delimiter", text, end)
        offset = mark.end()
    if _after_space(text, mark.end()) != len(text):
        raise JSONDecodeError("Extra data", text, mark.end())
    return members


def _after_space(text: str, offset: int) -> int:
    match = _SPACE.match(text, offset)
    assert match is not None, "it matches nothing, too"
    return match.end()


def _is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogates, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_ID_LENGTH = 64


class ExpiresAfter(StrictModel):
    """The time after which a file is deleted automatically."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S), WHOLE]


class CreateBatchRequest(StrictModel):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=_ID_LENGTH)] = Field(
        description="id of a file of requests, one JSON object per line, from `/v1/files`"
    )
    endpoint: Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"] = Field(
        description="the `url` of every request in the file"
    )
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}[smhd]$")] = Field(
        description="`24h`, or another time in s, m, h or d; a request that has no response by then "
        "becomes an error in the error file"
    )
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
            at_most(MAX_METADATA),
        ]
        | None
    ) = Field(None, description="returned with the batch, otherwise unused", json_schema_extra={"x-effect": "none"})
    output_expires_after: ExpiresAfter | None = Field(
        None, description="when the output and error files are deleted; without it they are kept"
    )

    @property
    def window_s(self) -> int:
        """The completion window in seconds."""
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]
