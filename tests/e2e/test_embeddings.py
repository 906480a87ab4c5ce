"""Vectors and scores of a real server, beside transformers' hidden states in float64."""

from __future__ import annotations

import base64
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.e2e.conftest import CODE
from tests.e2e.embedding_demo import PROMPTS, embedding_demo
from tests.e2e.running import DEMO, RunningServer

pytestmark = pytest.mark.slow
TEXTS = [*CODE[:4], "x", CODE[2] * 12]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # steps of 64 tokens: the longest text takes several
    flags = ("--dtype", "float32", "--max-num-batched-tokens", 64, "--max-num-seqs", 8)
    with RunningServer(embedding_demo(tmp_path_factory.mktemp("embeds") / "demo"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def hidden():
    """`hidden(text)`: the last token's state after the final norm in float64, and what float32 makes of it."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    models = [AutoModel.from_pretrained(DEMO, dtype=dtype).eval() for dtype in (torch.float64, torch.float32)]

    def run(text):
        ids = torch.tensor([tokenizer(text).input_ids])
        with torch.inference_mode():
            return [model(ids).last_hidden_state[0, -1].double().numpy() for model in models]

    return run


def vectors(server, inputs, **fields):
    body = {"input": inputs, "encoding_format": "base64", **fields}
    answer = server.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer.json()["data"]]


def unit(vector):
    return vector / np.sqrt((vector * vector).sum())


@pytest.mark.parametrize("prompt", [None, "query"])
def test_vectors_match_float64(server, hidden, prompt):
    """No further off than twice what transformers' own float32 is, and a few last places."""
    for text, vector in zip(TEXTS, vectors(server, TEXTS, prompt_name=prompt), strict=True):
        truth, theirs = (unit(state) for state in hidden(PROMPTS.get(prompt, "") + text))
        limit = 2 * np.abs(theirs - truth).max() + 4 * np.finfo(np.float32).eps * np.abs(truth).max()
        assert np.abs(vector - truth).max() <= limit
        assert math.isclose(np.linalg.norm(vector.astype(np.float64)), 1, rel_tol=1e-6)
    short = vectors(server, TEXTS[:1], dimensions=100, prompt_name=prompt)[0]
    truth, theirs = (unit(state[:100]) for state in hidden(PROMPTS.get(prompt, "") + TEXTS[0]))
    assert np.abs(short - truth).max() <= 2 * np.abs(theirs - truth).max() + 1e-6 * np.abs(truth).max()


def test_a_text_has_the_same_bits_alone_in_a_batch_and_over_and_over(server):
    if not server.client.get("/v1/models").json()["data"][0]["batch_invariant"]:
        pytest.skip("this backend does not promise it")
    alone = [vectors(server, text)[0].tobytes() for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda shift: vectors(server, TEXTS[shift:] + TEXTS[:shift]), range(4)):
            assert {vector.tobytes() for vector in found} == set(alone)
    assert [vector.tobytes() for vector in vectors(server, TEXTS)] == alone


def test_scores_are_the_cosines_of_float64(server, hidden):
    answer = server.client.post("/v1/rerank", json={"query": "sum", "documents": TEXTS}).json()
    query = unit(hidden(PROMPTS["query"] + "sum")[0])
    truth = [float(query @ unit(hidden(text)[0])) for text in TEXTS]
    for result in answer["results"]:
        assert math.isclose(result["relevance_score"], truth[result["index"]], abs_tol=1e-6)
    assert [result["index"] for result in answer["results"]] == sorted(
        range(len(TEXTS)), key=lambda index: -answer_score(answer, index)
    )


def answer_score(answer, index):
    return next(result["relevance_score"] for result in answer["results"] if result["index"] == index)


def test_usage_is_what_the_counters_have_and_nothing_is_left(server):
    before = server.metrics()
    used = sum(
        server.client.post(path, json=body).json()["usage"]["prompt_tokens"]
        for path, body in (
            ("/v1/embeddings", {"input": TEXTS}),
            ("/pooling", {"input": TEXTS[:2]}),
            ("/v1/rerank", {"query": "sum", "documents": TEXTS}),
            ("/v1/score", {"text_1": "sum", "text_2": TEXTS}),
        )
    )
    after = server.metrics()
    for name in ("vllm:prompt_tokens_total", "oarlock:engine_prompt_tokens_total"):
        assert after[name] - before[name] == used
    assert after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"]
    assert after["oarlock:kv_blocks_held"] == after["vllm:num_requests_running"] == 0


def test_texts_beyond_the_checkpoints_length_are_refused(server):
    long = "word " * 600
    error = server.client.post("/v1/embeddings", json={"input": long}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    cut = server.client.post("/v1/embeddings", json={"input": long, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 512


@pytest.mark.soak
def test_a_reranker_that_is_asked_has_the_odds_of_float64():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.contract.test_rerank_wire import QWEN, TASK

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float64).eval()
    with RunningServer(DEMO, "--dtype", "float32", "--classifier-from-token", "a", "b") as server:
        answer = server.client.post("/v1/rerank", json={"query": "sum", "documents": TEXTS[:5]}).json()
    wrong, right = (tokenizer(word).input_ids[0] for word in ("a", "b"))
    for result in answer["results"]:
        text = QWEN.format(instruction=TASK, query="sum", document=TEXTS[result["index"]])
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1]
        assert math.isclose(result["relevance_score"], torch.sigmoid(logits[right] - logits[wrong]), rel_tol=1e-4)
