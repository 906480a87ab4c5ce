"""Servers of models with latent attention, and with recurrent layers beside it: what users do with a server works."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.running import RunningServer, command, environment, eventually
from tests.e2e.storm import storm
from tests.e2e.test_class_server import (
    DRAFTS,
    check_batch_and_other_routes,
    check_cached_prefixes,
    check_completions,
    check_structured_answers,
)
from tests.golden.class_models import FOR_KERNELS, make_class

pytestmark = pytest.mark.soak
FLAGS = {
    "deepseek_v3": ("--kv-cache-dtype", "int8", "--enable-expert-parallel", "--speculative-config", DRAFTS),
    "kimi_linear": ("--kv-cache-dtype", "fp8", "--quantization", "int8"),
}
# A row of 32 + 16 elements in each layer, in int8 with two scales; Kimi Linear has one such layer.
BYTES_PER_TOKEN = {"deepseek_v3": "156", "kimi_linear": "48"}
# The first is for about 750 tokens, so that sequences are preempted. With states, too little memory would lower
# `--max-num-seqs` instead.
KV_MEMORY = {"deepseek_v3": "120KiB", "kimi_linear": "1MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latents")


def made(folder: Path, family: str) -> Path:
    """Return the checkpoint of a family, which is made once."""
    path = folder / family
    return path if path.exists() else make_class(folder, family, **FOR_KERNELS)


def run(*arguments: str | int | Path) -> "subprocess.CompletedProcess[str]":
    """Run `oarlock …` to its end."""
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("family", FLAGS)
def test_what_users_do_until_a_rank_is_killed(folder: Path, family: str) -> None:
    """What two ranks have recorded, one repeats bit by bit."""
    model, file = made(folder, family), folder / f"{family}.rec"
    flags = ("--dtype", "bfloat16", "--batch-dir", folder / f"{family}-jobs", "--record", file, *FLAGS[family])
    with RunningServer(model, "-tp", 2, *flags) as server:
        assert "event=fused_decoder_on" in server.log
        assert server.metric_label("vllm:cache_config_info", "bytes_per_token_per_rank") == BYTES_PER_TOKEN[family]
        check_completions(server)
        check_cached_prefixes(server)
        check_structured_answers(server)
        check_batch_and_other_routes(server)
        ranks = [one for one in server.processes() if "oarlock.workers.runner.worker_process" in one.cmdline()]
        ranks[-1].kill()
        assert server.process.wait(60) == 5, server.log
        assert not server.left_behind()
    result = run("replay", file, "--tensor-parallel-size", 1)
    assert result.returncode == 0 and "the same outputs" in result.stdout, result.stdout + result.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FLAGS)
def test_preempted_answers_are_the_same_and_clients_that_leave_cost_nothing(folder: Path, family: str) -> None:
    flags = ("--max-model-len", 512, "--block-size", 16, "--max-num-seqs", 16, "--kv-cache-memory", KV_MEMORY[family])
    with RunningServer(made(folder, family), "-tp", 2, *flags, *FLAGS[family]) as server:
        asked = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
        prompts = [[300 + number] * 70 for number in range(8)]
        alone = [server.text(prompt, **asked) for prompt in prompts]
        assert [one["text"] for one in server.complete(prompts, **asked)["choices"]] == alone
        assert server.metrics()["vllm:num_preemptions_total"] > 0 or family == "kimi_linear"
        ends = asyncio.run(storm(server.url, 2))
        assert min(ends["finished"], ends["left"], ends["same"]) > 3, ends
        found = eventually(lambda: idle(server), 60, "nothing runs or waits")
        blocks = found["oarlock:kv_blocks_total"]
        assert found["oarlock:kv_blocks_free"] + found["oarlock:kv_blocks_cached"] == blocks > 0
        assert server.complete([7] * 400, max_tokens=112, ignore_eos=True)["usage"]["completion_tokens"] == 112
        assert server.stop() == 0


def idle(server: RunningServer) -> dict[str, float] | None:
    """Return the metrics if nothing runs or waits."""
    figures = server.metrics()
    is_idle = figures["vllm:num_requests_running"] == figures["vllm:num_requests_waiting"] == 0
    return figures if is_idle else None


@pytest.mark.parametrize(
    ("family", "flags", "cause"),
    [
        ("kimi_linear", ("--speculative-config", DRAFTS), "--speculative-config does not support"),
        ("kimi_linear", ("--kv-offload-memory", "64MiB"), "has recurrent layers, whose state they do not keep"),
        ("deepseek_v3", ("--speculative-config", json.dumps({"method": "mtp"})), "only 'ngram' is supported"),
        ("deepseek_v3", ("-tp", 3), "tensor_parallel_size 3 does not fit this model: 4 heads"),
    ],
)
def test_what_such_models_cannot_do_is_refused_by_name(folder: Path, family: str, flags: tuple, cause: str) -> None:
    result = run("serve", made(folder, family), "--port", 0, *flags)
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error:", "fix:"))]
    assert result.returncode in (2, 3) and len(lines) == 2 and cause in lines[0], result.stderr
    assert "Traceback" not in result.stderr
