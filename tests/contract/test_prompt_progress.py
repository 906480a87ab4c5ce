"""`return_progress`: a stream tells how much of its prompt is done and where it waits, as the engine counts."""

import asyncio
import json

import pytest

from oarlock.engine.scheduler.timeline import RequestTimeline
from oarlock.server.llm import generation

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b c d e f g"}]},
    "/v1/completions": {"prompt": "a b c d e f g"},
}


def streamed(stage, path, during=(), **fields):
    """The chunks of a stream. `during`: called one after the other, each once so many chunks have come."""

    async def scenario():
        chunks = []
        async with stage.client() as client:
            body = {**ROUTES[path], "max_tokens": 3, "stream": True, **fields}
            async with client.stream("POST", path, json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        chunks.append(json.loads(line[6:]))
            return chunks

    async def with_changes():
        task = asyncio.ensure_future(scenario())
        for change in during:
            await asyncio.sleep(0.05)
            change()
        return await task

    return asyncio.run(with_changes())


@pytest.mark.parametrize("path", ROUTES)
def test_it_counts_up_to_the_first_token(make_stage, monkeypatch, path):
    monkeypatch.setattr(generation, "PROGRESS_INTERVAL_S", 0.01)
    monkeypatch.setattr(generation, "QUEUED_INTERVAL_S", 0.01)
    stage = make_stage("xyz", pause_after=0)
    engine, timeline = stage.engine, RequestTimeline(1, 7, 0.0)
    changes = (
        lambda: engine.known.update({1: timeline.history(0, 2)}),
        lambda: timeline.admitted(1.0, 4) or engine.known.update({1: timeline.history(0)}),
        lambda: timeline.computed(1.5, 1, 2, 0) or engine.known.update({1: timeline.history(0)}),
        engine.resume.set,
    )
    chunks = streamed(stage, path, changes, return_progress=True, stream_options={"include_usage": True})
    found = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert all(chunk["choices"] == [] and chunk["usage"] is None for chunk in chunks if "prompt_progress" in chunk)
    total = len(engine.requests[0].prompt_token_ids)
    told = list(dict.fromkeys((each["queue_position"], each["cache"], each["processed"]) for each in found))
    assert told == [(2, 0, 0), (None, 4, 4), (None, 4, 6), (None, total // 2, total)]
    assert {each["total"] for each in found} == {total}
    times = [each["time_ms"] for each in found]
    assert times == sorted(times) and times[-1] >= 100
    said = [place for place, chunk in enumerate(chunks) if "prompt_progress" in chunk]
    texts = [str(chunk["choices"]) for chunk in chunks]
    assert any("z'" in text for text in texts) and not any("z'" in text for text in texts[: said[-1]])


@pytest.mark.parametrize("path", ROUTES)
def test_a_short_prompt_has_one_report_and_others_none(make_stage, path):
    stage = make_stage("xyz")
    reports = [chunk for chunk in streamed(stage, path, return_progress=True, n=2) if "prompt_progress" in chunk]
    assert [report["prompt_progress"]["queue_position"] for report in reports] == [None]
    assert not any("prompt_progress" in chunk for chunk in streamed(stage, path))


def test_only_a_stream_has_it(make_stage):
    async def ask():
        async with make_stage().client() as client:
            return await client.post("/v1/completions", json={"prompt": "x", "return_progress": True})

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_progress")
