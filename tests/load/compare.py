"""Our server beside transformers' `generate`, in alternation on the same machine, and what surrounds the steps.

Three questions, one table each. Only ratios from one run count: the machine may be shared.

    1. output tokens per second and time per token against `generate` of the same batch size
    2. how much of the wall time at the highest concurrency lies outside the engine's steps
    3. tensor parallelism 2 with one thread per rank against 1 with two threads

    python -m tests.load.compare --rounds 3 --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.e2e.running import ROOT, RunningServer
from tests.load import load_test
from tests.load.checkpoint import QUICK_SHAPE, TRUE_SHAPE, ensure, prompts

# The engine's own account: seconds from deciding each step to having its tokens, and the number of steps.
STEP_SECONDS = "oarlock:step_seconds_sum"
STEPS = "oarlock:step_seconds_count"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one comparison runs."""

    quick: bool
    rounds: int
    concurrency: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    dtype: str
    threads: int

    @property
    def vocab_size(self) -> int:
        return (QUICK_SHAPE if self.quick else TRUE_SHAPE)["vocab_size"]

    def work(self, concurrency: int, turn: int) -> list[list[int]]:
        """The prompts of one round: both sides get the same, no two rounds do, so no cache helps."""
        return prompts(concurrency, self.input_tokens, self.vocab_size, seed=1000 * turn + concurrency)

    def server(self, model: Path, ranks: int = 1) -> RunningServer:
        """Ours, with as many threads in all as the other side has."""
        threads = max(1, self.threads // ranks)
        flags = ["--served-model-name", "load", "--dtype", self.dtype, "--tensor-parallel-size", ranks]
        flags += ["--num-threads", threads, "--max-model-len", 1024, "--max-num-seqs", max(self.concurrency)]
        return RunningServer(model, *flags, "--device", "cpu", "--no-enable-prefix-caching")


class BaselineProcess:
    """transformers in a process of its own, one job at a time. Idle, it uses no core."""

    def __init__(self, model: Path, plan: Plan) -> None:
        command = [sys.executable, "-m", "tests.load.transformers_baseline", "--jobs", "--model", str(model)]
        command += ["--dtype", plan.dtype, "--threads", str(plan.threads)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the baseline ended with {self._process.wait()}")
        return json.loads(line)

    def generate(self, batch: list[list[int]], output_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": batch, "output_tokens": output_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def shown(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['low']:.2f} to {values['high']:.2f})"


def against_transformers(plan: Plan, server: RunningServer, baseline: BaselineProcess) -> list[dict[str, Any]]:
    """Question 1: alternate the two at each concurrency."""
    rows = []
    for concurrency in plan.concurrency:
        warm = plan.work(concurrency, turn=0)
        load_test.run(server.url, "load", warm, concurrency, plan.output_tokens)
        baseline.generate(warm, min(4, plan.output_tokens))
        turns = []
        for turn in range(1, plan.rounds + 1):
            work = plan.work(concurrency, turn)
            ours = load_test.run(server.url, "load", work, concurrency, plan.output_tokens)
            theirs = baseline.generate(work, plan.output_tokens)
            progress(
                f"c={concurrency} round {turn}: ours {ours.output_tokens_per_s:.1f} tok/s "
                f"(TPOT {ours.tpot_ms['p50']:.1f} ms), generate {theirs['output_tokens_per_s']:.1f} tok/s "
                f"({theirs['tpot_ms']:.1f} ms)"
            )
            turns.append({"ours": asdict(ours), "transformers": theirs})
        rows.append(
            {
                "concurrency": concurrency,
                "throughput_ratio": spread(
                    [t["ours"]["output_tokens_per_s"] / t["transformers"]["output_tokens_per_s"] for t in turns]
                ),
                "decode_ratio": spread([t["transformers"]["tpot_ms"] / t["ours"]["tpot_ms"]["p50"] for t in turns]),
                "rounds": turns,
            }
        )
    return rows


def time_outside_steps(plan: Plan, server: RunningServer) -> dict[str, Any]:
    """Question 2: over a busy stretch, the wall time outside steps, as a share of the time inside them."""
    concurrency = max(plan.concurrency)
    shares = []
    for turn in range(1, plan.rounds + 1):
        work = plan.work(concurrency, turn=100 + turn)
        before = server.metrics()
        report = load_test.run(server.url, "load", work, concurrency, plan.output_tokens)
        after = server.metrics()
        in_steps = after[STEP_SECONDS] - before[STEP_SECONDS]
        steps = after[STEPS] - before[STEPS]
        shares.append(report.duration_s / in_steps - 1)
        progress(
            f"share: {steps:.0f} steps of {1e3 * in_steps / steps:.2f} ms, "
            f"{1e3 * report.duration_s / steps:.2f} ms of wall time each, {shares[-1]:+.1%}"
        )
    return {"concurrency": concurrency, "added_to_step": spread(shares)}


def across_ranks(plan: Plan, model: Path) -> list[dict[str, Any]]:
    """Question 3: both servers are up, and asked in turn."""
    rows = []
    with plan.server(model, ranks=1) as one, plan.server(model, ranks=2) as two:
        for concurrency in plan.concurrency:
            ratios = []
            for turn in range(plan.rounds + 1):
                work = plan.work(concurrency, turn=200 + turn)
                single, pair = (
                    load_test.run(server.url, "load", work, concurrency, plan.output_tokens) for server in (one, two)
                )
                if turn:  # the first is the warm-up
                    ratios.append(pair.output_tokens_per_s / single.output_tokens_per_s)
                    progress(
                        f"c={concurrency}: TP 1 {single.output_tokens_per_s:.1f}, TP 2 {pair.output_tokens_per_s:.1f}"
                    )
            rows.append({"concurrency": concurrency, "throughput_ratio": spread(ratios)})
    return rows


def report(result: dict[str, Any]) -> str:
    """The three tables."""
    lines = []
    if "against_transformers" in result:
        lines.append("ours / transformers generate, median (range)")
        lines.append(f"{'c':>4}  {'out tok/s':>24}  {'decode (1 / TPOT)':>24}  ours tok/s, TPOT p50")
        for row in result["against_transformers"]:
            speeds = [turn["ours"]["output_tokens_per_s"] for turn in row["rounds"]]
            tpots = [turn["ours"]["tpot_ms"]["p50"] for turn in row["rounds"]]
            lines.append(
                f"{row['concurrency']:>4}  {shown(row['throughput_ratio']):>24}  {shown(row['decode_ratio']):>24}  "
                f"{statistics.median(speeds):.1f}, {statistics.median(tpots):.1f} ms"
            )
    if "time_outside_steps" in result:
        share = result["time_outside_steps"]
        lines.append(f"wall time added to the steps at c={share['concurrency']}: {shown(share['added_to_step'])}")
    if "across_ranks" in result:
        lines.append("TP 2 (half the threads each) / TP 1, out tok/s")
        for row in result["across_ranks"]:
            lines.append(f"{row['concurrency']:>4}  {shown(row['throughput_ratio']):>24}")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the server with transformers' generate in one run.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of each side, in all")
    parser.add_argument("--only", choices=["transformers", "share", "ranks"], nargs="+", help="some of the questions")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.concurrency, args.input_tokens, args.output_tokens = 1, [1, 4], 8, 8
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    wanted = args.only or ["transformers", "share", "ranks"]
    plan = Plan(
        args.quick,
        args.rounds,
        tuple(args.concurrency),
        args.input_tokens,
        args.output_tokens,
        args.dtype,
        args.threads,
    )
    model = ensure(quick=plan.quick)
    result: dict[str, Any] = {"plan": asdict(plan)}
    if "transformers" in wanted or "share" in wanted:
        with plan.server(model) as server:
            if "transformers" in wanted:
                baseline = BaselineProcess(model, plan)
                result["against_transformers"] = against_transformers(plan, server, baseline)
                baseline.close()
            if "share" in wanted:
                result["time_outside_steps"] = time_outside_steps(plan, server)
    if "ranks" in wanted:
        result["across_ranks"] = across_ranks(plan, model)
    print(report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
