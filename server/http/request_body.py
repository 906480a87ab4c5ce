"""Conversion of raw bytes to a checked request: size limit, read deadline, content type, strict parsing.

Errors in the content are a `RequestError` of one sentence that names the field and never repeats a large input.
"""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from oarlock.engine.errors import RequestError
from oarlock.server.errors import ClientGoneError, HttpError
from oarlock.server.http.body_memory import HeldMemory
from oarlock.server.http.ignored_parameters import refuse
from oarlock.server.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from oarlock.server.schemas.batches import CreateBatchRequest
from oarlock.server.schemas.chat import ChatRequest, DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from oarlock.server.schemas.generation import AbortRequest, CompletionRequest
from oarlock.server.schemas.messages import CountTokensRequest, MessagesRequest
from oarlock.server.schemas.pooling import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from oarlock.server.schemas.responses import CompactRequest, ResponsesRequest
from oarlock.server.schemas.strict_model import FieldError, StrictModel

# The schemas of all bodies by name, for the OpenAPI document and the process that reads large bodies.
REQUEST_BODIES: dict[str, type[StrictModel]] = {
    schema.__name__: schema
    for schema in (
        CompletionRequest,
        ChatRequest,
        ResponsesRequest,
        CompactRequest,
        MessagesRequest,
        CountTokensRequest,
        EmbeddingRequest,
        PoolingRequest,
        RerankRequest,
        ScoreRequest,
        TokenizeRequest,
        TokenizeChatRequest,
        DetokenizeRequest,
        AbortRequest,
        LoadAdapterRequest,
        UnloadAdapterRequest,
        CreateBatchRequest,
    )
}
READ_TIMEOUT_S = 30.0
_ParsedT = TypeVar("_ParsedT", bound=StrictModel)
_MAX_IGNORED = 256
_NESTED = ("messages", "input")  # conversations: errors in them include the path

# Fields of the API that are not supported, with the values that have no effect. Any other value is refused, since a
# response without it would be wrong. A field that an endpoint declares is supported there. Fields that
# can be left out without making the response wrong, such as a hosted tool, are not listed here: they are reported as
# ignored.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "best_of": (None, 1),
    "echo": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "spaces_between_special_tokens": (None, True),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "documents": (None, []),
    "logits_processors": (None, []),
    "use_beam_search": (None, False),
    # A constraint of other servers: a response without it would look as if it had been applied.
    "guided_whitespace_pattern": (None,),
    # The choice of an adapter in requests of SGLang, TGI and llama-server.
    "lora_path": (None,),
    "adapter_id": (None,),
    "lora": (None, []),
    # Fields of Cohere's and Jina's rerankers.
    "max_tokens_per_doc": (None,),
    "max_chunks_per_doc": (None,),
    "rank_fields": (None, []),
    "relevant_spans": (None, {"mode": "disabled"}),
}
_NAMES_ADAPTER = frozenset({"lora_path", "adapter_id", "lora"})


async def read_json(request: Request, max_size: int, held: HeldMemory) -> bytearray:
    """Return the body of at most `max_size` bytes, which `held` counts.

    Raises `HttpError` (408, 413, 415, 503) or `ClientGoneError`.
    """
    _check_content_type(request)
    too_large = HttpError(
        413,
        f"The request body is larger than {max_size} bytes. Send less, or raise --max-body-size.",
        code="body_too_large",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit():
        if int(declared) > max_size:
            raise too_large
        held.check(int(declared))
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_size:
                    raise too_large
                held.add(len(chunk))
    except TimeoutError:
        message = f"The body did not arrive within {READ_TIMEOUT_S:.0f} seconds."
        raise HttpError(408, message, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return body


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
        raise HttpError(415, "Compressed bodies are not accepted: send the JSON uncompressed.")


def parse(schema: type[_ParsedT], body: bytes | bytearray) -> _ParsedT:
    """Return the checked request. Raises a `RequestError` that names the first wrong field."""
    try:
        parsed = schema.model_validate_json(body)
    except ValidationError as error:
        raise request_error(error) from None
    _WHOLE_BODY.decode(body.decode())
    _refuse_unsupported(parsed)
    return parsed


def parse_any(schemas: Sequence[type[_ParsedT]], body: bytes | bytearray) -> _ParsedT:
    """Call `parse` with the first schema, or with the second, if there is one, for a body that has `messages`."""
    has_two_forms = len(schemas) > 1 and b"messages" in body
    return parse(schemas[1] if has_two_forms and _has_messages(body) else schemas[0], body)


def _has_messages(body: bytes | bytearray) -> bool:
    """Return whether the body has `messages`. False if it is not JSON, which `parse` reports."""
    try:
        value = from_json(body)
    except ValueError:
        return False
    return isinstance(value, dict) and "messages" in value


def ignored_parameters(parsed: StrictModel, strict: bool) -> list[str]:
    """Return the names of unknown fields and of fields without effect, sorted.

    Raises `RequestError` if there are too many, and for any if `strict`.
    """
    neutral = NEUTRAL_VALUES.keys() - type(parsed).model_fields.keys()  # an undeclared field has a neutral value
    ignored = sorted({name for name in parsed.ignored_fields() if name not in neutral})
    if len(ignored) > _MAX_IGNORED:
        raise RequestError(
            f"The body has {len(ignored)} fields that would be ignored; at most {_MAX_IGNORED} are allowed."
        )
    if strict:
        refuse(ignored)
    return ignored


def _refuse_unsupported(parsed: StrictModel) -> None:
    """Raise `RequestError` for a field of `NEUTRAL_VALUES` with a value that is not neutral."""
    extra = parsed.model_extra or {}
    for name in sorted(NEUTRAL_VALUES.keys() & extra.keys()):
        if not any(_same(extra[name], neutral) for neutral in NEUTRAL_VALUES[name]):
            fix = "Name a LoRA adapter in 'model'." if name in _NAMES_ADAPTER else "Leave it out."
            message = f"'{name}' is not supported. {fix}"
            raise RequestError(message, name, "unsupported_parameter")


def _no_field_twice(pairs: list[tuple[str, Any]]) -> None:
    """Raise `RequestError` for a name given twice: parsers differ in which value counts, so a proxy may see another
    request.
    """
    if len(dict(pairs)) == len(pairs):
        return
    (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
    message = f"The body is not valid JSON: '{name[:64]}' occurs twice in one object."
    raise RequestError(message, None, "invalid_json")


def _finite(text: str) -> None:
    """Raise `RequestError` for NaN, infinities, and numbers beyond the range of floats."""
    if not math.isfinite(float(text)):
        raise RequestError("The body is not valid JSON: NaN and Infinity are not numbers.", None, "invalid_json")


# Pydantic checks only declared fields, and only the last of equal names. This decoder checks all; its result is unused.
_WHOLE_BODY = json.JSONDecoder(
    object_pairs_hook=_no_field_twice, parse_float=_finite, parse_int=str, parse_constant=_finite
)


def _same(value: Any, neutral: Any) -> bool:
    """Return whether the values are equal; true differs from 1, and false from 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def request_error(error: ValidationError) -> RequestError:
    """Return an error of one sentence about the first problem. The input itself is never repeated."""
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    path = [part for part in first["loc"] if not str(part).startswith("form:")]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, FieldError):  # inside a conversation, the path is more precise than the field
        return RequestError(str(own), where if path and path[0] == own.param in _NESTED else own.param, own.code)
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['ctx']['error']}.", None, "invalid_json")
    if not path:
        return RequestError("The body must be a JSON object.", None, "invalid_json")
    param = where if path[0] in _NESTED else str(path[0])
    if first["type"] == "missing":
        return RequestError(f"'{where}' is required.", param)
    if path[-1] == "[key]":  # the name of a member; the part before it is the name's path
        where, path = where.removesuffix(".[key]"), path[:-1]
        return RequestError(f"The name in '{where}' {problem_of(first['type'], first.get('ctx', {}), '')}.", param)
    return RequestError(f"'{where}' {problem_of(first['type'], first.get('ctx', {}), first['msg'])}.", param)


def with_fields_renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Rewrite an error about a chat turn to name the fields of the request from which the turn was made.

    `names`: fields of the turn -> fields of the request. A path inside a field is dropped, since it belongs to the
    turn.
    """
    old = (error.param or "").split("[")[0].split(".")[0]
    new = names.get(old)
    if new is None:
        return error
    message = error.message.replace(f"'{error.param}'", f"'{new}'").replace(f"'{old}'", f"'{new}'")
    return RequestError(message, new, error.code)


# Pydantic's error types -> text.
_KINDS = {
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "none_required": "must be null",
    "extra_forbidden": "is not known here",
}
# Pydantic's error types -> text, and the key of the limit in the error's context.
_LIMITS = {
    "greater_than_equal": ("must be at least {}", "ge"),
    "greater_than": ("must be above {}", "gt"),
    "less_than_equal": ("must be at most {}", "le"),
    "less_than": ("must be below {}", "lt"),
    "literal_error": ("must be {}", "expected"),
    "enum": ("must be {}", "expected"),
    "string_pattern_mismatch": ("must match the pattern {}", "pattern"),
    "union_tag_not_found": ("must have {}", "discriminator"),
}
# Errors about lengths: "at least" or "at most", the key of the limit, and the unit.
_LENGTHS = {
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
}


def problem_of(kind: str, context: dict[str, Any], message: str) -> str:
    """Return the text of a pydantic error that follows the name of the field. The arguments are the error's fields."""
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        limit = context[key]
        return words.format(f"{limit:g}" if isinstance(limit, float) else f"{limit:,}" if type(limit) is int else limit)
    if kind in _LENGTHS:
        bound, key, what = _LENGTHS[kind]
        count = context[key]
        return f"must have {bound} {count:,} {what}{'' if count == 1 else 's'}"
    if kind == "union_tag_invalid":
        return f"must have {context['discriminator']} {context['expected_tags']}"
    if message.startswith("must "):  # our own error
        return message
    return f"is wrong: {message[:1].lower()}{message[1:]}"
