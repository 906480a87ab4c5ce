"""Estimates of what bodies cost, the memory that requests share, and the turns of the loop in which bodies are read."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from oarlock.server.errors import HttpError
from oarlock.server.http.body_cost import AT_ONCE_MS, cost_of, largest_member
from oarlock.server.http.body_memory import BodyMemory
from oarlock.server.http.parsing_turns import TURN_S, ParsingTurns
from oarlock.server.http.request_body import parse_any
from oarlock.server.schemas.chat import ChatRequest
from oarlock.server.schemas.generation import CompletionRequest
from oarlock.server.schemas.messages import MessagesRequest
from oarlock.server.schemas.responses import ResponsesRequest

TURN = {"role": "user", "content": ""}
CALL = {"id": "c", "function": {"name": "f", "arguments": ""}}
EXPENSIVE = [
    (ChatRequest, {"messages": [TURN] * 4096}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}] * 4}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 128}] * 20}),
    (ResponsesRequest, {"input": [TURN] * 4096}),
    (MessagesRequest, {"max_tokens": 1, "messages": [TURN] * 4096}),
    (CompletionRequest, {"prompt": "x"} | {f"x{number}": number for number in range(8000)}),
]


@pytest.mark.parametrize(("schema", "body"), EXPENSIVE, ids=range(len(EXPENSIVE)))
def test_bodies_of_many_values_are_not_read_on_the_loop(schema, body):
    content = json.dumps(body, separators=(",", ":")).encode()
    assert cost_of(content).takes_long
    assert not cost_of(b'{"prompt":' + json.dumps(content.decode()).encode() + b"}").takes_long, "a text costs little"


@pytest.mark.slow
def test_the_estimate_is_near_the_truth():
    """A sixtieth of it was assumed once. Processor time, since other tests run beside this one."""
    for schema, body in EXPENSIVE[:5]:
        content, times = json.dumps(body, separators=(",", ":")).encode(), []
        for _ in range(3):
            begun = time.thread_time()
            parse_any([schema], content)
            times.append(1000 * (time.thread_time() - begun))
        assert min(times) < 5 * cost_of(content).milliseconds


@pytest.mark.parametrize("field", ["logit_bias", "metadata"])
def test_thousands_of_wrong_members_are_one_error(field):
    """Each would be an error of its own, at several microseconds."""
    content = json.dumps({"prompt": "x", field: {f"x{number}": {} for number in range(10_000)}}).encode()
    with pytest.raises(Exception, match=rf"'{field}' must have at most [0-9,]+ items"):
        parse_any([CompletionRequest], content)


def test_a_key_leaves_memory_to_other_keys():
    memory = BodyMemory(1_000_000)
    greedy = []
    with pytest.raises(HttpError) as refused:
        while True:
            greedy.append(memory.open("a"))
            greedy[-1].add(50_000)
    assert refused.value.status == 503 and "your API key" in refused.value.message
    assert memory.num_bytes == 750_000
    other = memory.open("b")
    other.add(100_000)
    for held in (*greedy, other):
        held.close()
    assert memory.num_bytes == 0 and not memory.by_client


def test_a_request_that_holds_less_gives_back_and_one_that_holds_more_may_be_refused():
    memory = BodyMemory(1_000_000)
    first, second = memory.open(), memory.open()
    first.add(500_000)
    first.resize(100_000)
    second.resize(700_000)
    with pytest.raises(HttpError):
        first.resize(300_000)
    assert memory.num_bytes == 800_000


def test_bodies_take_turns_with_everything_else_and_short_ones_go_first():
    async def scenario():
        turns, order, others = ParsingTurns(), [], 0

        def parsed(size):
            order.append((size, others))
            end = time.perf_counter() + 2 * TURN_S
            while time.perf_counter() < end:
                pass

        async def other():
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await asyncio.gather(*(turns.run(size, lambda size=size: parsed(size)) for size in (5, 4, 3, 2, 1)))
        task.cancel()
        assert [size for size, _ in order] == [5, 1, 2, 3, 4]
        assert len({turn for _, turn in order}) == 5, "two bodies were read in one turn"

    asyncio.run(scenario())


def test_a_waiting_request_that_leaves_delays_nobody():
    async def scenario():
        turns = ParsingTurns()
        await turns.run(0, lambda: time.sleep(2 * TURN_S))
        first, second = (asyncio.ensure_future(turns.run(1, lambda: "read")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await asyncio.wait_for(second, 5) == "read"

    asyncio.run(scenario())


def test_small_bodies_are_cheap():
    content = json.dumps({"messages": [{"role": "user", "content": "A question. " * 20}] * 60}).encode()
    assert cost_of(content).milliseconds < AT_ONCE_MS / 4 and cost_of(content).num_bytes < 128 * 1024


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (
            b'{"model": "a", "messages": [' + b'{"role": "user", "content": "[{,"},' * 300_000 + b'{}], "n": 1}',
            "messages",
        ),
        (b'{"n": 1, "prompt": [' + b"[]," * 300_000 + b"1]}", "prompt"),
        (b'{"tools": [{"messages": [1, 2]}], "stop": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}', "stop"),
        (b"[1, [2, 3]]", None),
        (b'{"n": 1}', None),
        (b'{"' + b"a" * 100 + b'": [1, 2]}', None),
    ],
    ids=["messages", "prompt", "nested names", "a list", "no lists", "a long name"],
)
def test_the_largest_member_is_named(body, name):
    assert largest_member(body) == name
