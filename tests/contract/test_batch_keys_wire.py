"""Batches and those who wait: API keys share turns, files and bytes, and nobody waits behind batches."""

from __future__ import annotations

import asyncio
import hashlib

import openai
import pytest

from oarlock.server.endpoints.completions import OpenAIServingCompletion
from tests.contract.batch_server import COMPLETION, jsonl, request_line, serving
from tests.contract.conftest import wait_for


@pytest.fixture
def serve(make_stage, tmp_path):
    with serving(make_stage, tmp_path / "batches") as start:
        yield start


@pytest.mark.slow
def test_files_and_batches_belong_to_their_key(serve):
    server = serve(api_key=("one", "two"))
    one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
    file = one.files.create(file=("a", jsonl([request_line("a")])), purpose="batch")
    batch = one.batches.create(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h")
    server.client = one
    output = server.ended(batch).output_file_id
    for call in (
        lambda: two.files.retrieve(file.id),
        lambda: two.files.content(output),
        lambda: two.files.delete(output),
        lambda: two.batches.retrieve(batch.id),
        lambda: two.batches.cancel(batch.id),
        lambda: two.batches.create(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert not list(two.files.list()) and not list(two.batches.list()) and len(list(one.files.list())) == 2
    assert {request.client for request in server.stage.engine.requests} == {"key-1"}


@pytest.mark.slow
def test_a_key_has_its_files_after_a_restart_and_the_disk_does_not_name_it(serve, tmp_path):
    server = serve(api_key=("one", "two"))
    server.client = server.client.with_options(api_key="one")
    batch = server.ended(server.batch([request_line("a")]))
    server.stop()
    again = serve(api_key=("new", "two", "one"))
    again.client = again.client.with_options(api_key="one")
    assert again.client.batches.retrieve(batch.id) == batch and len(list(again.client.files.list())) == 2
    with pytest.raises(openai.NotFoundError):
        again.client.with_options(api_key="two").batches.retrieve(batch.id)
    again.ended(again.batch([request_line("a")]))
    assert {request.client for request in again.stage.engine.requests} == {"key-3"}, "its label is that of today"
    kept = [path for path in (tmp_path / "batches").rglob("*") if path.is_file()]
    assert len(kept) > 6 and {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    digest = hashlib.sha256(b"one").hexdigest()[:16].encode()
    assert not [path for path in kept if digest in path.read_bytes()]


def test_a_key_leaves_batches_files_and_bytes_to_others(serve, monkeypatch):
    monkeypatch.setattr("oarlock.server.endpoints.batches.runner.MAX_OPEN", 8)
    monkeypatch.setattr("oarlock.server.endpoints.batches.directory.MAX_FILES", 8)
    server = serve(api_key=("one", "two"), batch_dir_size=2**20, pause_after=0)
    one, two = (server.client.with_options(api_key=key) for key in ("one", "two"))
    server.client = one
    batches = [server.batch([request_line("a")]) for _ in range(3)]
    file = server.upload([request_line("b")])

    def create(client, file_id):
        return client.batches.create(input_file_id=file_id, endpoint=COMPLETION, completion_window="24h")

    batches.append(create(one, file.id))
    with pytest.raises(openai.RateLimitError, match="4 of them yours; at most 8 may be") as refused:
        create(one, file.id)
    assert refused.value.code == "too_many_batches" and refused.value.response.headers["retry-after"] == "60"
    with pytest.raises(openai.BadRequestError, match="Delete files that you do not need") as refused:
        server.upload([request_line("c")])
    assert refused.value.code == "too_many_files" and refused.value.param == "file"
    server.client = two
    batches.append(server.batch([request_line("a")]))
    with pytest.raises(openai.APIStatusError, match="may use as much as it leaves free") as refused:
        server.upload(b"x" * 2**19)
    assert refused.value.status_code == 413 and refused.value.param == "file"
    server.stage.engine.pause_after = None
    server._loop.call_soon_threadsafe(server.stage.engine.resume.set)
    for number, batch in enumerate(batches):
        server.client = two if number == 4 else one
        assert server.ended(batch).status == "completed"


@pytest.mark.slow
def test_batches_of_a_key_do_not_hold_up_those_of_another(serve):
    server = serve(api_key=("one", "two"))
    generate, held = server.stage.engine.generate, asyncio.Event()

    async def holds_one_key(request):
        if request.client == "key-1":
            await held.wait()
        async for event in generate(request):
            yield event

    server.stage.engine.generate = holds_one_key
    one, two = (server.client.with_options(api_key=key) for key in ("one", "two"))
    server.client = one
    num_rows = server.stage.engine.info.max_num_seqs
    batches = [server.batch([request_line(f"a{n}") for n in range(num_rows)]) for _ in range(6)]
    wait_for(lambda: server.runner.by_status()["in_progress"] == 4)
    server.client = two
    assert server.ended(server.batch([request_line("a")])).status == "completed"
    server.client = one
    server._loop.call_soon_threadsafe(held.set)
    assert {server.ended(batch).status for batch in batches} == {"completed"}


def test_prompts_of_batches_are_made_one_at_a_time(serve, monkeypatch):
    process, entered, go_on = OpenAIServingCompletion.process, [], asyncio.Event()

    async def held(self, body):
        if body.priority == 10:
            entered.append(body)
            await go_on.wait()
        return await process(self, body)

    monkeypatch.setattr(OpenAIServingCompletion, "process", held)
    server = serve()
    batch = server.batch([request_line(f"r{number}") for number in range(5)])
    wait_for(lambda: entered)
    answer = server.client.completions.create(model="demo", prompt="abc", max_tokens=1)
    assert answer.choices and len(entered) == 1, "the tokenizer's threads are for those who wait"
    server._loop.call_soon_threadsafe(go_on.set)
    assert server.ended(batch).request_counts.completed == 5
