"""The store of responses never counts less than it holds, whatever is put into it."""

from __future__ import annotations

import gc
import json
import random
import sys
import types

import pytest
from pydantic import TypeAdapter

from oarlock.server.endpoints.responses.store import ResponseStore
from oarlock.server.schemas.response_items import REASONING, InputItem, sealed

_ITEM = TypeAdapter(InputItem)
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def size_of(root):
    """Bytes of an object and of all that it refers to, each once."""
    seen, left, total = set(), [root], 0
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, _SHARED):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        left += gc.get_referents(value)
    return total


def nested(rng, depth):
    return [nested(rng, depth - 1) if depth else {} for _ in range(rng.randrange(1, 6))]


def random_item(rng):
    text = rng.choice(["", "x", "é😀" * 9, "word " * 200])
    part = {"type": "input_text", "text": text, "annotations": nested(rng, 4), "logprobs": nested(rng, 4)}
    item = rng.choice(
        [
            {"role": "user", "content": text, "junk": nested(rng, 4)},
            {"type": "message", "role": "assistant", "content": [part] * rng.randrange(4), "id": "m"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": text},
            {"type": "function_call_output", "call_id": "c", "output": [part, part]},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed(text * 20, REASONING)},
            {
                "type": "reasoning",
                "content": [{"type": "reasoning_text", "text": text}],
                "encrypted_content": "e" * 9999,
            },
        ]
    )
    return _ITEM.validate_json(json.dumps(item))


def random_response(rng, number):
    output = [
        {
            "id": f"msg_{number:08d}_{index}",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "é" * rng.randrange(99), "annotations": [], "logprobs": []}],
        }
        for index in range(rng.randrange(4))
    ]
    return {
        "id": f"resp_{number:024d}",
        "output": output,
        "metadata": {"k": "v" * rng.randrange(99)},
        "tools": nested(rng, 3),
    }


@pytest.mark.slow
def test_it_never_holds_more_than_its_limit():
    for seed in range(3):
        rng, limit = random.Random(seed), 100_000
        store = ResponseStore(limit)
        empty, stored = size_of(store), []
        for number in range(120):
            response, owner = random_response(rng, number), rng.choice("ab")
            before = [random_item(rng) for _ in range(rng.randrange(5))]
            found = store.get(owner, stored[-1]) if stored and rng.random() < 0.5 else None
            store.put(owner, response, [*(found.conversation if found else ()), *before])
            stored.append(response["id"])
            if rng.random() < 0.2:
                store.delete(owner, rng.choice(stored))
            assert store.num_bytes <= limit
            assert size_of(store) - empty <= store.num_bytes + limit // 20, "and tables with room for more"
        assert store.num_bytes > limit // 2
        for name in stored:
            store.delete("a", name), store.delete("b", name)
        assert len(store) == store.num_bytes == 0 and not store._by_owner


def test_one_byte_too_many_is_not_kept():
    rng = random.Random(1)
    response = random_response(rng, 1)
    whole = ResponseStore(2**20)
    whole.put("a", response, [random_item(rng)])
    exact, short = ResponseStore(whole.num_bytes), ResponseStore(whole.num_bytes - 1)
    for store in (exact, short):
        store.put("a", response, [random_item(random.Random(1))])
    assert len(short) == 0 == short.num_bytes


def test_stored_responses_continue_unchanged():
    texts = {"message": "said", "function_call": "{}", "function_call_output": "found", "reasoning": "thought"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "said", "annotations": [1]}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
        {"type": "reasoning", "encrypted_content": sealed("thought", REASONING)},
    ]
    output = [{"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": sealed("new thought", REASONING)}]
    store = ResponseStore(2**20)
    store.put("a", {"id": "r", "output": output}, [_ITEM.validate_json(json.dumps(item)) for item in items])
    said, call, result, thought, new = store.get("a", "r").conversation
    assert (said.content[0].text, call.arguments, result.output, thought.text) == tuple(texts.values())
    assert said.content[0].annotations is None and call.id == "fc_1"
    assert new == store.item("a", "rs_1") and new.text == "new thought" and new.encrypted_content is None
    assert json.loads(store.get("a", "r").response)["output"] == output, "an answer is read as it was given"


def test_a_key_that_stores_much_pushes_out_its_own_responses():
    """The other keys keep theirs up to an equal share of the memory."""
    store, rng = ResponseStore(100_000), random.Random(0)
    for number in range(3):
        store.put("quiet", random_response(rng, number), [])
        store.put("other", random_response(rng, number), [])
    for number in range(100, 300):
        store.put("greedy", random_response(rng, number), [])
        assert store.num_bytes <= 100_000
    for owner in ("quiet", "other"):
        assert all(store.get(owner, f"resp_{number:024d}") for number in range(3)), owner
    assert store.get("greedy", f"resp_{299:024d}") is not None, "its newest one stays"
    assert store.get("greedy", f"resp_{100:024d}") is None
