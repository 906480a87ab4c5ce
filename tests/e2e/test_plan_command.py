"""`oarlock plan` beside the servers that it plans: their counts of memory are within 3 % of its figures."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from oarlock.server.config.options import parse_size
from tests.e2e.running import DEMO, ROOT, RunningServer, command, environment

LIMIT = 0.02
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def plan(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = command("plan", *map(str, arguments))
    return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


def accounted(server: RunningServer) -> dict[str, float]:
    """Bytes that a rank has counted: weights as loaded, its pages, its largest step."""
    memory = re.search(r"event=memory step_bytes=(\d+) .* kv_bytes=(\d+)", server.log)
    weights = re.search(r"([\d.]+ [KMG]iB) per rank", server.log)
    assert memory and weights, server.log
    return {"weights": parse_size(weights[1]), "step": int(memory[1]), "kv": int(memory[2])}


def check(model: object, *flags: object) -> None:
    """Start the command that the plan gives, and compare its counts with the plan's."""
    found = plan(model, "--cpu", "--memory", "64GB", "--bandwidth", "10GB", "--json", *flags)
    assert found.returncode == 0, found.stderr
    report: dict[str, Any] = json.loads(found.stdout)
    best = report["layouts"][0]
    words = shlex.split(report["command"])
    assert words[:3] == ["oarlock", "serve", str(model)]
    with RunningServer(model, *words[3:]) as server:  # type: ignore[arg-type]
        real = accounted(server)
        blocks = int(server.metric_label("vllm:cache_config_info", "num_gpu_blocks"))
    for name, value in {"weights": best["weight_bytes"], "step": best["step_bytes"], "kv": best["kv_bytes"]}.items():
        assert abs(value - real[name]) <= LIMIT * real[name], f"{name}: planned {value}, counted {real[name]}"
    whole = best["weight_bytes"] + best["step_bytes"] + best["kv_bytes"]
    assert abs(whole - sum(real.values())) <= LIMIT * sum(real.values())
    assert abs(best["num_blocks"] - blocks) <= LIMIT * blocks


@pytest.mark.soak  # what ranks take: tests/parallel/test_plan_memory.py
@pytest.mark.parametrize("adapters", [(), ("--enable-lora", "--lora-modules", f"tone={DEMO}-lora", "--max-loras", 9)])
def test_a_server_counts_the_memory_that_was_planned(adapters: tuple[object, ...]) -> None:
    check(DEMO, "-tp", 2, "--dtype", "float32", "--kv-cache-dtype", "int8", "--max-num-seqs", 8, *adapters)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, ("--dtype", "bfloat16")), (2, ("--quantization", "int8", "--kv-cache-dtype", "int8"))],
)
def test_servers_of_a_true_shape_do_so_too(tmp_path: Path, ranks: int, flags: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    check(tmp_path, "-tp", ranks, "--load-format", "dummy", "--max-model-len", 2048, "--max-num-seqs", 4, *flags)
