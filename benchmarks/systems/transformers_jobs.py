"""transformers' `generate` on static batches, timed token by token.

See `benchmarks/systems/system.py` for the jobs it reads: `concurrency` prompts at a time make one batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Stopping criterion that never stops: it notes when each token of the batch was chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)  # ty: ignore[invalid-explicit-return]


@torch.inference_mode()
def generate(model: Any, batch: list[list[int]], output_tokens: int) -> list[dict[str, Any]]:
    """Greedy, every row exactly `output_tokens` long; one entry per row, which all have the batch's times."""
    ids = torch.tensor(batch)
    clock = Clock()
    sent = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=output_tokens,
        max_new_tokens=output_tokens,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    if out.shape[1] != ids.shape[1] + output_tokens:
        raise RuntimeError(f"asked for {output_tokens} tokens, got {out.shape[1] - ids.shape[1]}")
    return [{"sent": sent, "times": clock.times} for _ in batch]


def run(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """All prompts of a job, batch after batch of the same size."""
    prompts, size = job["prompts"], job["concurrency"]
    started = time.perf_counter()
    requests = []
    for begin in range(0, len(prompts), size):
        requests += generate(model, prompts[begin : begin + size], job["output_tokens"])
    return {"duration_s": time.perf_counter() - started, "requests": requests}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Answers jobs from standard input with transformers' generate.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    print(json.dumps({"version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
