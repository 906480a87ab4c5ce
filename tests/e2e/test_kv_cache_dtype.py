"""Keys and values in 8 bits on a real server: named wherever one looks, and a text depends on nothing it should not."""

import subprocess

import pytest

from tests.e2e.running import DEMO, ROOT, RunningServer, command, environment, free_port

INT8 = ("--dtype", "float32", "--kv-cache-dtype", "int8", "--max-model-len", 512, "--block-size", 16)
BYTES_PER_TOKEN = 2 * 8 * 4 * (32 + 2)  # layers, KV heads, head size and scale
# Eight sequences that no memory of 64 blocks holds at the same time.
MANY = {"n": 8, "max_tokens": 160, "temperature": 1.2, "seed": 5, "ignore_eos": True}
PROMPT = "Q: What does os.path.join do?\nA: Join one or more path segments.\n\nQ: What does os.getcwd do?\nA:"


def answers(server: RunningServer, **fields) -> list:
    """Texts and log-probabilities of all choices."""
    found = server.complete(PROMPT, logprobs=2, **fields)
    return [(choice["text"], choice["logprobs"]) for choice in found["choices"]]


def oarlock(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.soak
def test_text_and_numbers_are_the_same_after_a_prefix_hit_and_after_preemption(tmp_path):
    file = tmp_path / "steps.rec"
    with RunningServer(DEMO, *INT8, "--record", file) as server:
        card = server.client.get("/v1/models").json()["data"][0]
        assert card["kv_cache_dtype"] == "int8"
        assert server.metric_label("vllm:cache_config_info", "cache_dtype") == "int8"
        assert server.metric_label("vllm:cache_config_info", "bytes_per_token_per_rank") == str(BYTES_PER_TOKEN)
        assert ", int8, 2.1 KiB per token" in server.log
        cold = answers(server, max_tokens=24, temperature=0)
        hits = server.metrics()["vllm:prefix_cache_hits_total"]
        assert answers(server, max_tokens=24, temperature=0) == cold
        assert server.metrics()["vllm:prefix_cache_hits_total"] >= hits + 16
        many = answers(server, **MANY)
        assert server.metrics()["vllm:num_preemptions_total"] == 0
    replayed = oarlock("replay", file)
    assert replayed.returncode == 0 and "the same outputs" in replayed.stdout
    assert "KV cache in int8" in replayed.stdout
    with RunningServer(DEMO, *INT8, "--kv-cache-memory", 64 * 16 * BYTES_PER_TOKEN) as server:
        assert answers(server, **MANY) == many
        assert server.metrics()["vllm:num_preemptions_total"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("cache", ["int8", "fp8_e4m3"])
def test_two_ranks_give_the_text_of_one(cache):
    texts = []
    for ranks in (1, 2):
        with RunningServer(DEMO, "--dtype", "float32", "--kv-cache-dtype", cache, "-tp", ranks) as server:
            texts.append([server.text(PROMPT, max_tokens=24, temperature=0) for _ in range(2)])
            assert server.client.get("/v1/models").json()["data"][0]["kv_cache_dtype"] == cache.partition("_")[0]
    assert texts[0] == texts[1] and texts[0][0] == texts[0][1]


def test_a_form_that_does_not_exist_is_refused_by_name():
    result = oarlock("serve", DEMO, "--kv-cache-dtype", "fp8_e5m2", "--port", free_port())
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert "kv-cache-dtype" in result.stderr and "fp8_e5m2" in result.stderr and "int8" in result.stderr
