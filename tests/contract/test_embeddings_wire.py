"""`/v1/embeddings` and `/pooling` as a client sees them, around an engine whose vectors depend on the tokens alone."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import math
from array import array
from pathlib import Path

import anyio
import numpy as np
import openai
import pytest
from tokenizers.processors import TemplateProcessing

from oarlock.engine.errors import QueueFullError
from oarlock.engine.types import PoolingParams
from oarlock.server.llm.pooler_config import DenseConfig, PoolerConfig, Task
from oarlock.server.llm.tokenizer import Tokenizer
from tests.contract.conftest import INFO, chat_tokenizer, vectors_of

HIDDEN_SIZE = INFO.hidden_size
EMBEDS = PoolerConfig(
    Task.EMBED, "modules.json", "last", True, prompts={"query": "Find: ", "document": ""}, dimensions=()
)


@pytest.fixture
def embeds(make_stage):
    """`embeds(kind="mean", …)`: a stage whose model embeds."""

    def make(pooler=EMBEDS, **options):
        return make_stage(pooler=pooler, **options)

    return make


def post(stage, path, body, **headers):
    async def send():
        async with stage.client(headers=headers) as client:
            return await client.post(path, json=body)

    return anyio.run(send)


def pooled(request):
    """The vectors that the engine has for a request, as lists."""
    return np.array(vectors_of(request), np.float32).reshape(-1, HIDDEN_SIZE).tolist()


def unit(row):
    row = np.array(row, np.float64)
    return (row / np.sqrt((row * row).sum())).astype(np.float32)


def test_every_form_of_input_has_its_vectors_in_order(embeds, tokenizer):
    stage = embeds()
    texts = ["The sea is blue", "Grass", "The sea is blue"]
    ids = [tokenizer.encode(text) for text in texts]
    for form, wanted in ((texts[0], ids[:1]), (texts, ids), (ids[1], ids[1:2]), (ids, ids)):
        before = len(stage.engine.requests)
        answer = post(stage, "/v1/embeddings", {"input": form}, **{"X-Request-Id": "known"}).json()
        requests = stage.engine.requests[before:]
        assert [list(request.prompt_token_ids) for request in requests] == wanted
        assert {request.pooling for request in requests} == {PoolingParams("last")}
        total = sum(map(len, wanted))
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == total
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(len(one) // 2 for one in wanted)
        assert (answer["object"], answer["model"], answer["id"]) == ("list", "demo", "embd-known")
        assert [(item["object"], item["index"]) for item in answer["data"]] == [
            ("embedding", index) for index in range(len(wanted))
        ]
        for item, request in zip(answer["data"], requests, strict=True):
            assert np.array_equal(np.array(item["embedding"], np.float32), unit(pooled(request)[0]))
    assert stage.state.num_in_flight == 0
    assert stage.counters.prompt_tokens == sum(len(request.prompt_token_ids) for request in stage.engine.requests)
    assert stage.counters.generation_tokens == 0
    assert stage.counters.finished["stop"] == len(stage.engine.requests)


def test_base64_has_the_bits_of_the_floats(embeds):
    stage = embeds()
    floats = post(stage, "/v1/embeddings", {"input": "x y z"}).json()["data"][0]["embedding"]
    packed = post(stage, "/v1/embeddings", {"input": "x y z", "encoding_format": "base64"}).json()
    assert array("f", base64.b64decode(packed["data"][0]["embedding"])).tolist() == floats


def test_dimensions_are_cut_and_normalised_again_where_the_model_allows_it(embeds):
    stage = embeds()
    vector = post(stage, "/v1/embeddings", {"input": "x", "dimensions": 3}).json()["data"][0]["embedding"]
    assert len(vector) == 3
    assert math.isclose(sum(number * number for number in vector), 1, rel_tol=1e-6)
    raw = post(stage, "/v1/embeddings", {"input": "x", "dimensions": 3, "normalize": False}).json()["data"][0]
    assert raw["embedding"] == pooled(stage.engine.requests[-1])[0][:3]
    for dimensions, refused in ((None, 3), ((2, 4), 3), ((), HIDDEN_SIZE + 1)):
        answer = post(
            embeds(PoolerConfig(Task.EMBED, dimensions=dimensions)),
            "/v1/embeddings",
            {"input": "x", "dimensions": refused},
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")
    for dimensions in (None, (2, 3)):
        body = {"input": "x", "dimensions": HIDDEN_SIZE}
        assert post(embeds(PoolerConfig(Task.EMBED, dimensions=dimensions)), "/v1/embeddings", body).status_code == 200


def test_prompts_of_the_model_precede_texts(embeds, tokenizer):
    stage = embeds()
    post(stage, "/v1/embeddings", {"input": ["a", "b"], "prompt_name": "query"})
    assert [list(request.prompt_token_ids) for request in stage.engine.requests] == [
        tokenizer.encode(text) for text in ("Find: a", "Find: b")
    ]
    default = PoolerConfig(Task.EMBED, prompts={"query": "Find: "}, default_prompt="query", lower_case=True)
    stage = embeds(default)
    post(stage, "/v1/embeddings", {"input": "ABC"})
    assert list(stage.engine.requests[-1].prompt_token_ids) == tokenizer.encode("find: abc")
    for body in ({"input": "a", "prompt_name": "nope"}, {"input": [1, 2], "prompt_name": "query"}):
        error = post(embeds(), "/v1/embeddings", body).json()["error"]
        assert error["param"] == "prompt_name"


def test_long_texts_are_refused_or_cut_at_their_end(embeds, tokenizer):
    stage = embeds(PoolerConfig(Task.EMBED, max_len=16))
    text = "one two three " * 40
    ids = tokenizer.encode(text)
    for given in (text, ids):
        error = post(stage, "/v1/embeddings", {"input": ["short", text] if given is text else ids}).json()["error"]
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert "16" in error["message"]
        assert not stage.engine.requests
    for given in (text, ids):
        for truncate, kept in ((-1, 16), (7, 7)):
            answer = post(stage, "/v1/embeddings", {"input": given, "truncate_prompt_tokens": truncate})
            assert answer.status_code == 200
            assert list(stage.engine.requests[-1].prompt_token_ids) == ids[:kept]
    whole = post(stage, "/v1/embeddings", {"input": "one two", "truncate_prompt_tokens": 16})
    assert whole.json()["usage"]["prompt_tokens"] == len(tokenizer.encode("one two"))


def test_special_tokens_around_a_text_are_not_cut(embeds):
    loaded = chat_tokenizer(None)
    ids = [(name, loaded.backend.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    loaded.backend.post_processor = TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=ids)
    around = Tokenizer(loaded.backend, {})
    stage = embeds()
    stage.state.async_llm.input_processor.tokenizer = around
    own = around.encode("one two three four five six", add_special_tokens=False)
    for truncate, kept in ((5, own[:3]), (len(own) + 2, own), (-1, own), (len(own) + 1, own[:-1])):
        body = {"input": "one two three four five six", "truncate_prompt_tokens": truncate}
        assert post(stage, "/v1/embeddings", body).status_code == 200
        assert list(stage.engine.requests[-1].prompt_token_ids) == [ids[0][1], *kept, ids[1][1]]
    error = post(stage, "/v1/embeddings", body | {"truncate_prompt_tokens": 2}).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"
    post(stage, "/v1/embeddings", {"input": "one", "add_special_tokens": False})
    assert list(stage.engine.requests[-1].prompt_token_ids) == around.encode("one", add_special_tokens=False)
    loaded.close()
    around.close()


def test_pooling_has_a_vector_for_each_token(embeds):
    stage = embeds()
    answer = post(stage, "/pooling", {"input": ["one two three", "four"], "normalize": False}).json()
    for item, request in zip(answer["data"], stage.engine.requests, strict=True):
        assert request.pooling == PoolingParams("token")
        assert item["data"] == pooled(request)
    answer = post(stage, "/pooling", {"input": "four", "task": "embed", "encoding_format": "base64"}).json()
    same = post(stage, "/v1/embeddings", {"input": "four", "encoding_format": "base64"}).json()
    assert answer["data"][0] == {"object": "pooling", "index": 0, "data": same["data"][0]["embedding"]}


def test_an_answer_has_only_so_many_vectors_of_tokens(embeds, monkeypatch):
    monkeypatch.setattr("oarlock.server.endpoints.pooling.serving.MAX_NUMBERS", 20 * HIDDEN_SIZE)
    stage, ids = embeds(), [7] * 10
    assert post(stage, "/pooling", {"input": [ids, ids]}).status_code == 200
    before = len(stage.engine.requests)
    error = post(stage, "/pooling", {"input": [ids, ids, [7]]}).json()["error"]
    assert error["param"] == "input"
    assert "20 tokens" in error["message"]
    assert len(stage.engine.requests) == before
    assert post(stage, "/pooling", {"input": [ids, ids, [7]], "task": "embed"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "x"]}, "input"),
        ({"input": [4096]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 5, "truncation_side": "left"}, "truncation_side"),
        ({"input": "x", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "x", "priority": 11}, "priority"),
        ({"input": "x", "model": "nope"}, "model"),
    ],
)
def test_invalid_fields_are_refused_by_name(embeds, body, param):
    stage = embeds()
    answer = post(stage, "/v1/embeddings", body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"].split("[")[0] == param
    assert not stage.engine.requests


def test_models_refuse_unsupported_output(embeds, make_stage):
    generates, scores = make_stage(), make_stage(pooler=PoolerConfig(Task.SCORE, kind="logits", label_tokens=(1, 2)))
    pair, pairs = {"text_1": "a", "text_2": "b"}, {"query": "a", "documents": ["b"]}
    vectors = [("/v1/embeddings", {"input": "x"}), ("/pooling", {"input": "x"})]
    scoring = [(path, pair) for path in ("/v1/score", "/score")]
    scoring += [(path, pairs) for path in ("/v1/rerank", "/v2/rerank", "/rerank")]
    chat = {"messages": [{"role": "user", "content": "x"}]}
    texts = [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", chat), ("/v1/responses", {"input": "x"})]
    texts += [("/v1/completions/render", {"prompt": "x"})]
    for stage, refused in ((generates, vectors + scoring), (embeds(), texts), (scores, vectors + texts)):
        for path, body in refused:
            answer = post(stage, path, body)
            assert answer.status_code == 400, (path, answer.text)
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("model", "unsupported_by_model"), path
            assert "/v1/" in error["message"]
        assert not stage.engine.requests


def test_models_and_capabilities_describe_the_output(embeds, make_stage):
    async def ask(stage):
        async with stage.client() as client:
            return [(await client.get(path)).json() for path in ("/v1/models", "/v1/capabilities")]

    models, known = anyio.run(ask, embeds())
    assert (models["data"][0]["task"], models["data"][0]["chat"]) == ("embed", False)
    assert known["features"]["task"] == "embed"
    assert known["pooling"]["prompts"] == {"query": "Find: ", "document": ""}
    assert (known["pooling"]["hidden_size"], known["pooling"]["dimensions"]) == (HIDDEN_SIZE, "any")
    models, known = anyio.run(ask, make_stage())
    assert (models["data"][0]["task"], known["pooling"]) == ("generate", None)


def test_time_limits_full_queues_and_failures_are_this_requests_error(embeds):
    slow = post(embeds(pause_after=0), "/v1/embeddings", {"input": ["x", "y"], "timeout": 0.05})
    assert slow.status_code == 408
    full = post(embeds(refuse=QueueFullError("The queue is full.", 2.4)), "/v1/embeddings", {"input": "x"})
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    failed = embeds(fail_after=0)
    assert post(failed, "/v1/embeddings", {"input": "x"}).status_code == 500
    assert post(failed, "/v1/embeddings", {"input": "x", "timeout": -1}).status_code == 400
    assert failed.state.num_in_flight == 0


def test_a_key_is_asked_for_and_counted(embeds, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("search secret-of-search\n")
    stage = embeds(api_key_file=str(keys))
    assert post(stage, "/v1/embeddings", {"input": "x"}).status_code == 401
    used = post(stage, "/v1/embeddings", {"input": "x"}, Authorization="Bearer secret-of-search").json()["usage"]
    assert stage.counters.by_key["search"] == [1, used["prompt_tokens"], 0]


def test_a_request_is_explained_and_logged_like_all_others(embeds, caplog):
    stage = embeds(admin_api_key="boss", enable_log_requests=True)

    async def ask():
        async with stage.client(headers={"Authorization": "Bearer boss", "X-Request-Id": "known"}) as client:
            await client.post("/v1/embeddings", json={"input": ["one two", "three"], "user": "someone"})
            return [(await client.get(f"/v1/requests/{name}")).json() for name in ("known", "embd-known")]

    with caplog.at_level("INFO", "oarlock"):
        by_request, by_answer = anyio.run(ask)
    assert by_request == by_answer
    assert by_request["route"] == "/v1/embeddings"
    num_tokens = sum(len(request.prompt_token_ids) for request in stage.engine.requests)
    assert f'"prompt_tokens": {num_tokens}' in json.dumps(by_request)
    (line,) = (one.getMessage() for one in caplog.records if "request_done" in one.getMessage())
    assert f"prompt_tokens={num_tokens}" in line
    assert "completion_tokens=0" in line
    assert "someone" not in line


def test_a_client_that_leaves_aborts_its_prompts(embeds, wait_for, make_server):
    running = make_server(pooler=EMBEDS, pause_after=0)
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"))
    connection.request(
        "POST", "/v1/embeddings", json.dumps({"input": ["x", "y"]}), {"Content-Type": "application/json"}
    )
    wait_for(lambda: len(running.stage.engine.requests) == 2)
    connection.close()
    wait_for(lambda: len(running.stage.engine.aborted) == 2)
    wait_for(lambda: running.stage.state.num_in_flight == 0)


def test_the_official_client_reads_both_encodings(make_server):
    running = make_server(pooler=EMBEDS)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
        packed = client.embeddings.create(model="demo", input=["a b", "c"])  # the client asks for base64 itself
        plain = client.embeddings.create(model="demo", input=["a b", "c"], encoding_format="float")
    assert [item.embedding for item in packed.data] == [item.embedding for item in plain.data]
    assert packed.usage.total_tokens == plain.usage.total_tokens > 0


def test_every_field_of_the_official_client_is_known(make_stage):
    from openai.types import EmbeddingCreateParams

    from oarlock.server.schemas.pooling import EmbeddingRequest

    assert set(EmbeddingCreateParams.__annotations__) <= set(EmbeddingRequest.model_fields)


class Halves:
    """Layers that add the first numbers of a vector to its last ones."""

    def __call__(self, vectors):
        return vectors[:, :2].astype(np.float64) + vectors[:, 2:]


def test_vectors_of_texts_go_through_dense_modules_and_those_of_tokens_do_not(embeds):
    config = DenseConfig(Path("2_Dense"), HIDDEN_SIZE, 2, True, "Identity")
    stage = embeds(dataclasses.replace(EMBEDS, dense=(config,), layers=Halves()))
    answer = post(stage, "/v1/embeddings", {"input": "abc"}).json()
    (vector,) = pooled(stage.engine.requests[-1])
    added = [vector[0] + vector[2], vector[1] + vector[3]]
    assert np.array_equal(np.array(answer["data"][0]["embedding"], np.float32), unit(added))
    plain = post(stage, "/v1/embeddings", {"input": "abc", "normalize": False, "dimensions": 1}).json()
    assert plain["data"][0]["embedding"] == [float(np.float32(added[0]))]
    refused = post(stage, "/v1/embeddings", {"input": "abc", "dimensions": 3}).json()["error"]
    assert "at most 2" in refused["message"]
    rows = post(stage, "/pooling", {"input": "abc", "dimensions": 4, "normalize": False}).json()["data"][0]["data"]
    assert rows == pooled(stage.engine.requests[-1])
    score = post(stage, "/v1/score", {"text_1": "abc", "text_2": "abd"}).json()["data"][0]["score"]
    first, second = (
        [row[0] + row[2], row[1] + row[3]] for row in (pooled(one)[0] for one in stage.engine.requests[-2:])
    )
    assert math.isclose(score, float(unit(first).astype(float) @ unit(second).astype(float)), abs_tol=1e-6)


@pytest.mark.parametrize(
    ("prompts", "default", "input_type", "before"),
    [
        ({"query": "Q: ", "passage": "P: "}, None, "query", "Q: "),
        ({"query": "Q: ", "passage": "P: "}, None, "search_query", "Q: "),
        ({"query": "Q: ", "passage": "P: "}, None, "document", "P: "),
        ({"query": "Q: ", "passage": "P: ", "document": "D: "}, None, "search_document", "D: "),
        ({"query": "Q: ", "passage": "P: ", "document": "D: "}, None, "passage", "P: "),
        ({"search_query": "S: ", "query": "Q: "}, None, "search_query", "S: "),
        ({"clustering": "C: "}, None, "clustering", "C: "),
        ({}, None, "query", ""),
        ({"other": "O: "}, "other", "query", ""),
        ({"other": "O: "}, "other", "other", "O: "),
    ],
)
def test_input_type_chooses_the_prompt(embeds, tokenizer, prompts, default, input_type, before):
    stage = embeds(dataclasses.replace(EMBEDS, prompts=prompts, default_prompt=default))
    assert post(stage, "/v1/embeddings", {"input": "abc", "input_type": input_type}).status_code == 200
    assert list(stage.engine.requests[-1].prompt_token_ids) == tokenizer.encode(f"{before}abc")


def test_kinds_of_texts_that_are_not_known_are_refused(embeds):
    stage = embeds(dataclasses.replace(EMBEDS, prompts={"query": "Q: ", "code": "C: "}))
    for fields, said in (
        (
            {"input": "a", "input_type": "classification"},
            "one of query, document, search_query, search_document, passage",
        ),
        ({"input": "a", "input_type": "image"}, "passage, code"),
        ({"input": "a", "input_type": "query", "prompt_name": "query"}, "give only one of them"),
        ({"input": [1, 2], "input_type": "query"}, "token ids"),
    ):
        answer = post(stage, "/v1/embeddings", fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_type")
        assert said in answer.json()["error"]["message"]
    assert not stage.engine.requests
