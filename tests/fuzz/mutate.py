"""Random bodies: good ones with hostile values, keys and bytes worked in. The same seed makes the same bodies.

Whether a mutated body is still valid is not tracked, so any answer but a 5xx is right.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from tests.fuzz.bodies import MESSAGE, Raw, Route, encode

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 5, 0.5, -0.0, 1.0, 21, 129, 4095, 4096, 2**31, 2**53, 2**63, 10**40, 1e-300),
    *("", "a", "\x00", "\u202e", "ÄÖÜ 😀", "<|im_end|>", "x" * 3000, "none", "auto", "required", "user", "text"),
    *(
        [],
        [[]],
        [5],
        [5, 6],
        ["a"],
        ["a", "b"],
        [None],
        {},
        {"a": 1},
        {"5": 3},
        {"type": "json_object"},
        {"regex": "a|b"},
    ),
    *({"choice": ["a", "b"]}, {"include_usage": True}, [_TOOL], [MESSAGE], [MESSAGE, MESSAGE], _FORM),
    *(Raw("NaN"), Raw("-Infinity"), Raw("1e999"), Raw('"\\ud800"'), Raw("[" * 150 + "]" * 150), Raw('"\\u0000"')),
]
_ALLOWED: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "seed": [1, -5],
    "stop": ["e", ["a", "the"]],
    "stream": [True],
    "logprobs": [0, 3, True],
    "echo": [True],
    "tools": [[_TOOL]],
    "response_format": [_FORM, {"type": "json_object"}],
    "logit_bias": [{"5": 100}, {"7": -100}],
    "ignore_eos": [True],
    "return_token_ids": [True],
    "prompt_logprobs": [0, 2],
    "best_of": [3],
    "min_tokens": [1],
    "presence_penalty": [1.5],
    "repetition_penalty": [1.3],
    "bad_words": [["the"]],
    "truncate_prompt_tokens": [1, -1],
}


def mutated(route: Route, chance: random.Random) -> bytes:
    """Make one mutated body for `route`."""
    body = copy.deepcopy(route.good)
    if "messages" in route.fields and "prompt" in route.good and chance.random() < 0.5:
        body = {"messages": [dict(MESSAGE)]}
    known = sorted(route.fields)
    for _ in range(chance.randint(0, 4)):
        name = chance.choice(known)
        if name in _ALLOWED:
            body[name] = chance.choice(_ALLOWED[name])
    for _ in range(chance.randint(0, 3)):
        _damage(body, known, chance)
    content = encode(body)
    if chance.random() < 0.1:
        content = _spoil(content, chance)
    return content


def _damage(body: dict[str, Any], known: list[str], chance: random.Random) -> None:
    """One hostile change, at the top or somewhere within."""
    what = chance.random()
    if what < 0.5:
        body[chance.choice(known)] = chance.choice(_VALUES)
    elif what < 0.8 and body:
        name = chance.choice(list(body))
        body[name] = _changed(body[name], chance)
    elif what < 0.9 and body:
        del body[chance.choice(list(body))]
    else:
        body["".join(chance.choices('abc_ \x00é😀"\\', k=chance.randint(0, 9)))] = chance.choice(_VALUES)


def _changed(value: Any, chance: random.Random) -> Any:
    """`value` with one thing in it replaced, at a random depth. `Raw` is text only at the top, so none goes within."""
    inner = [other for other in _VALUES if not isinstance(other, Raw)]
    if isinstance(value, Raw) or chance.random() < 0.3:
        return chance.choice(inner)
    if isinstance(value, list) and value:
        position = chance.randrange(len(value))
        return [*value[:position], _changed(value[position], chance), *value[position + chance.randint(0, 1) :]]
    if isinstance(value, dict) and value:
        name = chance.choice(list(value))
        changed = {**value, name: _changed(value[name], chance)}
        if chance.random() < 0.2:
            del changed[name]
        return changed
    if isinstance(value, str):
        return value + chance.choice(["", "\x00", "😀", "\u2028", "{{", "e" * 2000])
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return chance.choice([-value, value + 0.5, value * 10**6, json.dumps(value)])
    return chance.choice(inner)


def _spoil(content: bytes, chance: random.Random) -> bytes:
    """Cut, double or replace some bytes."""
    start = chance.randrange(len(content))
    end = min(len(content), start + chance.randint(1, 8))
    middle = chance.choice([b"", content[start:end] * 2, chance.randbytes(end - start)])
    return content[:start] + middle + content[end:]
