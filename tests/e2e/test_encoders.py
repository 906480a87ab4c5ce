"""Encoders behind a real server, on several ranks that are processes: vectors and scores beside float64."""

from __future__ import annotations

import math
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.e2e.running import RunningServer, command, environment
from tests.golden.tiny_encoders import hidden_of, load_encoder, make_encoder, score_of, write_modules

pytestmark = pytest.mark.soak
DOCUMENTS = ["a river bank", "money in the bank!", "fish", "the sea. " * 9, "x"]
QUERY = "where is the bank?"


@pytest.fixture(scope="module")
def scoring(tmp_path_factory):
    path = make_encoder(tmp_path_factory.mktemp("models"), "bert-score", tokenizer=True)
    with RunningServer(path, "--tensor-parallel-size", 2) as running:
        running.path = path
        yield running


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """With the files of sentence-transformers: the first token's vector, normalised."""
    path = make_encoder(tmp_path_factory.mktemp("models"), "modernbert", tokenizer=True)
    write_modules(path, "cls_token", 500)
    with RunningServer(path) as running:
        running.path = path
        yield running


def pair_ids(path, query, document, most=256):
    """Ids of a pair of texts, cut and joined as sentence-transformers does."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(most, strategy="longest_first")
    found = tokenizer.encode(query, document)
    return found.ids, found.type_ids.index(1)


def test_scores_match_float64(scoring):
    import torch

    exact = load_encoder(scoring.path, torch.float64)
    documents = [*DOCUMENTS, "the deep blue sea " * 40]  # the last is cut
    body = {"query": QUERY, "documents": documents, "truncate_prompt_tokens": -1}
    results = scoring.client.post("/v1/rerank", json=body).json()["results"]
    assert [one["relevance_score"] for one in results] == sorted((o["relevance_score"] for o in results), reverse=True)
    for one in results:
        truth = 1 / (1 + math.exp(-score_of(exact, *pair_ids(scoring.path, QUERY, documents[one["index"]]))))
        assert math.isclose(one["relevance_score"], truth, rel_tol=1e-5)
    pairs = scoring.client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    by_index = {one["index"]: one["relevance_score"] for one in results}
    assert [one["score"] for one in pairs] == [by_index[index] for index in range(len(DOCUMENTS))]


def test_both_texts_may_be_cut(scoring):
    import torch

    exact = load_encoder(scoring.path, torch.float64)
    long = "abc def ghi " * 60
    for first, second, most in ((long, long, 100), (long, long, 101), (long, "fish", 60), ("fish", long, 61)):
        body = {"text_1": first, "text_2": second, "truncate_prompt_tokens": most}
        answer = scoring.client.post("/v1/score", json=body).json()
        assert answer["usage"]["prompt_tokens"] == most
        truth = 1 / (1 + math.exp(-score_of(exact, *pair_ids(scoring.path, first, second, most))))
        assert math.isclose(answer["data"][0]["score"], truth, rel_tol=1e-5)


def test_bits_are_the_same_alone_and_in_a_batch(scoring):
    info = scoring.client.get("/v1/models").json()["data"][0]
    assert info["task"] == "score" and info["architecture"] == "BertForSequenceClassification"
    if not info["batch_invariant"]:
        pytest.skip(info["batch_invariant_reason"])

    def score(document):
        return scoring.client.post("/v1/score", json={"text_1": QUERY, "text_2": document}).json()["data"][0]["score"]

    alone = [score(document) for document in DOCUMENTS]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(score, DOCUMENTS * 8)) == alone * 8


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"input": "x"}, "Use /v1/rerank or /v1/score"),
        ("/v1/completions", {"prompt": "x"}, "does not support text generation"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a b " * 150]}, "accepts at most 256"),
        ("/v1/rerank", {"query": QUERY, "documents": ["x"], "instruction": "Find."}, "reads two texts at once"),
        ("/v1/rerank", {"query": QUERY, "documents": ["x"], "truncate_prompt_tokens": 4}, "leaves no token"),
    ],
)
def test_features_that_a_cross_encoder_lacks_are_refused_by_name(scoring, path, body, words):
    answer = scoring.client.post(path, json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_vectors_match_float64(embedding):
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedding.path / "tokenizer.json"))
    exact = load_encoder(embedding.path, torch.float64)
    texts = [*DOCUMENTS, "the deep blue sea " * 25]
    data = embedding.client.post("/v1/embeddings", json={"input": texts}).json()["data"]
    for text, one in zip(texts, data, strict=True):
        truth = hidden_of(exact, tokenizer.encode(text).ids)[0].numpy()
        np.testing.assert_allclose(one["embedding"], truth / np.linalg.norm(truth), atol=2e-6)
    by_token = embedding.client.post("/pooling", json={"input": texts[:1], "task": "token_embed"}).json()
    tokens = by_token["data"][0]["data"]
    assert len(tokens) == len(tokenizer.encode(texts[0]).ids)
    error = embedding.client.post("/v1/embeddings", json={"input": "a b " * 300}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "500" in error["message"]


def test_usage_is_what_the_counters_have_and_nothing_is_left(scoring):
    before = scoring.metrics()
    body = {"query": QUERY, "documents": DOCUMENTS}
    used = scoring.client.post("/v1/rerank", json=body).json()["usage"]["prompt_tokens"]
    after = scoring.metrics()
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == used
    assert after["oarlock:kv_blocks_held"] == after["vllm:num_requests_running"] == 0


def test_a_recording_gives_the_same_bits_on_two_ranks(tmp_path):
    path, file = make_encoder(tmp_path, "modernbert", tokenizer=True), tmp_path / "steps.rec"
    with RunningServer(path, "--record", file) as server:
        assert server.client.post("/v1/embeddings", json={"input": DOCUMENTS}).status_code == 200
        assert server.stop() == 0
    replayed = command("replay", file, "--tensor-parallel-size", 2)
    result = subprocess.run(replayed, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "bit by bit" in result.stdout and "result: the same outputs" in result.stdout
