"""Large bodies are read by a process of their own, to the same requests and the same refusals as small ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from oarlock.engine.errors import RequestError, UnavailableError
from oarlock.server.config.settings import Settings
from oarlock.server.endpoints.app import application
from oarlock.server.http import large_body
from oarlock.server.http.body_cost import takes_long
from oarlock.server.http.docs_page import body_schemas
from oarlock.server.http.large_body import LargeBodies
from oarlock.server.http.request_body import REQUEST_BODIES, ignored_parameters, parse_any
from oarlock.server.http.server_state import ServerState
from oarlock.server.observability.metrics import HttpCounters
from oarlock.server.schemas.batches import CreateBatchRequest
from oarlock.server.schemas.chat import ChatRequest, DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from oarlock.server.schemas.generation import CompletionRequest
from oarlock.server.schemas.pooling import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from oarlock.server.schemas.responses import CompactRequest, ResponsesRequest

LONG = "wörd 😀 \n" * 200
IDS = [0, 1, 2**31 - 1] * 50
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}
BODIES = [
    (CompletionRequest, {"prompt": LONG, "suffix": LONG, "stop": ["a", "b"], "seed": -5, "logit_bias": {"5": 1.5}}),
    (CompletionRequest, {"prompt": ["short", LONG, ""], "n": 2, "temperature": 0.5, "max_tokens": 16.0}),
    (CompletionRequest, {"prompt": IDS, "allowed_token_ids": IDS}),
    (CompletionRequest, {"prompt": [IDS, [7], IDS], "response_format": {"type": "json_object"}}),
    (CompletionRequest, {"prompt": "x", "later": {"text": LONG}, "stream": True, "stream_options": {"odd": LONG}}),
    (
        ChatRequest,
        {
            "messages": [
                {"role": "system", "content": LONG},
                {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "x"}]},
                {"role": "assistant", "content": None, "reasoning_content": LONG, "tool_calls": [CALL], "text": LONG},
                {"role": "tool", "tool_call_id": "c", "content": LONG, "prompt": IDS},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"description": LONG}}}],
        },
    ),
    (TokenizeChatRequest, {"messages": [{"role": "user", "content": LONG}]}),
    (TokenizeRequest, {"prompt": LONG, "text": LONG}),
    (DetokenizeRequest, {"tokens": IDS}),
    (EmbeddingRequest, {"input": [LONG, "short", LONG], "dimensions": 8}),
    (EmbeddingRequest, {"input": IDS}),
    (PoolingRequest, {"input": [IDS, [7], IDS]}),
    (RerankRequest, {"query": LONG, "documents": [LONG, "short", {"text": LONG}], "top_n": 2}),
    (ScoreRequest, {"text_1": LONG, "text_2": [LONG, "short"]}),
    (ResponsesRequest, {"input": [{"role": "user", "content": LONG}], "instructions": LONG}),
    (CompactRequest, {"input": [{"role": "user", "content": LONG}], "instructions": LONG}),
    (CreateBatchRequest, {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}),
]
WRONG = [
    b"not json",
    b'{"prompt":5}',
    b'{"prompt":[1,-1]}',
    b'{"prompt":"x","prompt":"y"}',
    b'{"prompt":"x","later":[{"y":1e999}]}',
    b'{"prompt":"x","use_beam_search":true}',
    b'{"prompt":"x","n":2,"best_of":1}',
    b"{" + b",".join(b'"k%d":0' % number for number in range(300)) + b',"prompt":"x"}',
]


@pytest.fixture(scope="module")
def bodies():
    process = LargeBodies()
    yield process
    process.close()


def _fields(error):
    return error.message, error.param, error.code


def _forms(schema):
    return [TokenizeRequest, TokenizeChatRequest] if schema is TokenizeChatRequest else [schema]


@pytest.mark.parametrize(("schema", "body"), BODIES, ids=range(len(BODIES)))
@pytest.mark.slow
def test_the_process_reads_what_the_server_would_have_read(bodies, schema, body):
    content = json.dumps(body, ensure_ascii=False).encode()
    expected = parse_any(_forms(schema), content)
    parsed, unknown, num_bytes = asyncio.run(bodies.read(_forms(schema), content, False))
    assert unknown == ignored_parameters(expected, False)
    assert num_bytes > 0
    assert type(parsed) is type(expected) is schema
    # Unknown fields of the request itself are not sent back: nothing uses them.
    assert parsed.model_dump() == expected.model_dump(exclude=set(expected.model_extra or ()))
    assert parsed.model_fields_set == expected.model_fields_set - set(expected.model_extra or ())


@pytest.mark.parametrize("content", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("is_strict", [False, True])
def test_the_process_refuses_with_the_same_errors(bodies, content, is_strict):
    with pytest.raises(RequestError) as expected:
        ignored_parameters(parse_any([CompletionRequest], content), is_strict)
    with pytest.raises(RequestError) as refused:
        asyncio.run(bodies.read([CompletionRequest], content, is_strict))
    assert _fields(refused.value) == _fields(expected.value)


def test_the_process_knows_every_body():
    document = application(Settings(batch_dir="batches"), ServerState(), HttpCounters()).openapi()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = {name for operation in operations for name in body_schemas(operation)}
    assert len(names) > 9 and names - REQUEST_BODIES.keys() == set()


@pytest.mark.slow
def test_values_other_than_texts_and_ids_are_bounded(bodies):
    parts = [{"type": "text", "text": "x"}] * 1000
    content = json.dumps({"messages": [{"role": "user", "content": parts}] * 45}).encode()
    with pytest.raises(RequestError, match="at most 1048576 are accepted"):
        asyncio.run(bodies.read([ChatRequest], content, False))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_killed_is_replaced_and_everyone_is_answered(bodies, monkeypatch, number):
    """The body is not blamed, and neither are those that wait behind it."""
    monkeypatch.setattr("oarlock.server.http.large_body.STALL_TIMEOUT_S", 0.5)

    async def scenario():
        good = b'{"prompt":"x"}'
        await bodies.read([CompletionRequest], good, False)
        pid = bodies.pid
        os.kill(pid, signal.SIGSTOP)
        reading = [asyncio.ensure_future(bodies.read([CompletionRequest], good, False)) for _ in range(3)]
        await asyncio.sleep(0.05)
        os.kill(pid, number)
        assert [(await one)[0].prompt for one in reading] == ["x"] * 3
        assert bodies.pid not in (pid, None)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_process_that_is_lost_twice_is_no_fault_of_the_body(bodies):
    async def scenario():
        good = b'{"prompt":"x"}'
        await bodies.read([CompletionRequest], good, False)
        reading = asyncio.ensure_future(bodies.read([CompletionRequest], good, False))
        with pytest.raises(UnavailableError) as refused:
            while not reading.done():  # each new process is killed before it answers
                if (pid := bodies.pid) is not None:
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.001)
            await reading
        assert refused.value.code == "body_process_lost"
        assert (await bodies.read([CompletionRequest], good, False))[0].prompt == "x"

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_body_that_takes_too_long_is_refused_by_name(monkeypatch):
    """The process has a limit of its own time; it ends itself, and the body is blamed."""
    code = "import signal, os; os.kill(os.getpid(), signal.SIGXCPU)"
    real = large_body.start_python
    monkeypatch.setattr(large_body, "start_python", lambda command, **fields: real(["-c", code], **fields))
    process = LargeBodies()
    with pytest.raises(RequestError, match="takes too long"):
        asyncio.run(process.read([CompletionRequest], b'{"prompt":"x"}', False))
    process.close()


@pytest.mark.slow
def test_a_request_that_leaves_frees_the_process(bodies):
    async def scenario():
        good = b'{"prompt":"x"}'
        await bodies.read([CompletionRequest], good, False)
        os.kill(bodies.pid, signal.SIGSTOP)  # it takes for ever
        first = asyncio.ensure_future(bodies.read([CompletionRequest], good, False))
        waiting = asyncio.ensure_future(bodies.read([CompletionRequest], good, False))
        second = asyncio.ensure_future(bodies.read([CompletionRequest], good, False))
        await asyncio.sleep(0.05)
        waiting.cancel()
        first.cancel()
        assert (await second)[0].prompt == "x"
        assert [(await asyncio.gather(task, return_exceptions=True))[0].__class__ for task in (first, waiting)] == [
            asyncio.CancelledError
        ] * 2

    asyncio.run(scenario())


@pytest.mark.slow
def test_only_bodies_that_take_long_are_sent_to_the_process():
    prose = b'{"prompt":"' + b"One two, three and four. " * 20_000 + b'"}'
    assert not takes_long(b'{"prompt":[' + b"1," * 30_000 + b"1]}")
    assert not takes_long(prose)
    assert takes_long(prose * 4)
    assert takes_long(b'{"prompt":[' + b"1," * 40_000 + b"1]}")
    assert takes_long(b'{"x":[' + b"[]," * 30_000 + b"[]]}")
