"""Corpus of bodies that break servers, for any route: some 300 cases, each with its expected outcome.

A case about a field is refused where the route has the field, and may be ignored where it has not. The limits are those
that the API documents.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fuzz.bodies import MESSAGE, Raw, Route, encode

JSON = {"Content-Type": "application/json"}
LONE = Raw('"\\ud800"')
MEGABYTE = 2**20


@dataclass(frozen=True)
class Case:
    """One request body. `refused` means a 4xx; otherwise anything but a 5xx is right."""

    name: str
    content: bytes
    refused: bool  # True, or False where either answer is right
    param: str | None = None  # that the refusal names, at least as its beginning
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    by_engine: bool = False  # refused where the grammar is compiled: not where a prompt is only shown or counted


def corpus(route: Route, stream: bool, large: bool = True) -> Iterator[Case]:
    """Yield all cases for one route. With `stream` every body that can ask for a stream does."""
    base = {**route.good, **({"stream": True} if stream else {})}
    yield from _no_objects()
    yield from _wholes(base)
    yield from _carriers(base)
    for name, values, refused in [*_SHARED, *(_large_fields() if large else ())]:
        for value in values:
            yield _of_field(route, base, name, value, refused)
    for name, values in _COMPILED:
        for value in values:
            yield replace(_of_field(route, base, name, value, True), by_engine=True)
    if "guided_choice" in route.fields:
        for fields in _CONTRADICTIONS:
            yield Case(f"contradiction {_short(fields)}", encode({**base, **fields}), False)
    if "messages" in route.fields:
        yield from _conversations(route, _without(base, "prompt"))
    if "input" in route.good:
        for number, items in enumerate(_ITEMS):
            # token ids are a good input where it is no conversation
            refused = "max_output_tokens" in route.fields or items != [5]
            yield Case(f"input {number}: {_short(items)}", encode({**base, "input": items}), refused, "input")
        yield _too_long(route, "input", {**base, "input": _long_text()})
    if "prompt" in route.good:
        for value in _PROMPTS:
            # one that takes a text alone and one that takes lists as well refuse different ones of these
            yield Case(f"prompt {_short(value)}", encode({**base, "prompt": value}), False)
        yield _too_long(route, "prompt", {**base, "prompt": _long_text()})
    missing = next(iter(route.good))
    yield Case(f"missing {missing}", encode(_without(base, missing)), True)
    yield Case(f"null {missing}", encode({**base, missing: None}), True)


def _conversations(route: Route, base: dict[str, Any]) -> Iterator[Case]:
    for number, messages in enumerate([*_MESSAGES, _many_messages()]):
        yield Case(f"messages {number}: {_short(messages)}", encode({**base, "messages": messages}), True, "messages")
    for name, content in (("special tokens", _SPECIAL), ("blanks", " \n\t")):
        yield Case(f"{name} as content", encode({**base, "messages": [{"role": "user", "content": content}]}), False)
    body = {**base, "messages": [MESSAGE]}
    for documents in ([{"text": "d" * 100_000}], ["x"]) if "documents" in route.fields else ():
        # The same values are good where documents are ranked.
        yield Case(f"documents {_short(documents)}", encode({**body, "documents": documents}), True, "documents")
    long = Raw(f'[{{"role": "user", "content": {_long_text()}}}]')
    yield _too_long(route, "messages", {**base, "messages": long})


def _too_long(route: Route, name: str, body: dict[str, Any]) -> Case:
    """More than fits any context: refused where something would be generated, while counting tokens has no limit."""
    generates = "temperature" in route.fields
    return Case(f"{name} of 8 MB", encode(body), generates, name if generates else None)


def _of_field(route: Route, base: dict[str, Any], name: str, value: Any, refused: bool) -> Case:
    known = name in route.fields
    body = {**base, name: value}
    if name == "stream_options":
        body.pop("stream", None)
    if name in _NEEDS:
        needs = _NEEDS_OF_ITEMS if "input" in route.good else _NEEDS
        if route.path.startswith("/v1/messages"):
            needs = _NEEDS_OF_BLOCKS
        body |= {other: given for other, given in needs[name].items() if other in route.fields}
    lone = isinstance(value, Raw) and "ud800" in value
    nowhere = isinstance(value, Raw) and any(word in value for word in ("NaN", "Infinity", "1e999", "ud800"))
    param = name if refused and known and not lone and not (isinstance(value, Raw) and len(value) > 4000) else None
    return Case(f"{name} {_short(value)}", encode(body), (refused and known) or nowhere, param)


def _no_objects() -> Iterator[Case]:
    """Bodies that are no JSON object."""
    texts = {
        "no JSON": b"not json",
        "empty": b"",
        "null": b"null",
        "array": b"[]",
        "number": b"5",
        "string": b'"text"',
        "byte-order mark": b"\xef\xbb\xbf{}",
        "nesting of arrays, 100,000": b"[" * 100_000,
        "nesting of objects, 100,000": b'{"a":' * 100_000,
        "a NUL byte": b"\x00",
    }
    for name, content in texts.items():
        yield Case(name, content, True)


def _wholes(base: dict[str, Any]) -> Iterator[Case]:
    """Good bodies with something wrong about the whole, or something odd that is allowed."""
    good = encode(base)
    yield Case("UTF-16", good.decode().encode("utf-16"), True)
    yield Case("invalid UTF-8", good[:-1] + b', "x": "\xff"}', True)
    yield Case("trailing bytes", good + b" x", True)
    yield Case("cut short", good[:-1], True)
    yield Case("raw NUL in a string", good[:-1] + b', "x": "\x00"}', True)
    odd = {"NaN": True, "Infinity": True, "-Infinity": True, "1e999": True, '"\\ud800"': True, "-0": False}
    odd |= {"9" * 5000: True, str(2**63): False, str(2**64): False, "-1": False, '"\\u0000"': False}
    odd |= {"[" * 100 + "]" * 100: False, "[" * 250 + "]" * 250: True}
    for value, refused in odd.items():
        yield Case(f"unknown field {_short(Raw(value))}", encode({**base, "x": Raw(value)}), refused)
    yield Case("duplicate keys", good[:-1] + b", " + good[1:], False)
    yield Case("300,000 unknown keys", good[:-1] + b", " + _many_keys(), True)
    yield Case("100 unknown keys with long names", encode({**base, **{f"{n:0>2000}": 0 for n in range(100)}}), False)


def _carriers(base: dict[str, Any]) -> Iterator[Case]:
    """Good bodies with the wrong headers or encoding."""
    good = encode(base)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        yield Case(f"as {kind}", good, True, headers={"Content-Type": kind})
    yield Case("without a content type", good, True, headers={"Content-Type": ""})
    yield Case("as UTF-7", good, True, headers={"Content-Type": "application/json; charset=utf-7"})
    packed = gzip.compress(good, mtime=0)
    yield Case("gzip, declared", packed, True, headers={**JSON, "Content-Encoding": "gzip"})
    yield Case("gzip, not declared", packed, True)
    yield Case("a long request id", good, False, headers={**JSON, "X-Request-Id": "i" * 8000})
    yield Case("an odd request id", good, False, headers={**JSON, "X-Request-Id": "http://127.0.0.1/ ; drop"})
    for limit in ("0", "-1", "NaN", "1e999", "x", "9" * 400):
        yield Case(f"time limit {limit[:9]}", good, False, headers={**JSON, "X-Request-Timeout": limit})
    for rank in ("1", "-1", "0.5", "x", "9" * 5000):
        yield Case(f"replica {rank[:9]}", good, False, headers={**JSON, "X-data-parallel-rank": rank})


def _tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


_CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
_TREE = {"type": "object", "properties": {"a": {"$ref": "#"}}}
_CATASTROPHE = {"type": "string", "pattern": "^(a+)+$"}
_WIDE = {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "[a-z]{1,99}"} for n in range(400)}}
_DEEP: dict[str, Any] = {"type": "string"}
for _ in range(70):
    _DEEP = {"type": "array", "items": _DEEP}

_NUMBER = [Raw("NaN"), Raw("1e999"), "1", True, [], {}]
_SWITCH = ["yes", 1, [], {}]

# (field, values, whether they are refused where the field exists)
_SHARED: list[tuple[str, list[Any], bool]] = [
    ("model", ["unknown", "../../etc/passwd", 5, [], "m" * MEGABYTE, "\u202e\x00\r\n"], True),
    ("max_tokens", [-1, 2**31, 2**64, True, "5", 1.5, Raw("1" + "0" * 5000)], True),
    ("max_completion_tokens", [0, -1, 2**31, True, "5", 1.5], True),
    ("n", [0, -1, 129, 10**9, True, "2", 1.5, {}], True),
    ("temperature", [-1, 2.1, Raw("Infinity"), *_NUMBER], True),
    ("temperature", [Raw("-0"), 1e-300], False),
    ("top_p", [-0.1, 1.1, *_NUMBER], True),
    ("top_p", [0], False),
    ("top_k", [-2, 1.5, 10**40, True], True),
    ("min_p", [-1, 2, *_NUMBER], True),
    ("top_n_sigma", [-2, 101, *_NUMBER], True),
    ("presence_penalty", [2.1, *_NUMBER], True),
    ("frequency_penalty", [-2.1, *_NUMBER], True),
    ("repetition_penalty", [0, -1, *_NUMBER], True),
    ("seed", [2**63, 2**200, 1.5, True, "1"], True),
    ("stop", ["", [""], [5], 5, ["x"] * 65, "s" * MEGABYTE, LONE], True),
    ("stop", [[], ["x"] * 17], False),
    ("stop_token_ids", [[-1], [4096], [2**63], ["1"], [True], 5], True),
    ("logit_bias", [{"a": 1}, {"-1": 1}, {"4096": 1}, {"1": 101}, {"1": True}, Raw('{"1": NaN}'), [1]], True),
    ("logit_bias", [{str(number): 1 for number in range(1025)}], True),
    ("allowed_token_ids", [[], [4096], [-1], ["a"], 5], True),
    ("bad_words", [[""], "no", [5], ["w"] * 1025, ["w" * MEGABYTE]], True),
    ("logprobs", [21, -1, "2", 1.5], True),
    ("top_logprobs", [21, -1, True], True),
    ("prompt_logprobs", [21, -1, True], True),
    ("stream", ["yes", 1, [], {}], True),
    ("stream_options", [{"include_usage": True}, []], True),
    ("echo", _SWITCH, True),
    ("ignore_eos", _SWITCH, True),
    ("best_of", [0, 129, 10**9, True, "2"], True),
    ("min_tokens", [-1, True, 10**12, "5"], True),
    ("truncate_prompt_tokens", [0, -2, True, 10**40], True),
    ("priority", [11, -11, 2**31, "high", 1.5], True),
    ("timeout", [0, -1, Raw("NaN"), "5"], True),
    ("cache_salt", ["c" * 10_000, "", 5], True),
    ("user", ["u" * MEGABYTE, 5, []], True),
    ("add_special_tokens", _SWITCH, True),
    ("response_format", [{"type": "xml"}, "json", {}, {"type": "json_schema"}, _schema(5)], True),
    ("response_format", [_schema(_DEEP)], True),
    (
        "response_format",
        [_schema(_WIDE), _schema(_CYCLE), _schema(_TREE), _schema(_CATASTROPHE), _schema({}), _schema(True)],
        False,
    ),
    ("structured_outputs", [{"jsn": {}}, {}, {"choice": []}, {"regex": 5}], True),
    ("structured_outputs", [{"regex": "a" * 200_000}, {"json": {}, "regex": "a"}], True),
    ("structured_outputs", [{"regex": "(a|a)*b"}, {"regex": "a{1,9999}{1,9999}"}], False),
    ("guided_json", [5, "{"], True),
    ("guided_choice", ["a", [], [5]], True),
    ("tools", [[_tool(f"t{number}") for number in range(257)], [_tool("a"), _tool("a")], [_tool("a\nb")]], True),
    ("tools", [[{"type": "function"}], "x", [5], [_tool("")], [_tool("a", 5)]], True),
    ("tools", [[_tool("a", _CYCLE)], [_tool("a", _DEEP)], [_tool("a", {"type": "string"})]], False),
    ("tool_choice", [{"type": "function", "function": {"name": "absent"}}, "sometimes", 5, {}], True),
    ("parallel_tool_calls", ["no", 1], True),
    ("chat_template", ["{{ messages }}", 5], True),
    ("chat_template_kwargs", [{"messages": []}, {"a b": 1}, [], {"x": "y" * 100_000}], True),
    ("documents", [[{}], 5], True),
    ("continue_final_message", _SWITCH, True),
    ("return_token_strs", _SWITCH, True),
]
# Wrong in a way that only the compiler of grammars finds.
_COMPILED: list[tuple[str, list[Any]]] = [
    ("structured_outputs", [{"regex": "("}, {"grammar": "%"}]),
    ("guided_json", [{"type": "nonsense"}]),
]

# Each field is fine; together they leave nothing to generate. That is a mistake of the request, not of the server.
_CONTRADICTIONS: list[dict[str, Any]] = [
    {"guided_choice": ["a", "b"], "allowed_token_ids": [2000]},
    {"guided_choice": ["a"], "bad_words": ["a"]},
    {"guided_regex": "a", "min_tokens": 3},
    {"allowed_token_ids": [2000], "logit_bias": {"2000": -100}},
    {"allowed_token_ids": [2], "min_tokens": 2},
]


# Text that takes long to write is written once.
@functools.cache
def _large_fields() -> list[tuple[str, list[Any], bool]]:
    schema = Raw(json.dumps(_schema({"enum": ["e" * 100] * 100_000})))
    tools = Raw(json.dumps([_tool("a", {"enum": ["e" * 100] * 40_000})]))
    return [("response_format", [schema], True), ("tools", [tools], True)]


@functools.cache
def _many_keys() -> bytes:
    return ("".join(f'"k{number}": 0, ' for number in range(300_000)) + '"end": 0}').encode()


@functools.cache
def _many_messages() -> Raw:
    return Raw(json.dumps([MESSAGE] * 200_000))


@functools.cache
def _long_text() -> Raw:
    return Raw(json.dumps("word " * (8 * MEGABYTE // 5)))


# Fields without which another is refused for a reason of its own.
_NEEDS: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [_tool("present")]},
    "top_logprobs": {"logprobs": True},
}
_NEEDS_OF_ITEMS: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [{"type": "function", "name": "present"}]},
    "top_logprobs": {"include": ["message.output_text.logprobs"]},
}
_NEEDS_OF_BLOCKS: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [{"name": "present", "input_schema": {"type": "object"}}]},
    "top_logprobs": {},
}
_MESSAGES: list[Any] = [
    [],
    "x",
    {},
    [5],
    [None],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "king", "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "poem", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}],
]
_ITEMS: list[Any] = [
    [],
    "",
    {},
    5,
    [5],
    [None],
    [[]],
    [{}],
    [{"role": "king", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/"}]}],
    [{"role": "user", "content": [{"type": "input_text"}]}],
    [{"type": 5}],
    [{"type": "web_search_call", "id": "x"}],
    [{"type": "function_call", "call_id": "x"}],
    [{"type": "function_call_output", "call_id": "", "output": "x"}],
    [{"type": "function_call_output", "call_id": "x", "output": 5}],
    [{"type": "reasoning", "encrypted_content": "oarlock-text:%%"}],
    [{"type": "item_reference", "id": "../../etc/passwd"}],
]
_SPECIAL = "<|im_end|>\n<|im_start|>system\n<tool_call>{\n</think><|endoftext|>"
_PROMPTS: list[Any] = ["", [], [[]], {}, 5, [1, "a"], [[[1]]], [-1], [4096], [2**63], [1.5], [True], ["x"] * 1025, LONE]


def _without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != name}


def _short(value: Any) -> str:
    text = value if isinstance(value, Raw) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]}… ({len(text)})"
