"""Bounds of the routes that answer without the engine, and panics of Rust libraries, which are no `Exception`."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from oarlock.server.endpoints import generate
from oarlock.server.llm import input_processor
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from tests.contract.batch_server import request_line, serving
from tests.unit.server.llm.test_text_bounds import panicking_tokenizer

MESSAGES = [{"role": "user", "content": "x"}]
ROUTES = {
    "/tokenize": {"prompt": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/completions/render": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/detokenize": {"tokens": [5]},
}


class PanicError(BaseException):
    """Stands for `pyo3_runtime.PanicException`."""


def _post(stage, path, body):
    async def send():
        async with stage.client() as client:
            return await client.post(path, json=body)

    return anyio.run(send)


def _panics(*_, **__):
    raise PanicError


@pytest.mark.parametrize("path", ROUTES)
def test_a_panic_is_an_error_in_the_shape_of_all_errors(make_stage, tokenizer, monkeypatch, path):
    is_pooling = path in ("/v1/embeddings", "/v1/rerank", "/v1/score")
    stage = make_stage(pooler=PoolerConfig(Task.EMBED, "last") if is_pooling else None)
    for name in ("encode", "decode"):
        monkeypatch.setattr(tokenizer, name, _panics)
    answer = _post(stage, path, ROUTES[path])
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("Internal error.")


def test_a_panic_while_answering_ends_the_stream_with_an_error(make_stage, monkeypatch):
    stage = make_stage("Hello")
    monkeypatch.setattr("oarlock.server.llm.output_processor.ChoiceOutput.push", _panics)
    whole, streamed = (_post(stage, "/v1/completions", {"prompt": "x", "stream": stream}) for stream in (False, True))
    assert whole.status_code == streamed.status_code == 500
    assert whole.json()["error"]["message"].startswith("Internal error.")


def test_a_text_on_which_the_library_panics_is_refused_by_name(make_stage):
    stage, panicking = make_stage(), panicking_tokenizer()
    stage.state.async_llm.input_processor.tokenizer = panicking
    cases = (("/tokenize", {"prompt": "a" * 100}), ("/v1/completions", {"prompt": "a" * 100, "max_tokens": 1}))
    for path, body in cases:
        answer = _post(stage, path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
    panicking.close()


@pytest.mark.parametrize("place", ["answer", "read", "publish"])
def test_a_panic_leaves_no_batch_unfinished(make_stage, tmp_path, tokenizer, monkeypatch, place):
    where = {
        "answer": (tokenizer, "encode"),
        "read": ("oarlock.server.endpoints.batches.runner.RequestFile",),
        "publish": ("oarlock.server.endpoints.batches.runner.usage_of",),
    }
    with serving(make_stage, tmp_path / "batches") as serve:
        server = serve()
        with monkeypatch.context() as patch:
            patch.setattr(*where[place], _panics)
            batch = server.ended(server.batch([request_line("r0"), request_line("r1")]))
        if place == "answer":
            assert batch.status == "completed"
            errors = server.lines(batch.error_file_id)
            assert [error["response"]["status_code"] for error in errors] == [500, 500]
        else:
            assert batch.status == "failed"
            assert batch.errors.data[0].code == "internal_error"
        assert server.ended(server.batch([request_line("r0")])).status == "completed"


def test_a_rendering_that_would_be_too_long_is_refused(make_stage, monkeypatch):
    monkeypatch.setattr(generate, "MOST_RENDERED", 10_000)
    stage, stop = make_stage(), ["s" * 1000]
    refused = _post(stage, "/v1/completions/render", {"prompt": ["a"] * 10, "stop": stop})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert "exceed 10000 characters" in refused.json()["error"]["message"]
    fits = _post(stage, "/v1/completions/render", {"prompt": ["a"] * 3, "stop": stop})
    assert fits.status_code == 200 and 4000 < len(fits.content) < 10_000


@pytest.mark.parametrize("prompt", ["word " * 100, [5] * 200])
def test_an_echo_that_would_be_too_long_is_refused(make_stage, monkeypatch, prompt):
    monkeypatch.setattr(input_processor, "MOST_DECODED", 1000)
    stage, body = make_stage(), {"prompt": [prompt] * 2, "echo": True, "max_tokens": 0}
    refused = _post(stage, "/v1/completions", body | {"n": 4})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "echo"
    assert stage.engine.requests == []
    assert _post(stage, "/v1/completions", body).status_code == 200


def test_requests_without_the_engine_are_bounded_as_its_queue_is(make_stage, tokenizer, monkeypatch):
    stage, release, begun = make_stage(max_num_seqs=1, max_waiting_requests=3), asyncio.Event(), []

    async def waits(*_, **__):
        begun.append(1)
        await release.wait()
        return [5]

    monkeypatch.setattr(tokenizer, "aencode", waits)

    async def scenario():
        async with stage.client() as client:
            first = [asyncio.create_task(client.post("/tokenize", json={"prompt": "x"})) for _ in range(2)]
            while len(begun) < 2:
                await asyncio.sleep(0.001)
            refused = [await client.post(path, json=ROUTES[path]) for path in ("/tokenize", "/v1/completions/render")]
            release.set()
            return [*await asyncio.gather(*first), *refused, await client.post("/tokenize", json={"prompt": "x"})]

    answers = asyncio.run(scenario())
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429, 200]
    assert answers[2].json()["error"]["code"] == "queue_full" and answers[2].headers["retry-after"] == "1"


def test_two_large_texts_are_worked_on_at_a_time(make_stage, tokenizer, monkeypatch):
    stage, most, open_now = make_stage(), 0, 0

    async def counts(*_, **__):
        nonlocal most, open_now
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.02)
        open_now -= 1
        return [5]

    monkeypatch.setattr(tokenizer, "aencode", counts)

    async def scenario(text):
        async with stage.client() as client:
            return await asyncio.gather(*(client.post("/tokenize", json={"prompt": text}) for _ in range(6)))

    assert all(answer.status_code == 200 for answer in asyncio.run(scenario("x" * 100_000)))
    assert most == 2
    asyncio.run(scenario("x"))
    assert most > 2
