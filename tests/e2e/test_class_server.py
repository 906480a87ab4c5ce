"""Servers of classes that transformers' code computes: what users do with a server works, on two ranks too."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.running import RunningServer, command, environment, eventually
from tests.golden.class_models import make_class

PROMPT = "def read(self, size=-1):\n    return"
LONG = " ".join(f"def f{number}(x): return x + {number}" for number in range(30))
SOAK = pytest.mark.soak
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
CLASSES = (
    ("nanochat", ("--speculative-config", DRAFTS)),
    ("kimi_linear", ("--model-impl", "transformers", "--quantization", "int8", "--kv-cache-dtype", "int8")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classes")


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [pytest.param(*one, id=one[0], marks=() if one[0] == "nanochat" else SOAK) for one in CLASSES],
)
def test_what_users_do(folder: Path, model_type: str, flags: tuple[str, ...]) -> None:
    model, jobs = make_class(folder, model_type), folder / f"{model_type}-jobs"
    with RunningServer(model, "--tensor-parallel-size", 2, "--batch-dir", jobs, *flags) as server:
        check_completions(server)
        check_cached_prefixes(server)
        check_structured_answers(server)
        check_batch_and_other_routes(server)
        check_what_serves_is_named(server)
        server.stop()
        assert not server.left_behind()


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """Return the first choice of a chat."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 0, **fields}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def check_completions(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    (name,) = [model.id for model in client.models.list()]
    asked: dict[str, Any] = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**asked, logprobs=2)
    assert plain.usage is not None and plain.usage.completion_tokens == 12
    text = plain.choices[0].text
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == text
    echoed = client.completions.create(**asked, echo=True, logprobs=0).choices[0]
    assert echoed.text == PROMPT + text and echoed.logprobs is not None and plain.choices[0].logprobs is not None
    last = echoed.logprobs.token_logprobs[-12:]
    assert last == pytest.approx(plain.choices[0].logprobs.token_logprobs, abs=0.05)
    stopped = client.completions.create(**asked, stop=[text[4:8]]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == text[: text.index(text[4:8])]
    drawn = [client.completions.create(**{**asked, "temperature": 1}, n=2, seed=7).choices for _ in range(2)]
    assert [one.text for one in drawn[0]] == [one.text for one in drawn[1]] and drawn[0][0].text != drawn[0][1].text
    allowed = client.completions.create(**asked, frequency_penalty=1.0, presence_penalty=1.0, logit_bias={"5": -100})
    assert allowed.choices[0].text
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**{**asked, "prompt": "a b c d " * 600})


def check_cached_prefixes(server: RunningServer) -> None:
    first, again = (server.complete(LONG, max_tokens=8, temperature=0) for _ in range(2))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert first["choices"][0]["text"] == again["choices"][0]["text"]


def check_structured_answers(server: RunningServer) -> None:
    fields = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["u", "v"]}}
    schema = {"type": "object", "properties": fields, "required": ["a", "b"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = json.loads(chat(server, response_format=wanted)["message"]["content"])
    assert 0 <= answer["a"] <= 99 and answer["b"] in ("u", "v")
    digits = chat(server, structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"})["message"]["content"]
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", digits)
    grammar = chat(server, structured_outputs={"grammar": 'root ::= "a" [0-9] "b"'})["message"]["content"]
    assert re.fullmatch("a[0-9]b", grammar)
    only = {"type": "object", "properties": {"q": {"enum": [1, 2]}}, "required": ["q"], "additionalProperties": False}
    function = {"name": "f", "parameters": only}
    called = chat(server, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])["q"] in (1, 2)


def check_batch_and_other_routes(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    line = json.dumps({"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body})
    sent = server.client.post("/v1/files", files={"file": ("jobs.jsonl", line)}, data={"purpose": "batch"}).json()
    order = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = server.client.post("/v1/batches", json=order).json()["id"]
    done = eventually(
        lambda: (one := server.client.get(f"/v1/batches/{batch}").json())["status"] == "completed" and one,
        60,
        "the batch is done",
    )
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert server.client.post("/v1/messages", json=messages).status_code == 200
    assert server.client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 3}).status_code == 200
    assert server.client.post("/v1/embeddings", json={"input": "Hi"}).json()["error"]["code"] == "unsupported_by_model"


def check_what_serves_is_named(server: RunningServer) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["served_by"] == "transformers" and "computed by transformers' code" in server.log
    assert server.client.get("/v1/capabilities").json()["features"]["served_by"] == "transformers"
    (engine,) = server.client.get("/v1/state").json()["engines"]
    assert engine["status"] == "ready" and engine["step"]["count"] > 0
    assert server.metrics()["vllm:generation_tokens_total"] > 0


def run(*arguments: str | int | Path) -> "subprocess.CompletedProcess[str]":
    """Run `oarlock …` to its end."""
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=120)


@SOAK
def test_a_killed_rank_ends_the_server_and_its_recording_is_replayed(folder: Path) -> None:
    model, file = make_class(folder, "apertus"), folder / "steps.rec"
    with RunningServer(model, "--tensor-parallel-size", 2, "--record", file) as server:
        assert server.text(PROMPT, max_tokens=8, temperature=0)
        child = psutil.Process(server.process.pid).children()
        (engine,) = (one for one in child if "oarlock.engine.core" in one.cmdline())
        engine.children()[-1].kill()
        assert server.process.wait(60) == 5, server.log
        assert not server.left_behind()
    result = run("replay", file)
    assert result.returncode == 0 and "the same outputs" in result.stdout, result.stdout + result.stderr


@SOAK
def test_replicas_and_pooling_with_ctrl_c(folder: Path) -> None:
    flags = ("--data-parallel-size", 2, "--runner", "pooling")
    with RunningServer(make_class(folder, "apertus"), *flags) as server:
        answers = [server.client.post("/v1/embeddings", json={"input": PROMPT}).json() for _ in range(3)]
        vectors = [answer["data"][0]["embedding"] for answer in answers]
        assert len(vectors[0]) == 64 and vectors[0] == vectors[1] == vectors[2]
        assert server.client.post("/pooling", json={"input": PROMPT}).status_code == 200
        scores = server.client.post("/score", json={"text_1": PROMPT, "text_2": [PROMPT, "x"]}).json()["data"]
        assert scores[0]["score"] == pytest.approx(1.0, abs=1e-4) and scores[1]["score"] < scores[0]["score"]
        assert server.stop(signal.SIGINT) == 0 and not server.left_behind()


@SOAK
def test_commands(folder: Path) -> None:
    model = make_class(folder, "apertus")
    assert "Computed by transformers' code (ApertusForCausalLM)" in run("plan", model).stdout
    refused = run("verify", model)
    assert refused.returncode == 3 and "transformers' code computes ApertusForCausalLM" in refused.stderr


@SOAK
@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--pipeline-parallel-size", 2), "--pipeline-parallel-size"),
        (("--tensor-parallel-size", 4), "tensor_parallel_size 4"),  # the other refusals: `test_choice.py`
    ],
    ids=str,
)
def test_what_is_refused_by_name(folder: Path, flags: tuple[str | int, ...], cause: str) -> None:
    model = make_class(folder, "nanochat")
    result = run("serve", model, "--port", 0, *flags)
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error:", "fix:"))]
    assert result.returncode == 3 and len(lines) == 2 and cause in lines[0], result.stderr
    assert "Traceback" not in result.stderr
