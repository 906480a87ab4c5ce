"""`--speculative-config` on a real server: the same answers in fewer steps, counted, recorded and replayed."""

import subprocess

import pytest

from tests.e2e.running import DEMO, ROOT, RunningServer, command, environment, events

CONFIG = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
QUOTE = (
    "Q: What does os.getcwd do?\nA: Return the current working directory.\n\n" * 2 + "Q: What does os.getcwd do?\nA:"
)
SCHEMA = {"type": "array", "items": {"type": "string", "enum": ["north", "south"]}, "minItems": 4, "maxItems": 6}
# Every kind of answer: greedy, seeded, with logprobs, several choices, a stop string, a grammar, a penalty, bad words.
ASKED = (
    {"temperature": 0, "logprobs": 2, "max_tokens": 48, "ignore_eos": True},
    {"temperature": 0.7, "seed": 3, "max_tokens": 40, "n": 3, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 40, "stop": ["working"], "logprobs": 0},
    {
        "temperature": 0,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "winds", "schema": SCHEMA}},
    },
    {"temperature": 0, "max_tokens": 24, "repetition_penalty": 1.2, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 24, "bad_words": [" current working"], "ignore_eos": True},
)


def oarlock(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


def answers(server: RunningServer) -> list:
    found = [server.complete(QUOTE, **fields) for fields in ASKED]
    keys = ("text", "finish_reason", "stop_reason", "logprobs")
    used = ("prompt_tokens", "completion_tokens", "total_tokens")  # not what was cached
    return [
        ([[one.get(key) for key in keys] for one in each["choices"]], [each["usage"][name] for name in used])
        for each in found
    ]


def streamed(server: RunningServer) -> tuple[str, int]:
    """The text of the first one, and the number of its chunks with text."""
    body = {"prompt": QUOTE, "stream": True, **ASKED[0]}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        texts = [chunk["choices"][0]["text"] for chunk in events(response) if chunk.get("choices")]
    return "".join(texts), len([text for text in texts if text])


@pytest.mark.soak
def test_answers_are_the_same_without_drafts_and_the_recording_replays(tmp_path):
    file = tmp_path / "steps.rec"
    flags = ("--dtype", "float32", "--no-enable-prefix-caching")
    with RunningServer(DEMO, *flags) as server:
        assert "batch_invariant=true" in server.log  # else drafts could change the last bits of logprobs
        expected, (text, num_chunks) = answers(server), streamed(server)
        metrics = server.metrics()
        steps = metrics["vllm:iteration_tokens_total_count"]
        assert metrics["vllm:spec_decode_num_drafts_total"] == 0
    with RunningServer(DEMO, *flags, "--record", file, "--speculative-config", CONFIG) as server:
        assert answers(server) == expected
        quoted, fewer_chunks = streamed(server)
        assert quoted == text and fewer_chunks <= num_chunks
        metrics = server.metrics()
        assert metrics["vllm:iteration_tokens_total_count"] < steps
        drafts, drafted, accepted = (
            metrics[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        assert 0 < drafts < drafted and 0 < accepted < drafted  # how many depends on the times of steps
    replayed = oarlock("replay", file)
    assert replayed.returncode == 0 and "the same outputs" in replayed.stdout, replayed.stdout + replayed.stderr
