"""transformers' `generate` on a static batch, timed token by token: the figure that the server is compared with.

Runs as a process of its own. Each line on standard input is one job as JSON, {"prompts": [[ids]], "output_tokens": n};
each line on standard output is its result. Alone, it makes its own jobs:

    python -m tests.load.transformers_baseline --batch 1 8 32
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from tests.load.checkpoint import ensure, prompts


class Clock(StoppingCriteria):
    """Stops nothing; notes when each token of the batch was chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)  # ty: ignore[invalid-explicit-return]


class Baseline:
    """One loaded model."""

    def __init__(self, path: Path, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        self.vocab_size: int = self.model.config.vocab_size

    @torch.inference_mode()
    def generate(self, batch: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Greedy, every row exactly `output_tokens` long."""
        ids = torch.tensor(batch)
        clock = Clock()
        started = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=output_tokens,
            max_new_tokens=output_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        duration = time.perf_counter() - started
        assert out.shape[1] == ids.shape[1] + output_tokens
        return {
            "batch": len(batch),
            "duration_s": duration,
            "output_tokens_per_s": len(batch) * output_tokens / duration,
            "ttft_ms": 1e3 * (clock.times[0] - started),
            "tpot_ms": 1e3 * (clock.times[-1] - clock.times[0]) / max(1, output_tokens - 1),
        }


def serve_jobs(baseline: Baseline) -> None:
    """Answer jobs until standard input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(baseline.generate(job["prompts"], job["output_tokens"])), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time transformers' generate on static batches.")
    parser.add_argument("--model", type=Path, help="default: the checkpoint of true shape, made if it is not there")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="the tiny model and short answers")
    parser.add_argument("--jobs", action="store_true", help="read jobs from standard input")
    args = parser.parse_args(argv)
    if args.quick:
        args.batch, args.input_tokens, args.output_tokens = [1, 4], 8, 8
    baseline = Baseline(args.model or ensure(quick=args.quick), args.dtype, args.threads)
    if args.jobs:
        serve_jobs(baseline)
        return 0
    for size in args.batch:
        work = prompts(size, args.input_tokens, baseline.vocab_size, seed=size)
        print(json.dumps(baseline.generate(work, args.output_tokens)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
