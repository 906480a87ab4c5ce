"""A model's generation config: its values count for parameters that a request leaves out, and are reported."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

import oarlock
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.introduction import Introduction
from tests.contract.conftest import DEMO, INFO

SAMPLING = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5}
CONFIG = GenerationConfig("/m/generation_config.json", SAMPLING, 9, (5, 4096, 2))
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


def _send(stage, method, path, body=None):
    async def send():
        async with stage.client() as client:
            return await client.request(method, path, json=body)

    return anyio.run(send)


@pytest.fixture
def stage(make_stage):
    return make_stage("one two three four", generation_config=CONFIG)


def _params(stage, path, **fields):
    response = _send(stage, "POST", path, BODIES[path] | fields)
    assert response.status_code == 200, response.text
    return stage.engine.requests[-1].params


@pytest.mark.parametrize("path", BODIES)
def test_the_file_counts_where_the_request_says_nothing(stage, path):
    for fields in ({}, dict.fromkeys(SAMPLING)):
        params = _params(stage, path, **fields)
        assert {name: getattr(params, name) for name in SAMPLING} == SAMPLING
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    params = _params(stage, path, **own)
    assert {name: getattr(params, name) for name in own} == own, "neutral values that are asked for are kept"
    assert _params(stage, path, temperature=0).temperature == 0


@pytest.mark.parametrize("path", BODIES)
def test_no_answer_is_longer_than_the_file_allows(stage, make_stage, path):
    assert [_params(stage, path, **more).max_tokens for more in ({}, {"max_tokens": 4}, {"max_tokens": 90})] == [
        9,
        4,
        9,
    ]
    strict = make_stage(strict_max_tokens=True, generation_config=CONFIG)
    response = _send(strict, "POST", path, BODIES[path] | {"max_tokens": 10})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    assert "at most 9 tokens" in response.json()["error"]["message"]


def test_the_tokenizers_end_token_counts_too(stage, make_stage):
    assert _params(stage, "/v1/completions").eos_token_ids == (5, 2), "4096 is no token of this model"
    alone = make_stage(generation_config=GenerationConfig(eos_token_ids=(7,)))
    assert _params(alone, "/v1/completions").eos_token_ids == (7, 2)
    assert _params(alone, "/v1/completions", ignore_eos=True).eos_token_ids == ()


def test_capabilities_show_the_values_in_force(stage, make_stage):
    reported = _send(stage, "GET", "/v1/capabilities").json()
    assert reported["generation_config"] == {
        "source": "/m/generation_config.json",
        "sampling": SAMPLING,
        "max_new_tokens": 9,
        "eos_token_ids": [5, 2],
    }
    document = _send(stage, "GET", "/openapi.json").json()["components"]["schemas"]
    for path, schema in zip(BODIES, ("CompletionRequest", "ChatRequest"), strict=True):
        for name, value in SAMPLING.items():
            assert reported["endpoints"][path]["parameters"][name]["default"] == value
            assert document[schema]["properties"][name]["default"] == value
    assert "<td><code>0.125</code></td>" in _send(stage, "GET", "/docs").text
    info = replace(INFO, quantization="awq (4 bits, groups of 128)", input_rounding="8 bits")
    packed = _send(make_stage(info=info), "GET", "/v1/capabilities").json()["features"]
    assert (packed["quantization"], packed["product_inputs"]) == (info.quantization, "rounded to 8 bits")
    neutral = _send(make_stage(), "GET", "/v1/capabilities").json()
    assert neutral["features"]["product_inputs"] == neutral["features"]["dtype"] == "float32"
    assert neutral["generation_config"]["sampling"] == {}
    assert neutral["endpoints"]["/v1/completions"]["parameters"]["temperature"]["default"] == 1.0


def test_capabilities_show_greedy_as_the_default(make_stage):
    stage = make_stage(generation_config=GenerationConfig.load(DEMO))
    reported = _send(stage, "GET", "/v1/capabilities").json()
    assert reported["generation_config"]["sampling"] == {"temperature": 0.0}
    for path in BODIES:
        assert reported["endpoints"][path]["parameters"]["temperature"]["default"] == 0.0
        assert _params(stage, path).temperature == 0
        assert _params(stage, path, temperature=0.75).temperature == 0.75, "a temperature in the request wins"


def test_capabilities_show_the_introduction_of_the_model(make_stage):
    stage = make_stage()
    assert _send(stage, "GET", "/v1/capabilities").json()["introduction"] == {"about": None, "questions": []}
    stage = make_stage()
    stage.state.introduction = Introduction("It counts.", ("What is 1 + 1?",))
    reported = _send(stage, "GET", "/v1/capabilities").json()
    assert reported["introduction"] == {"about": "It counts.", "questions": ["What is 1 + 1?"]}


def test_the_offline_llm_has_the_same_defaults(make_stage, monkeypatch, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": -1, "max_new_tokens": 3}')
    engine = make_stage("one two three four five").engine

    async def start(config, on_progress, **started):
        return engine

    monkeypatch.setattr("oarlock.engine.replicas.EngineClient.start", start)
    with oarlock.LLM(generation_config=str(tmp_path)) as llm:
        llm.generate("x")
        llm.generate("x", oarlock.SamplingParams(max_tokens=2, temperature=1.0))
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.top_k, first.max_tokens) == (0.5, 0, 3)
    assert (second.temperature, second.top_k, second.max_tokens) == (1.0, 0, 2)
