"""A server under load on the device: tokens per second over HTTP, one step ahead and not, and beside transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint
from benchmarks.environments import ROOT
from benchmarks.gpu_check.part import NotHere, Row, Where
from benchmarks.systems.system import SERVED_NAME, HttpSystem, clean_environment

ROUNDS = 2


def _server(name: str, where: Where, most: int, *options: str, measures_memory: bool = False) -> HttpSystem:
    """Start a server. `measures_memory`: KV memory is as large as the start finds room for."""
    model = checkpoint.ensure("quick" if where.is_tiny else "0.5b")
    kv = () if measures_memory else ("--kv-cache-memory", "64MiB" if where.is_tiny else "8GiB")
    command = [sys.executable, "-P", "-m", "oarlock", "serve", str(model), "--port", "{port}", "--device", where.device]
    command += ["--served-model-name", SERVED_NAME, "--dtype", "bfloat16", "--max-model-len", "1024"]
    command += ["--max-num-seqs", str(most), "--no-enable-prefix-caching", *kv, *options]
    environment = clean_environment(1, PYTHONPATH=os.environ.get("PYTHONPATH", str(ROOT)))  # wheels are there, too
    del environment["OMP_NUM_THREADS"]
    return HttpSystem(name, name, {}, command, environment, ROOT)


def _load(where: Where) -> tuple[tuple[int, ...], int, int]:
    """Numbers of users, and tokens of prompts and answers."""
    return ((2,), 8, 4) if where.is_tiny else ((1, 8, 32, 128), 128, 128)


def _vocabulary(where: Where) -> int:
    return checkpoint.SHAPES["quick" if where.is_tiny else "0.5b"]["vocab_size"]


def load(where: Where, ranks: int = 1) -> Iterator[Row]:
    """Throughput of a closed loop of users, streamed and greedy."""
    users, prompt, answer = _load(where)
    with contextlib.closing(_server("oarlock", where, max(users), "--tensor-parallel-size", str(ranks))) as server:
        _warm(server, where, max(users), prompt)
        for count in users:
            work = checkpoint.prompts(2 * count, prompt, _vocabulary(where), seed=count)
            yield _row(f"{count} users", server.measure(work, count, answer))


def memory(where: Where) -> Iterator[Row]:
    """The largest steps there are, with KV memory as the start has measured it: all requests must be answered."""
    users, prompt, answer = (2, 24, 4) if where.is_tiny else (256, 960, 32)
    with contextlib.closing(_server("oarlock", where, users, measures_memory=True)) as server:
        found = server.measure(checkpoint.prompts(users, prompt, _vocabulary(where), seed=5), users, answer)
        answered = found["output_tokens"] == users * answer
        figures = {"output tokens": float(found["output_tokens"]), "tokens/s": found["output_tokens_per_s"]}
        if where.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            figures |= {"GiB left": free / 2**30, "share used": 1 - free / total}
        yield Row(f"{users} prompts of {prompt} tokens at once", figures, ok=answered)


def ahead(where: Where) -> Iterator[Row]:
    """Throughput of a server with steps scheduled one ahead, and of one without, in turns."""
    users, prompt, answer = _load(where)
    most = max(users)
    with contextlib.ExitStack() as stack:
        servers = []
        for option in ("--async-scheduling", "--no-async-scheduling"):
            servers.append(stack.enter_context(contextlib.closing(_server(option[2:], where, most, option))))
            _warm(servers[-1], where, most, prompt)
        rates: dict[str, list[float]] = {server.name: [] for server in servers}
        for turn in range(ROUNDS):
            for server in servers if turn % 2 == 0 else servers[::-1]:
                work = checkpoint.prompts(2 * most, prompt, _vocabulary(where), seed=1000 + turn)
                found = server.measure(work, most, answer)
                rates[server.name].append(found["output_tokens_per_s"])
                yield _row(f"{server.name}, round {turn + 1}", found)
    one, other = (max(found) for found in rates.values())
    yield Row("one step ahead / not", {"ratio": one / other})


def beside_transformers(where: Where) -> Iterator[Row]:
    """Throughput of many requests at once: ours over HTTP, transformers' continuous batching in its own process."""
    if importlib.util.find_spec("transformers.generation.continuous_batching") is None:
        raise NotHere("this transformers has no continuous batching")
    users, prompt, answer = _load(where)
    most = max(users)
    work = checkpoint.prompts(2 * most, prompt, _vocabulary(where), seed=77)
    with contextlib.closing(_server("oarlock", where, most)) as server:
        _warm(server, where, most, prompt)
        ours = server.measure(work, most, answer)
    yield _row(f"oarlock, {most} users", ours)
    theirs = transformers_rate(checkpoint.ensure("quick" if where.is_tiny else "0.5b"), where, work, answer)
    yield Row(f"transformers, {len(work)} requests", {"tokens/s": theirs})
    yield Row("oarlock / transformers", {"ratio": ours["output_tokens_per_s"] / theirs})


def transformers_rate(model: Path, where: Where, prompts: list[list[int]], answer: int) -> float:
    """Output tokens per second of the second run: in the first one graphs are captured."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    loaded = loaded.to(where.device).eval()
    settings = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    bounds: dict[str, Any] = {}
    if where.is_tiny:  # on a CPU its pages would take most of the memory that the machine has, used or not
        from transformers import ContinuousBatchingConfig

        bounds["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    rates = []
    for _ in range(2):
        started = time.perf_counter()
        found = loaded.generate_batch(prompts, generation_config=settings, **bounds)  # in a thread of its own
        took = time.perf_counter() - started
        counts = [len(output.generated_tokens) for output in found.values()]
        if counts != [answer] * len(prompts):
            raise RuntimeError(
                f"asked for {len(prompts)} x {answer} tokens, got {sum(counts)} in {len(counts)} answers"
            )
        rates.append(sum(counts) / took)
    return rates[-1]


def _warm(server: HttpSystem, where: Where, users: int, prompt: int) -> None:
    server.measure(checkpoint.prompts(users, prompt, _vocabulary(where), seed=9_000_000), users, 4)


def _row(name: str, found: dict[str, Any]) -> Row:
    figures = {"tokens/s": found["output_tokens_per_s"], "TTFT ms": found["ttft_ms"]["p50"]}
    return Row(name, figures | {"TPOT ms": found["tpot_ms"]["p50"], "TPOT p99": found["tpot_ms"]["p99"]})
