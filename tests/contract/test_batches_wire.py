"""`/v1/batches` through the official client over a socket, around an engine that can be held."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading

import httpx
import openai
import pytest
from openai.types import Batch

from oarlock.engine.errors import EngineDeadError
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from oarlock.server.schemas.batches import read_line
from tests.contract.batch_server import BODIES, CHAT, COMPLETION, RESPONSE, jsonl, request_line, serving
from tests.contract.conftest import wait_for


@pytest.fixture
def serve(make_stage, tmp_path):
    with serving(make_stage, tmp_path / "batches") as start:
        yield start


@pytest.mark.slow
def test_a_batch_of_each_endpoint_is_answered_as_the_server_would(serve):
    server = serve(max_body_size=4096)
    for url in BODIES:
        lines = [request_line(f"r{number}", url) for number in range(5)]
        lines += [request_line("wrong", url, temperature=9), request_line("streamed", url, **BODIES[url], stream=True)]
        created = server.batch(
            lines, url, metadata={"k": "v"}, output_expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert created.status == "validating" and created.metadata == {"k": "v"}
        batch = server.ended(created)
        Batch.model_validate(batch.model_dump())
        assert batch.status == "completed" and batch.errors is None
        assert batch.request_counts.model_dump() == {"total": 7, "completed": 5, "failed": 2}
        answers, errors = server.lines(batch.output_file_id), server.lines(batch.error_file_id)
        assert sorted(answer["custom_id"] for answer in answers) == [f"r{number}" for number in range(5)]
        wanted = httpx.post(server.url + url, json=BODIES[url]).json()
        for answer in answers:
            body = answer["response"]["body"]
            assert answer["response"]["status_code"] == 200 and body.keys() == wanted.keys()
            assert body["usage"].keys() == wanted["usage"].keys()
        names = ("input_tokens", "output_tokens") if url == RESPONSE else ("prompt_tokens", "completion_tokens")
        sums = [sum(answer["response"]["body"]["usage"][name] for answer in answers) for name in names]
        assert [batch.usage.input_tokens, batch.usage.output_tokens] == sums
        assert {error["custom_id"]: error["response"]["status_code"] for error in errors} == {
            "wrong": 400,
            "streamed": 400,
        }
        file = server.client.files.retrieve(batch.output_file_id)
        assert file.purpose == "batch_output" and file.expires_at - file.created_at == 3600
    assert all(
        request.is_low_priority and request.priority == 10
        for request in server.stage.engine.requests
        if request.is_admitted
    )
    assert sum(request.is_low_priority for request in server.stage.engine.requests) == 15


@pytest.mark.slow
def test_batches_are_listed_in_pages(serve):
    server = serve()
    batches = [server.batch([request_line("a")]) for _ in range(5)]
    assert [batch.id for batch in server.client.batches.list(limit=2)] == [batch.id for batch in reversed(batches)]
    for batch in batches:
        server.ended(batch)


@pytest.mark.slow
def test_faults_of_a_file_are_reported_by_line(serve):
    server = serve(max_body_size=2048)
    cases = {
        "invalid_json_line": (b'{"custom_id"\n', 1),
        "missing_member": (jsonl([request_line("a"), {"custom_id": "b"}]), 2),
        "duplicate_custom_id": (jsonl([request_line("a"), request_line("a")]), 2),
        "mismatched_url": (jsonl([request_line("a", CHAT)]), 1),
        "custom_id_too_long": (jsonl([request_line("a"), request_line("a" * 513)]), 2),
        "invalid_url": (jsonl([request_line("a") | {"url": "/v1/images"}]), 1),
        "line_too_long": (jsonl([request_line("a", prompt="x" * 2048)]), 1),
        "empty_file": (b"\n\n", None),
    }
    for code, (content, line) in cases.items():
        batch = server.ended(server.batch(content))
        assert batch.status == "failed" and batch.failed_at, code
        (error,) = batch.errors.data
        assert (error.code, error.line) == (code, line) and "/batches" not in error.message
        assert batch.output_file_id is None and batch.error_file_id is None
    assert not server.stage.engine.requests


@pytest.mark.slow
def test_a_stopped_server_goes_on_and_each_request_has_one_line(serve, tmp_path):
    server = serve(pause_after=1)
    batch = server.batch([request_line(f"r{number}") for number in range(40)])
    engine = server.stage.engine
    wait_for(lambda: len(engine.requests) == engine.info.max_num_seqs)
    engine.pause_after = None
    engine.resume.set()
    wait_for(lambda: len(engine.finished) > 12)
    engine.pause_after, engine.resume = 1, asyncio.Event()
    server.stop()
    work = tmp_path / "batches" / "work" / f"{batch.id}.output"
    answered = work.read_bytes()
    assert 10 <= answered.count(b"\n") < 40
    work.write_bytes(answered + b'{"id": "batch_req_torn')
    again = serve()
    found = again.ended(batch)
    assert found.status == "completed" and found.request_counts.completed == 40
    lines = again.lines(found.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r{number}" for number in range(40))
    assert again.client.files.content(found.output_file_id).read().startswith(answered)
    assert len(again.stage.engine.requests) == 40 - answered.count(b"\n"), "what was answered is not asked again"
    again.stop()
    third = serve()
    assert third.client.batches.retrieve(batch.id) == found and third.lines(found.output_file_id) == lines


@pytest.mark.slow
def test_a_successor_serves_all_else_and_goes_on_when_the_server_before_it_has_ended(serve, caplog):
    first = serve(pause_after=1)
    batch = first.batch([request_line(f"r{number}") for number in range(20)])
    wait_for(lambda: first.stage.engine.requests)
    caplog.set_level("INFO", logger="oarlock")
    second = serve()
    wait_for(lambda: "batch_dir_waiting" in caplog.text)
    assert second.client.completions.create(model="demo", prompt="abc", max_tokens=1).choices
    for call in (
        lambda: second.client.batches.retrieve(batch.id),
        lambda: second.client.files.list(),
        lambda: second.upload([request_line("a")]),
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            call()
        assert refused.value.status_code == 503 and refused.value.code == "batch_dir_in_use"
        assert refused.value.response.headers["retry-after"] == "5"
    assert httpx.get(f"{second.url}/metrics").text.count("oarlock:batches{") == 8
    first.stop()
    wait_for(lambda: "batch_dir_acquired" in caplog.text)
    ended = second.ended(batch)
    assert ended.status == "completed"
    assert sorted(line["custom_id"] for line in second.lines(ended.output_file_id)) == sorted(
        f"r{number}" for number in range(20)
    )


@pytest.mark.slow
def test_a_successor_that_waits_can_be_stopped_and_says_what_it_cannot_read(serve, tmp_path, caplog):
    first, second, third = serve(), serve(), serve()
    wait_for(lambda: caplog.text.count("batch_dir_waiting") == 2)
    second.stop()
    (tmp_path / "batches" / "batches" / f"batch_{'0' * 24}.json").write_text("{}")
    first.stop()
    wait_for(lambda: "batch_dir_failed" in caplog.text)
    answer = httpx.get(f"{third.url}/v1/batches")
    assert answer.status_code == 503 and "cannot be read" in answer.json()["error"]["message"]


@pytest.mark.parametrize("step", ["before output", "between", "after"])
def test_a_kill_while_the_answers_are_published(serve, monkeypatch, step):
    server = serve()
    adopt, calls = server.runner.files.directory.adopt, []

    def killed(*arguments):
        calls.append(arguments)
        if step == "before output" or (step == "between" and len(calls) == 2):
            raise EngineDeadError("killed")
        adopt(*arguments)

    save = server.runner.files.directory.save

    def killed_at_the_end(folder, name, value):
        if step == "after" and value.get("status") == "completed":
            raise EngineDeadError("killed")
        save(folder, name, value)

    lines = [request_line("a"), request_line("b"), request_line("wrong", temperature=9)]
    file = server.upload(lines)
    monkeypatch.setattr(server.runner.files.directory, "adopt", killed)
    monkeypatch.setattr(server.runner.files.directory, "save", killed_at_the_end)
    batch = server.client.batches.create(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h")
    wait_for(lambda: not server.runner._jobs)
    server.stop()
    again = serve()
    found = again.ended(batch)
    assert found.status == "completed" and found.request_counts.model_dump() == {
        "total": 3,
        "completed": 2,
        "failed": 1,
    }
    assert sorted(line["custom_id"] for line in again.lines(found.output_file_id)) == ["a", "b"]
    assert [line["custom_id"] for line in again.lines(found.error_file_id)] == ["wrong"]
    assert len(list(again.client.files.list(purpose="batch_output"))) == 2
    assert not again.stage.engine.requests


def test_a_cancelled_batch_keeps_its_responses(serve):
    server = serve(pause_after=1)
    engine = server.stage.engine
    batch = server.batch([request_line(f"r{number}") for number in range(20)])
    wait_for(lambda: len(engine.requests) == engine.info.max_num_seqs)
    with pytest.raises(openai.ConflictError, match="is the input of a batch"):
        server.client.files.delete(batch.input_file_id)
    assert server.client.batches.cancel(batch.id).status == "cancelling"
    found = server.ended(batch)
    assert found.status == "cancelled" and found.cancelled_at >= found.cancelling_at
    assert found.request_counts.model_dump() == {"total": 20, "completed": 0, "failed": 20}
    errors = server.lines(found.error_file_id)
    assert {line["custom_id"] for line in errors} == {f"r{number}" for number in range(20)}
    assert {(line["response"], line["error"]["code"]) for line in errors} == {(None, "batch_cancelled")}
    assert len(engine.aborted) == len(engine.requests) and found.output_file_id is None
    with pytest.raises(openai.ConflictError, match="is already cancelled"):
        server.client.batches.cancel(batch.id)
    server.client.files.delete(batch.input_file_id)


@pytest.mark.slow
def test_requests_beyond_the_completion_window_expire(serve):
    server = serve(pause_after=1)
    batch = server.ended(server.batch([request_line("a"), request_line("b")], window="1s"))
    assert batch.status == "expired" and batch.expired_at >= batch.expires_at
    assert [line["error"]["code"] for line in server.lines(batch.error_file_id)] == 2 * ["batch_expired"]


def test_a_full_disk_ends_the_batch_and_no_other(serve, monkeypatch):
    server = serve()
    pwrite, calls = os.pwrite, []

    def full(descriptor, data, offset):
        calls.append(data)
        if len(calls) == 5:
            return pwrite(descriptor, data[:10], offset)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    batch = server.ended(server.batch([request_line(f"r{number}") for number in range(20)]))
    monkeypatch.undo()
    assert batch.status == "failed" and batch.errors.data[0].code == "disk_full"
    assert len(server.lines(batch.output_file_id)) == 4 and batch.request_counts.completed == 4
    assert server.ended(server.batch([request_line("a")])).status == "completed"


def test_the_size_of_the_directory_is_limited(serve):
    server = serve(batch_dir_size=2**20)
    server.upload(b"x" * 2**19)
    with pytest.raises(openai.APIStatusError, match="raise --batch-dir-size") as refused:
        server.upload(b"x" * (2**19 + 1))
    assert refused.value.status_code == 413 and server.runner.files.directory.bytes.total == 2**19
    server.upload(b"x" * (2**19 - 1000))
    (file,) = [server.upload(jsonl([request_line(f"r{number}") for number in range(5)]))]
    batch = server.client.batches.create(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h")
    found = server.ended(batch)
    assert found.status == "failed" and found.errors.data[0].code == "disk_full"
    assert "--batch-dir-size" in found.errors.data[0].message


def test_requests_of_batches_leave_half_of_the_rows_to_others(serve):
    server = serve(pause_after=1)
    engine, state = server.stage.engine, server.stage.state
    state.enter()  # a request that streams on
    server.batch([request_line(f"r{number}") for number in range(20)])
    wait_for(lambda: len(engine.requests) == engine.info.max_num_seqs // 2)
    httpx.get(f"{server.url}/v1/models")
    assert len(engine.requests) == engine.info.max_num_seqs // 2
    server._loop.call_soon_threadsafe(state.leave)
    wait_for(lambda: len(engine.requests) == engine.info.max_num_seqs)


@pytest.mark.parametrize(
    ("url", "fields", "options"),
    [
        (COMPLETION, {"prompt": "x", "n": 20}, {}),
        (COMPLETION, {"prompt": "x", "n": 2, "best_of": 20}, {}),
        (COMPLETION, {"prompt": ["x"] * 20}, {}),
        ("/v1/embeddings", {"input": ["x"] * 20}, {"pooler": PoolerConfig(Task.EMBED)}),
    ],
)
def test_one_request_with_many_sequences_is_no_more_than_others(serve, url, fields, options):
    server = serve(pause_after=1, **options)
    engine, state = server.stage.engine, server.stage.state
    state.enter()  # a request that streams on
    batch = server.batch([request_line("r", url, **fields)], url)
    wait_for(lambda: engine.requests)
    httpx.get(f"{server.url}/v1/models")
    assert len(engine.requests) == 1
    engine.pause_after = None
    server._loop.call_soon_threadsafe(engine.resume.set)
    ended = server.ended(batch)
    assert (ended.request_counts.completed, ended.request_counts.failed) == (1, 0)
    assert len(engine.requests) == 20


@pytest.mark.slow
def test_metrics_count_batches_and_their_requests(serve):
    server = serve()

    def numbers():
        found = {}
        for line in httpx.get(f"{server.url}/metrics").text.splitlines():
            match = re.match(r'oarlock:batch(es|_requests_total){.*(?:status|outcome)="(\w+)"} (\S+)', line)
            if match:
                found[match[2]] = found.get(match[2], 0) + float(match[3])
        return found

    assert set(numbers().values()) == {0.0}
    server.ended(server.batch([request_line("a"), request_line("b", prompt="x", temperature=9)]))
    wrong = server.client.batches.create(
        input_file_id=server.upload([{"custom_id": "a"}]).id, endpoint=COMPLETION, completion_window="24h"
    )
    server.ended(wrong)
    assert {name: number for name, number in numbers().items() if number} == {
        "completed": 1,
        "failed": 2,  # a batch, and a request
        "answered": 1,
    }
    server.stage.engine.pause_after = 0
    held = server.batch([request_line(f"r{number}") for number in range(3)])
    wait_for(lambda: numbers()["in_progress"] == 1)
    server.client.batches.cancel(held.id)
    server.ended(held)
    found = numbers()
    assert (found["cancelled"], found["in_progress"], found["failed"]) == (1, 0, 5)


@pytest.mark.slow
def test_cancelled_batches_read_one_file_at_a_time(serve, monkeypatch):
    server = serve(pause_after=1)
    opened, entered, go_on = server.runner._opened, [], threading.Event()

    def held(job):
        entered.append(job)
        go_on.wait(60)
        return opened(job)

    monkeypatch.setattr(server.runner, "_opened", held)
    batches = [server.batch([request_line("a")]) for _ in range(6)]
    for batch in batches:
        server.client.batches.cancel(batch.id)
    httpx.get(f"{server.url}/v1/batches")
    wait_for(lambda: entered)
    assert len(entered) == 1
    go_on.set()
    for batch in batches:
        assert server.ended(batch).status == "cancelled"


@pytest.mark.slow
def test_long_lines_are_read_beside_the_server(serve, monkeypatch):
    parsed_here = []

    def recorded(line, *where):
        parsed_here.append(len(line))
        return read_line(line, *where)

    monkeypatch.setattr("oarlock.server.http.large_body.read_line", recorded)
    server = serve()
    lines = [request_line("long", prompt="x", max_tokens=1, junk=[[]] * 100_000), request_line("short")]
    batch = server.ended(server.batch(lines))
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}
    assert parsed_here and max(parsed_here) < 1000
    assert server.stage.state.large_bodies.pid is None, "others do not wait for the lines of batches"


def test_lost_requests_are_retried(serve, monkeypatch):
    monkeypatch.setattr("oarlock.server.endpoints.batches.batch._PAUSES_S", (0.01, 0.01, 0.01))
    server = serve(fail_after=1, missing="replica_lost", pause_after=0)
    engine = server.stage.engine
    batch = server.batch([request_line("a")])
    wait_for(lambda: len(engine.requests) == 1)
    engine.pause_after = None
    engine.resume.set()
    wait_for(lambda: len(engine.requests) >= 2)
    engine.fail_after = None
    assert server.ended(batch).request_counts.failed == 0
    engine.fail_after, before = 1, len(engine.requests)
    lost = server.ended(server.batch([request_line("a")]))
    assert len(engine.requests) == before + 4, "not for ever"
    (error,) = server.lines(lost.error_file_id)
    assert error["response"]["status_code"] == 503


def test_texts_are_embedded_in_batches(serve):
    server = serve(pooler=PoolerConfig(Task.EMBED))
    url, body = "/v1/embeddings", {"input": ["one two", "three"]}
    lines = [request_line(f"r{number}", url, **body) for number in range(3)]
    batch = server.ended(server.batch([*lines, request_line("wrong", url, input=[])], url))
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
    wanted = httpx.post(server.url + url, json=body).json()
    found = [answer["response"]["body"] for answer in server.lines(batch.output_file_id)]
    for answer in found:
        assert [answer[name] for name in ("data", "usage", "model")] == [
            wanted[name] for name in ("data", "usage", "model")
        ]
    assert batch.usage.input_tokens == 3 * wanted["usage"]["prompt_tokens"]
    assert batch.usage.output_tokens == 0
    (error,) = server.lines(batch.error_file_id)
    assert error["response"]["body"]["error"]["param"] == "input"
    requests = [request for request in server.stage.engine.requests if request.priority == 10]
    assert len(requests) == 6
    assert all(request.is_admitted and request.pooling is not None for request in requests)
