"""Reads the trace of a simulation: when each request came, how long its prompt and answer were, and what they share.

ours        {"arrival_s": 1.5, "prompt_tokens": 128, "output_tokens": 64}; with "prefix_id" and "prefix_tokens", the
            first tokens of prompts with the same id are the same; "prompt_token_ids" in place of "prompt_tokens"
Mooncake    {"timestamp": 1500, "input_length": 128, "output_length": 64, "hash_ids": [3, 7]}: ms, blocks of 512
            tokens (github.com/kvcache-ai/Mooncake)
Bailian     the same with "chat_id": seconds, blocks of 16 (github.com/alibaba-edu/qwen-bailian-usagetraces-anon)
bench       the file that `oarlock bench serve --output` wrote
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oarlock.engine.errors import StartupError
from oarlock.engine.fleet import TracedRequest
from oarlock.server.bench import result
from oarlock.server.bench.workload import BLOCK_TOKENS

_EXIT_CODE = 2
_BAILIAN_TOKENS = 16
_FORM = '{"arrival_s": 1.5, "prompt_tokens": 128, "output_tokens": 64}'
_FIX = f"A line is such as {_FORM}, or of a trace of Mooncake or Bailian."


def read(file: Path) -> list[TracedRequest]:
    """Read the requests in the order of arrival, from time 0. Raises `StartupError` with the line that is wrong."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _wrong(f"--simulate {file} cannot be read: {reason}.", "Name a file of JSON lines.") from None
    if _is_result(text):
        return _from_result(file)
    found: list[TracedRequest] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        one = _request(line, f"{file}:{number}")
        if found and one.at_s < found[-1].at_s:
            raise _wrong(
                f"{file}:{number}: the request came at {one.at_s:g} s, before the one above, at {found[-1].at_s:g} s.",
                "Sort the lines by time.",
            )
        found.append(one)
    if not found:
        raise _wrong(f"--simulate {file} has no request.", _FIX)
    return _from_zero(found)


def _from_zero(found: Iterable[TracedRequest]) -> list[TracedRequest]:
    requests = list(found)
    began_s = requests[0].at_s
    return [
        TracedRequest(one.at_s - began_s, one.num_prompt_tokens, one.num_output_tokens, one.blocks, one.block_tokens)
        for one in requests
    ]


def _is_result(text: str) -> bool:
    return text.lstrip().startswith("{") and f'"format": "{result.FORMAT}"' in text[:400]


def _from_result(file: Path) -> list[TracedRequest]:
    """Read the requests of a result: each arrives when it was due, or in a closed loop sent."""
    try:
        samples = result.read(file).samples
    except StartupError as error:
        raise _wrong(error.cause, error.fix) from None
    done = [one for one in samples if one.failure is None and one.output_tokens]
    if not done:
        raise _wrong(f"--simulate {file}: none of its requests was answered.", "Name another result, or a trace.")
    at_s = [(one.sent_s if one.scheduled_s is None else one.scheduled_s, one) for one in done]
    at_s.sort(key=lambda pair: pair[0])
    return _from_zero(TracedRequest(when, one.input_tokens, one.output_tokens) for when, one in at_s)


def _request(line: str, place: str) -> TracedRequest:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise _wrong(f"{place} is not JSON: {error}.", _FIX) from None
    if not isinstance(fields, dict):
        raise _wrong(f"{place} is not a JSON object.", _FIX)
    if "arrival_s" in fields:
        return _ours(fields, place)
    if "timestamp" not in fields:
        raise _wrong(f"{place} says neither arrival_s nor timestamp.", _FIX)
    is_bailian = "chat_id" in fields
    at_s = _time(fields, "timestamp", place) * (1 if is_bailian else 1e-3)
    lengths = _count(fields, "input_length", place), _count(fields, "output_length", place)
    blocks = tuple(_whole_numbers(fields, "hash_ids", place))
    return TracedRequest(at_s, *lengths, blocks, _BAILIAN_TOKENS if is_bailian else BLOCK_TOKENS)


def _ours(fields: dict[str, Any], place: str) -> TracedRequest:
    at_s, output = _time(fields, "arrival_s", place), _count(fields, "output_tokens", place)
    if "prompt_token_ids" in fields:
        tokens = _whole_numbers(fields, "prompt_token_ids", place)
        if not tokens:
            raise _wrong(f"{place}: prompt_token_ids is empty.", _FIX)
        return TracedRequest(at_s, len(tokens), output, tuple(tokens), 1)
    prompt = _count(fields, "prompt_tokens", place)
    if "prefix_id" not in fields:
        return TracedRequest(at_s, prompt, output)
    name = fields["prefix_id"]
    if isinstance(name, bool) or not isinstance(name, int) or name < 0:
        raise _wrong(f"{place}: prefix_id is {name!r}, not a whole number of at least 0.", _FIX)
    return TracedRequest(at_s, prompt, output, (name,), _count(fields, "prefix_tokens", place))


def _time(fields: dict[str, Any], name: str, place: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise _wrong(f"{place}: {name} is {value!r}, not a number of at least 0.", _FIX)
    return float(value)


def _count(fields: dict[str, Any], name: str, place: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(f"{place}: {name} is {value!r}, not a whole number of at least 1.", _FIX)
    return value


def _whole_numbers(fields: dict[str, Any], name: str, place: str) -> list[int]:
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise _wrong(f"{place}: {name} is not a list of whole numbers of at least 0.", "Correct the line.")
    return value


def _wrong(cause: str, fix: str) -> StartupError:
    return StartupError(cause, fix, _EXIT_CODE)
