"""`oarlock batch` over a fake engine: the server's answers in OpenAI's format, and files that a kill has left."""

from __future__ import annotations

import fcntl
import json
from dataclasses import replace

import anyio
import pytest

from oarlock.engine.errors import EngineDeadError
from oarlock.server.cli import main as cli
from oarlock.server.llm.generation_config import GenerationConfig
from tests.contract.conftest import DEMO, INFO
from tests.contract.test_offline_llm import NoProcess

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def _line(custom_id, url=COMPLETION, method="POST", **body):
    body = body or {"prompt": f"prompt {custom_id}", "max_tokens": 50, "seed": 1}
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


@pytest.fixture
def batch(make_stage, monkeypatch, tmp_path, tokenizer):
    """`batch(lines, *flags)`: the exit code. Its files are `batch.given` and `batch.found`."""

    class Batch:
        given, found = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        engine = make_stage(lambda request: list(request.prompt_token_ids)).engine

        def __call__(self, lines=None, *flags):
            if lines is not None:
                self.given.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return cli.main(["batch", str(self.given), str(self.found), *flags])

        @property
        def answers(self):
            return [json.loads(line) for line in self.found.read_text().splitlines()]

    async def start(config, on_progress, process):
        on_progress("loading", 1.0)
        return Batch.engine

    monkeypatch.setattr("oarlock.server.launch.child_process.EngineProcess", NoProcess)
    monkeypatch.setattr("oarlock.engine.replicas.EngineClient.start", start)
    return Batch()


def test_answers_are_the_servers(batch, make_stage, capsys):
    bodies = {
        "plain": (COMPLETION, {"prompt": "abc", "max_tokens": 3, "n": 2, "seed": 5, "logprobs": 1}),
        "chat": (CHAT, {"messages": [{"role": "user", "content": "hé"}], "seed": 5, "max_tokens": 9}),
        "two prompts": (COMPLETION, {"prompt": ["abc", "de"], "seed": 5, "max_tokens": 5}),
        "response": (RESPONSE, {"input": "abc", "max_output_tokens": 5, "store": False}),
        "wrong response": (RESPONSE, {"input": "abc", "background": True}),
        "no field": (COMPLETION, {"prompt": "abc", "temperature": 9}),
        "no model": (COMPLETION, {"prompt": "abc", "model": "other"}),
        "too long": (COMPLETION, {"prompt": "word " * 1000}),
    }
    lines = [_line(custom_id, url, **body) for custom_id, (url, body) in bodies.items()]
    assert batch(lines, "--served-model-name", "demo") == 1
    assert capsys.readouterr().out == "8 of 8 requests completed, 4 with an error\n"
    config = GenerationConfig.load(DEMO)
    stage = make_stage(
        lambda request: list(request.prompt_token_ids), served_model_name=("demo",), generation_config=config
    )

    async def post():
        async with stage.client() as client:
            return {name: await client.post(url, json=body) for name, (url, body) in bodies.items()}

    wanted = anyio.run(post)
    assert {answer["custom_id"] for answer in batch.answers} == bodies.keys()
    for answer in batch.answers:
        theirs, ours = wanted[answer["custom_id"]], answer["response"]
        assert answer["error"] is None and answer["id"] == f"batch_req_{ours['request_id']}"
        assert ours["status_code"] == theirs.status_code
        body, expected = ours["body"], theirs.json()
        if ours["status_code"] == 200:
            assert body["id"].endswith(ours["request_id"])
            assert body.keys() == expected.keys()
            for item in (*body.get("output", ()), *expected.get("output", ())):
                item["id"] = "random"
            for name in body.keys() - {"id", "created", "created_at", "completed_at"}:
                assert body[name] == expected[name], name
        else:
            assert body == expected
    assert batch.engine.closed and all(request.is_admitted for request in batch.engine.requests)


def test_a_body_names_its_adapter(batch, tmp_path):
    for name in ("sql", "poems"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
        (tmp_path / "adapters" / name / "adapter_model.safetensors").write_text(name)
    batch.engine.info = replace(INFO, max_loras=2)
    names = ("sql", "poems", "demo", "other")
    lines = [_line(name, model=name, prompt=name, max_tokens=5) for name in names]
    flags = ("--enable-lora", "--lora-modules", f"sql={tmp_path}/adapters/sql", "--lora-dir", f"{tmp_path}/adapters")
    assert batch(lines, "--served-model-name", "demo", *flags) == 1
    answers = {answer["custom_id"]: answer["response"] for answer in batch.answers}
    assert {name: answer["status_code"] for name, answer in answers.items()} == dict.fromkeys(names, 200) | {
        "other": 404
    }
    assert all(answers[name]["body"]["model"] == name for name in names[:3])
    used = {request.adapter for request in batch.engine.requests}
    assert used == {"sql", "poems", None} and batch.engine.added == ["sql", "poems"], "the first from the start"


def test_a_killed_batch_goes_on(batch, capsys):
    lines = [_line(str(number)) for number in range(40)]
    assert batch(lines) == 0
    whole = {answer["custom_id"]: answer["response"]["body"]["choices"] for answer in batch.answers}
    kept = batch.found.read_text().splitlines(keepends=True)
    busy = json.loads(kept[3])
    busy["response"] |= {"status_code": 503}
    refused = json.loads(kept[4])
    refused["response"] |= {"status_code": 400}
    torn = kept[20][:-30]
    batch.found.write_text("".join([*kept[:3], json.dumps(busy) + "\n", json.dumps(refused) + "\n", *kept[5:20], torn]))
    batch.engine.requests.clear()
    capsys.readouterr()
    assert batch() == 1
    shown = capsys.readouterr()
    assert "19 of 40 requests already have a response, and 2 are retried" in shown.err
    assert shown.out == "40 of 40 requests completed, 1 with an error\n"
    assert len(batch.engine.requests) == 21, "what is answered is not asked again"
    assert [answer["custom_id"] for answer in batch.answers].count(busy["custom_id"]) == 1
    found = {answer["custom_id"]: answer["response"]["body"]["choices"] for answer in batch.answers}
    assert len(batch.answers) == 40 and found == whole
    assert batch.found.read_text().startswith("".join(kept[:3]) + json.dumps(refused))
    batch.engine.requests.clear()
    assert batch() == 1 and not batch.engine.requests, "nothing is left to do"


def test_many_requests_keep_the_engine_busy_and_no_more_wait(batch):
    open_now, most = 0, 0
    generate = batch.engine.generate

    async def counted(request):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            async for event in generate(request):
                yield event
        finally:
            open_now -= 1

    batch.engine.generate = counted
    assert batch([_line(str(number)) for number in range(100)]) == 0
    assert batch.engine.info.max_num_seqs < most <= 2 * batch.engine.info.max_num_seqs


def test_a_dead_engine_ends_the_batch_and_its_answers_stay(batch, capsys):
    calls = 0
    generate = batch.engine.generate

    async def dies(request):
        nonlocal calls
        calls += 1
        if calls > 20:
            raise EngineDeadError("rank 1 was killed")
        async for event in generate(request):
            yield event

    batch.engine.generate = dies
    assert batch([_line(str(number)) for number in range(60)]) == 5
    shown = capsys.readouterr().err
    assert "error: The engine has stopped: rank 1 was killed." in shown and "of 60 requests are complete" in shown
    assert {answer["response"]["status_code"] for answer in batch.answers} <= {200}
    batch.engine.generate = generate
    assert batch() == 0 and len(batch.answers) == 60


def test_unknown_fields_are_reported_or_refused(batch, capsys):
    lines = [_line(name, prompt="x", max_tokens=2, colour="red") for name in "ab"]
    assert batch(lines) == 0
    assert "note: 'colour', a field of 2 request(s), has no effect here and was ignored" in capsys.readouterr().err
    batch.found.unlink()
    assert batch(None, "--strict-parameters") == 1
    assert batch.answers[0]["response"]["body"]["error"]["code"] == "unknown_parameter"


def test_fields_that_this_model_cannot_follow_are_reported_or_refused(batch, capsys):
    chat = _line("a", CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=2, reasoning_effort="high")
    response = _line("b", RESPONSE, input="x", max_output_tokens=2, reasoning={"effort": "high"}, store=False)
    assert batch([chat, response]) == 0
    shown = capsys.readouterr().err
    assert "note: 'reasoning_effort', a field of 1 request(s)" in shown
    assert "note: 'reasoning.effort', a field of 1 request(s)" in shown
    batch.found.unlink()
    assert batch(None, "--strict-parameters") == 1
    assert {answer["response"]["status_code"] for answer in batch.answers} == {400}


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["{"], "Line 1 of"),
        (["[]"], "is not a JSON object"),
        (['{"custom_id": "a"}'], "has no 'method'"),
        ([json.dumps(_line("")), ""], "has custom_id ''"),
        ([json.dumps(_line("a", method="GET"))], "has method 'GET'"),
        ([json.dumps(_line("a", url="/v1/rerank"))], "has url '/v1/rerank', which is not supported"),
        ([json.dumps(_line("a") | {"body": []})], "has a body that is not a JSON object"),
        ([json.dumps(_line("a")), json.dumps(_line("a"))], "Lines 1 and 2 of"),
        (["", ""], "contains no request"),
    ],
)
def test_wrong_requests_are_named_before_a_model_is_loaded(batch, monkeypatch, capsys, lines, cause):
    monkeypatch.delattr("oarlock.engine.replicas.EngineClient.start")
    batch.given.write_text("\n".join(lines))
    assert batch() == 3
    error, fix = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and cause in error and fix.startswith("fix: ")
    assert not batch.found.exists()


def test_files_that_do_not_fit_are_named(batch, capsys, tmp_path):
    assert batch() == 3
    assert "cannot be read: No such file" in capsys.readouterr().err
    lines = [_line("a")]
    batch.found.write_text('{"some": "file"}\n')
    assert batch(lines) == 3
    assert "contains lines that are not responses" in capsys.readouterr().err
    assert batch.found.read_text() == '{"some": "file"}\n'
    batch.found.unlink()
    assert batch(lines) == 0
    assert batch([_line("b")]) == 3
    assert "contains a response to 'a', which is not a request of this batch" in capsys.readouterr().err
    with batch.found.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert batch(lines) == 3
    assert "is being written by another process" in capsys.readouterr().err
    batch.found = tmp_path / "none" / "out.jsonl"
    assert batch(lines) == 3
    assert "cannot be written" in capsys.readouterr().err


def test_streamed_lines_are_refused(batch):
    assert batch([_line("a", prompt="x", stream=True)]) == 1
    assert batch.answers[0]["response"]["body"]["error"]["param"] == "stream"


def test_texts_are_embedded(batch, capsys):
    lines = [_line("vectors", "/v1/embeddings", input=["abc", "de"]), _line("text")]
    assert batch(lines, "--runner", "pooling") == 1
    assert capsys.readouterr().out == "2 of 2 requests completed, 1 with an error\n"
    found = {answer["custom_id"]: answer["response"]["body"] for answer in batch.answers}
    assert [item["index"] for item in found["vectors"]["data"]] == [0, 1]
    assert found["text"]["error"]["code"] == "unsupported_by_model"
