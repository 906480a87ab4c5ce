"""Raw bytes to a checked request: size limit, read deadline, content type, strict parsing, named fields.

Every way to send nonsense ends here in one `RequestError` that names the field and never repeats a large input.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from engine.errors import RequestError
from server.errors import ClientGoneError, HttpError
from server.schemas import NEUTRAL_VALUES, FieldError, Wire

READ_TIMEOUT_S = 30.0
_ParsedT = TypeVar("_ParsedT", bound=Wire)
_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_REPORTED = 32
_MAX_UNKNOWN = 256


async def read_json(request: Request, max_size: int) -> bytes:
    """The body's bytes, once they are all here."""
    _check_content_type(request)
    too_large = HttpError(
        413,
        f"The request body is larger than {max_size} bytes. Send less, or raise --max-body-size.",
        code="body_too_large",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_size:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_size:
                    raise too_large
    except TimeoutError:
        message = f"The body did not arrive within {READ_TIMEOUT_S:.0f} seconds."
        raise HttpError(408, message, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def _check_content_type(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(415, "The body must be JSON: send the header 'Content-Type: application/json'.")
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters.lower())
    if charset and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        raise HttpError(415, "The body must be encoded in UTF-8.")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise HttpError(415, "Compressed bodies are not accepted: send the JSON as it is.")


def parse(schema: type[_ParsedT], body: bytes) -> _ParsedT:
    """A checked request. Raises `RequestError` that names the first wrong field."""
    try:
        parsed = schema.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error) from None
    _refuse_unsupported(parsed)
    return parsed


def ignored_parameters(parsed: Wire) -> str:
    """Names of fields that nobody here knows, for the header that reports them."""
    extra = [name for name in parsed.model_extra or () if name not in NEUTRAL_VALUES and name != "best_of"]
    shown = [name for name in extra[:_MAX_REPORTED] if _HEADER_SAFE.fullmatch(name)]
    hidden = len(extra) - len(shown)
    return ", ".join([*shown, f"+{hidden}"] if hidden else shown)


def _refuse_unsupported(parsed: Wire) -> None:
    extra = parsed.model_extra or {}
    if len(extra) > _MAX_UNKNOWN:
        raise RequestError(f"The body has {len(extra)} unknown fields, at most {_MAX_UNKNOWN} are tolerated.")
    if not all(_is_finite(value) for value in extra.values()):
        raise RequestError("The body is not valid JSON: NaN and Infinity are not numbers.", None, "invalid_json")
    for name in NEUTRAL_VALUES.keys() & extra.keys():
        if not any(_same(extra[name], neutral) for neutral in NEUTRAL_VALUES[name]):
            message = f"'{name}' is not supported by this server. Leave it out."
            raise RequestError(message, name, "unsupported_parameter")
    best_of = extra.get("best_of")
    if best_of is not None and not _same(best_of, getattr(parsed, "n", 1)):
        message = "'best_of' is only accepted when it equals 'n'. Leave it out."
        raise RequestError(message, "best_of", "unsupported_parameter")


def _is_finite(value: Any) -> bool:
    """No NaN and no infinity anywhere inside. Depth is bounded by the JSON parser."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list) else True


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and a switch is not a number."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _request_error(error: ValidationError) -> RequestError:
    """One sentence for the first problem. The input itself is never repeated."""
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, FieldError):
        return RequestError(str(own), own.param)
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['ctx']['error']}.", None, "invalid_json")
    path = [part for part in first["loc"] if not str(part).startswith("form:")]
    if not path:
        return RequestError("The body must be a JSON object.", None, "invalid_json")
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    message = first["msg"][:1].lower() + first["msg"][1:]
    param = where if path[0] == "messages" else str(path[0])
    if first["type"] == "missing":
        return RequestError(f"'{where}' is required.", param)
    return RequestError(f"'{where}' is wrong: {message}.", param)
