"""Checks that an answer is one that this server may give to any request.

No 5xx, no 422; a refusal has exactly the four keys (on the routes of messages those of their API), is short, and names
the field it is about; a stream ends in `[DONE]`, or in the one event that says how it ended. These checks need the
answer alone, not the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_MESSAGE, MAX_BODY = 2048, 4096
KEYS = {"message", "type", "param", "code"}
ENDS = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")  # of named events


def problem_of(
    status: int, headers: Mapping[str, str], content: bytes, *, refused: bool = False, param: str | None = None
) -> str | None:
    """One sentence about the problem with an answer, or None."""
    if status >= 500 or status == 422:
        return f"status {status}: {content[:300]!r}"
    if status >= 400:
        return _problem_of_refusal(headers, content, param)
    if refused:
        return f"accepted with {status}: {content[:200]!r}"
    if headers.get("content-type", "").startswith("text/event-stream"):
        return _problem_of_stream(content)
    return None


def _problem_of_refusal(headers: Mapping[str, str], content: bytes, param: str | None) -> str | None:
    if not headers.get("content-type", "").startswith("application/json"):
        return f"an error as {headers.get('content-type')!r}"
    if len(content) > MAX_BODY:
        return f"an error of {len(content)} bytes"
    try:
        body = json.loads(content)
    except ValueError:
        return f"an error that is no JSON: {content[:200]!r}"
    if "request-id" in headers:
        return _problem_of_message_error(body, param)
    if not isinstance(body, dict) or set(body) != {"error"} or not isinstance(body["error"], dict):
        return f"no error object: {content[:200]!r}"
    error = body["error"]
    if set(error) != KEYS:
        return f"the keys of the error are {sorted(error)}"
    if not isinstance(error["message"], str) or not 0 < len(error["message"]) <= MAX_MESSAGE:
        return f"the message is {str(error['message'])[:100]!r}"
    if not isinstance(error["type"], str) or not isinstance(error["param"], str | None):
        return f"type or param is of the wrong kind: {content[:200]!r}"
    if param is not None and not str(error["param"]).startswith(param):
        return f"param is {error['param']!r}, not {param!r}: {error['message'][:200]}"
    return None


def _problem_of_message_error(body: Any, param: str | None) -> str | None:
    """Problem with an error of the messages routes, whose errors have other keys."""
    if not isinstance(body, dict) or set(body) != {"type", "error", "request_id"} or body["type"] != "error":
        return f"no error of messages: {str(body)[:200]}"
    if set(body["error"]) != {"type", "message"} or not 0 < len(body["error"]["message"]) <= MAX_MESSAGE:
        return f"the error is {str(body['error'])[:200]}"
    if param is not None and param not in body["error"]["message"]:
        return f"it does not name {param!r}: {body['error']['message'][:200]}"
    return None


def _problem_of_stream(content: bytes) -> str | None:
    lines = [line for line in content.decode().split("\n\n") if line and not line.startswith(":")]
    if lines and lines[0].startswith("event: "):
        return _problem_of_events(lines)
    if not lines or lines[-1] != "data: [DONE]":
        return f"a stream that ends with {content[-100:]!r}"
    for line in lines[:-1]:
        if not line.startswith("data: "):
            return f"a line that is no event: {line[:100]!r}"
        event = json.loads(line.removeprefix("data: "))
        if "error" in event and event["error"]["type"] != "invalid_request_error":
            return f"an error inside a stream: {line[:300]}"
    return None


def _problem_of_events(events: list[str]) -> str | None:
    """Problem with a stream of named events."""
    for number, event in enumerate(events):
        name, _, data = event.partition("\ndata: ")
        body = json.loads(data)
        if name != f"event: {body['type']}" or body.get("sequence_number", number) != number:
            return f"an event that is not in order: {event[:100]!r}"
        has_ended = body["type"] in ENDS
        if has_ended != (number == len(events) - 1):
            return f"event {number} of {len(events)} is {body['type']}"
    return None
