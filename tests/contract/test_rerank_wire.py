"""`/v1/rerank` and `/v1/score` as a client sees them, by vectors and by a reranker's answer."""

from __future__ import annotations

import math

import anyio
import numpy as np
import pytest

from oarlock.engine.types import PoolingParams
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from tests.contract.conftest import INFO, chat_tokenizer, vectors_of

EMBEDS = PoolerConfig(Task.EMBED, kind="mean", prompts={"query": "Find: ", "passage": "Text: "})
ASKS = PoolerConfig(Task.SCORE, kind="logits", label_tokens=(70, 71))
QUERY, DOCUMENTS = "What is blue?", ["Grass is green", "The sea is blue", "Grass is green", "Snow"]
# The format of the model card of Qwen3-Reranker, written out.
QWEN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"
PAIRS = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}I: {{ m.content }}\n"
    "{% elif m.role == 'query' %}Q: {{ m.content }}\n"
    "{% elif m.role == 'document' %}D: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Relevant:{% endif %}"
)


def post(stage, path, body):
    async def send():
        async with stage.client(headers={"X-Request-Id": "known"}) as client:
            return await client.post(path, json=body)

    return anyio.run(send)


def cosine(first, second):
    first, second = (np.array(vectors_of(one), np.float64) for one in (first, second))
    return float(first @ second / math.sqrt((first @ first) * (second @ second)))


def probability(request):
    wrong, right = vectors_of(request)
    return 1 / (1 + math.exp(wrong - right))


def prompts_of(stage):
    return [list(request.prompt_token_ids) for request in stage.engine.requests]


def test_an_embedding_model_ranks_by_cosines_with_its_prompts(make_stage, tokenizer):
    stage = make_stage(pooler=EMBEDS)
    body = {"query": QUERY, "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}, DOCUMENTS[3]]}
    answer = post(stage, "/v1/rerank", body).json()
    texts = [f"Find: {QUERY}", *(f"Text: {document}" for document in DOCUMENTS)]
    assert prompts_of(stage) == [tokenizer.encode(text) for text in texts]
    assert {request.pooling for request in stage.engine.requests} == {PoolingParams("mean")}
    query, *documents = stage.engine.requests
    scores = [cosine(query, document) for document in documents]
    order = sorted(range(4), key=lambda index: (-scores[index], index))
    assert [result["index"] for result in answer["results"]] == order
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[index] for index in order]
    for result in answer["results"]:
        assert math.isclose(result["relevance_score"], scores[result["index"]], rel_tol=1e-12)
    assert (answer["id"], answer["model"]) == ("rerank-known", "demo")
    assert answer["usage"]["total_tokens"] == sum(map(len, prompts_of(stage)))
    short = post(stage, "/v2/rerank", {**body, "top_n": 2, "return_documents": False}).json()
    assert short["results"] == [
        {"index": result["index"], "relevance_score": result["relevance_score"]} for result in answer["results"][:2]
    ]


def test_scores_are_pair_by_pair_or_one_with_all(make_stage, tokenizer):
    stage = make_stage(pooler=EMBEDS)
    answer = post(stage, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert prompts_of(stage) == [tokenizer.encode(text) for text in [QUERY, *DOCUMENTS]]  # as they are
    one_with_all = [item["score"] for item in answer["data"]]
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(index, "score") for index in range(4)]
    assert one_with_all[0] == one_with_all[2]
    paired = post(stage, "/score", {"text_1": [QUERY] * 4, "text_2": DOCUMENTS}).json()
    assert [item["score"] for item in paired["data"]] == one_with_all
    alone = [post(stage, "/score", {"text_1": QUERY, "text_2": one}).json()["data"][0]["score"] for one in DOCUMENTS]
    assert alone == one_with_all
    same = post(stage, "/score", {"text_1": "Snow", "text_2": "Snow"}).json()["data"][0]["score"]
    assert math.isclose(same, 1, rel_tol=1e-15)
    assert same <= 1


def test_a_reranker_is_asked_in_the_format_of_qwen(make_stage, tokenizer):
    stage = make_stage(pooler=ASKS)
    answer = post(stage, "/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()
    asked = [QWEN.format(instruction=TASK, query=QUERY, document=document) for document in DOCUMENTS]
    assert prompts_of(stage) == [tokenizer.encode(text, add_special_tokens=False) for text in asked]
    assert {request.pooling for request in stage.engine.requests} == {PoolingParams("logits", (70, 71))}
    for result in answer["results"]:
        wanted = probability(stage.engine.requests[result["index"]])
        assert math.isclose(result["relevance_score"], wanted, rel_tol=1e-12)
    post(stage, "/v1/score", {"text_1": QUERY, "text_2": "Snow", "instruction": "Judge"})
    asked = QWEN.format(instruction="Judge", query=QUERY, document="Snow")
    assert prompts_of(stage)[-1] == tokenizer.encode(asked, add_special_tokens=False)


def test_a_chat_template_for_pairs_is_used(make_stage):
    loaded = chat_tokenizer(PAIRS)
    stage = make_stage(
        pooler=PoolerConfig(Task.SCORE, kind="logits", label_tokens=(70,), prompts={"web": "W"}, default_prompt="web")
    )
    stage.state.async_llm.input_processor.tokenizer = loaded
    for instruction, shown in ((None, "W"), ("Judge", "Judge")):
        for document in ("Snow", "", "D: Relevant:"):
            body = {"text_1": "q", "text_2": document, **({"instruction": instruction} if instruction else {})}
            score = post(stage, "/v1/score", body).json()["data"][0]["score"]
            text = f"I: {shown}\nQ: q\nD: {document}\nRelevant:"
            assert prompts_of(stage)[-1] == loaded.encode(text, add_special_tokens=False)
            (logit,) = vectors_of(stage.engine.requests[-1])
            assert math.isclose(score, 1 / (1 + math.exp(-logit)), rel_tol=1e-12)
    loaded.close()


@pytest.mark.parametrize("source", [None, PAIRS])
def test_the_document_is_cut_and_never_the_question(make_stage, tokenizer, source):
    loaded = chat_tokenizer(source) if source else tokenizer
    stage = make_stage(pooler=ASKS)
    stage.state.async_llm.input_processor.tokenizer = loaded
    document = "one two three " * 200
    body = {"text_1": QUERY, "text_2": document}
    error = post(stage, "/v1/score", body).json()["error"]
    assert (error["param"], error["code"]) == ("text_2", "context_length_exceeded")
    assert not stage.engine.requests
    for truncate, length in ((-1, INFO.max_model_len), (200, 200)):
        assert post(stage, "/v1/score", {**body, "truncate_prompt_tokens": truncate}).status_code == 200
        ids = prompts_of(stage)[-1]
        assert len(ids) == length
        text = loaded.decode(ids, loaded.special_ids)
        assert text.endswith("\nRelevant:" if source else QWEN.rpartition("{document}")[2])
        assert QUERY in text
        assert "one two three" in text
    error = post(stage, "/v1/score", {**body, "truncate_prompt_tokens": 1}).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"
    whole = post(stage, "/v1/score", {"text_1": QUERY, "text_2": "Snow"})
    cut = post(stage, "/v1/score", {"text_1": QUERY, "text_2": "Snow", "truncate_prompt_tokens": -1})
    assert cut.json()["data"] == whole.json()["data"]
    assert prompts_of(stage)[-1] == prompts_of(stage)[-2]
    if source:
        loaded.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "x"}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": [{"image": "x"}]}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": [5]}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["x"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "instruction": "Judge"}, "instruction"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "rank_fields": ["title"]}, "rank_fields"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "relevant_spans": {"mode": "enabled"}}, "relevant_spans"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": 5, "text_2": "x"}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_invalid_fields_are_refused_by_name(make_stage, path, body, param):
    stage = make_stage(pooler=EMBEDS)
    answer = post(stage, path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not stage.engine.requests
