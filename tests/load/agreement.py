"""`oarlock bench serve` beside guidellm on one server: whether they report the same.

With a server whose pace is known (`--server paced`) they run in turn. The demo model's server is as fast as its machine
is idle, so there they run at the same time, each with half of the streams, and requests count while both run: both are
served by the same steps. guidellm runs in the environment that the tests of clients make for it.

    python -m tests.load.agreement --server paced --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from oarlock.server.bench.metrics import Sample, latencies_ms
from oarlock.server.bench.serve import ServePlan, measure
from tests.clients import environments
from tests.clients.matrix import CLIENTS
from tests.e2e.running import DEMO, RunningServer
from tests.load.client_ceiling import PacedServer

FIRST_S, EVERY_S = 0.2, 0.02  # the known pace
# Our name -> guidellm's, and the factor from its unit to ours. Its time per output token counts the first one too; its
# inter-token latency of a request is what vLLM calls TPOT.
MEASURES = {
    "request_throughput": ("requests_per_second", 1.0),
    "output_throughput": ("output_tokens_per_second", 1.0),
    "ttft_ms": ("time_to_first_token_ms", 1.0),
    "tpot_ms": ("inter_token_latency_ms", 1.0),
    "e2el_ms": ("request_latency", 1e3),
}


PER_REQUEST = ("ttft_ms", "tpot_ms", "e2el_ms")


@dataclass(frozen=True, slots=True)
class Load:
    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int


def ours(url: str, load: Load, seed: int, ended: list[tuple[float, Sample]] | None = None) -> dict[str, float]:
    """Each measure's mean. `ended`: filled with the requests and the time.time() of their ends."""
    plan = ServePlan(
        url, concurrency=load.concurrency, num_requests=load.requests, input_tokens=load.input_tokens,
        output_tokens=load.output_tokens, prompt_form="text", seed=seed,
    )  # fmt: skip
    result = measure(plan, lambda sample: None if ended is None else ended.append((time.time(), sample)))
    if result.failures:
        raise SystemExit(f"error: requests failed: {result.failures}\nfix: look at the server")
    found = {name: result.summary[name] for name in MEASURES}
    return {name: value["mean"] if isinstance(value, dict) else value for name, value in found.items()}


def guidellm(python: Sequence[str], url: str, model: str, load: Load, seed: int) -> dict[str, Any]:
    """Run guidellm with the same load, and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [*python, str(Path(python[0]).with_name("guidellm")), "run", "--disable-console-interactive"]
        command += ["--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/completions"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={DEMO}"]
        lengths = f"prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"
        command += ["--data", f"kind=synthetic_text,{lengths}"]
        command += ["--profile", f"kind=concurrent,streams={load.concurrency}", "--seed", f"kind=static,value={seed}"]
        command += ["--constraint", f"kind=max_requests,count={load.requests}", "--output", f"kind=json,path={out}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode or not out.is_file():
            raise SystemExit(f"error: guidellm failed\n{(done.stdout + done.stderr)[-2000:]}\nfix: see above")
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["errored"] or totals["successful"] != load.requests:
        raise SystemExit(f"error: guidellm's requests: {totals}\nfix: look at the server")
    return benchmark


def means(benchmark: dict[str, Any]) -> dict[str, float]:
    """Each measure's mean as guidellm has it."""
    return {
        name: factor * benchmark["metrics"][theirs]["successful"]["mean"] for name, (theirs, factor) in MEASURES.items()
    }


def in_turn(
    python: Sequence[str], url: str, model: str, load: Load, number: int
) -> tuple[dict[str, float], dict[str, float]]:
    """One round: ours first in even rounds, theirs in odd ones."""
    if number % 2 == 0:
        first = ours(url, load, number)
        return first, means(guidellm(python, url, model, load, number))
    second = means(guidellm(python, url, model, load, number))
    return ours(url, load, number), second


def together(
    python: Sequence[str], url: str, model: str, load: Load, number: int
) -> tuple[dict[str, float], dict[str, float]]:
    """One round, half of the streams and of the requests each. Ours begins when guidellm's first request is served."""
    half = replace(load, concurrency=max(1, load.concurrency // 2), requests=max(1, load.requests // 2))
    ended: list[tuple[float, Sample]] = []
    with ThreadPoolExecutor(1) as other:
        running = other.submit(guidellm, python, url, model, half, number)
        while not served_now(url) and not running.done():
            time.sleep(0.05)
        ours(url, half, number, ended)
        theirs = [(each, each["info"]["timings"]) for each in running.result()["requests"]["successful"]]
    begin = max(min(at - sample.e2el_s for at, sample in ended), min(times["request_start"] for _, times in theirs))
    end = min(max(at for at, _ in ended), max(times["request_end"] for _, times in theirs))
    mine = [sample for at, sample in ended if begin <= at - sample.e2el_s and at <= end]
    other_half = [each for each, times in theirs if begin <= times["request_start"] and times["request_end"] <= end]
    if not mine or not other_half:
        raise SystemExit("error: the two did not run at the same time\nfix: more --requests")
    first = {name: statistics.fmean(latencies_ms(mine, name.removesuffix("_ms"))) for name in PER_REQUEST}
    second = {}
    for name in PER_REQUEST:
        key, factor = MEASURES[name]
        second[name] = factor * statistics.fmean(each[key] for each in other_half)
    return first, second


def served_now(url: str) -> bool:
    """Whether the demo model's server has a request."""
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return any(line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0 for line in lines)


@contextlib.contextmanager
def running(which: str) -> Generator[tuple[str, str]]:
    """URL and model of the server."""
    if which == "paced":
        with PacedServer(FIRST_S, EVERY_S) as server:
            yield server.url, "paced"
    else:
        with RunningServer(DEMO, "--no-enable-prefix-caching") as server:
            yield server.url, "oarlock-demo"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--server", choices=["demo", "paced"], default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40, help="per round: of each tool in turn, of both together")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    load = Load(args.concurrency, args.requests, args.input_tokens, args.output_tokens)
    client = next(each for each in CLIENTS if each.name == "guidellm")
    python, _ = environments.prepare(client)
    one_round = in_turn if args.server == "paced" else together
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    with running(args.server) as (url, model):
        for number in range(args.rounds):
            rounds.append(one_round(python, url, model, load, number))
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    print(table(rounds, f"guidellm {environments.version(client)}"))
    return 0


def table(rounds: Sequence[tuple[dict[str, float], dict[str, float]]], name: str) -> str:
    """Medians over the rounds, and the ratio of each round's pair: median and range."""
    lines = [f"| mean of a run | oarlock bench | {name} | ratio, median (range) |", "|---|---|---|---|"]
    for measure_name in rounds[0][0]:
        first, second = ([pair[side][measure_name] for pair in rounds] for side in (0, 1))
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        lines.append(
            f"| `{measure_name}` | {statistics.median(first):.2f} | {statistics.median(second):.2f} | "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
