"""OpenVINO GenAI's continuous batching, driven through its offline interface; runs in the peer's own environment.

Imports nothing of the repository. See `benchmarks/systems/system.py` for the jobs it reads.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai


def run(pipeline: Any, numbers: Any, job: dict[str, Any]) -> dict[str, Any]:
    """A closed loop: `concurrency` requests at a time, the next one added as soon as one has all its tokens."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = job["output_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    waiting = list(job["prompts"])
    running: list[tuple[Any, dict[str, Any]]] = []
    done: list[dict[str, Any]] = []
    started = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < job["concurrency"]:
            ids = ov.Tensor(np.array([waiting.pop(0)], dtype=np.int64))
            request = {"sent": time.perf_counter(), "times": []}
            running.append((pipeline.add_request(next(numbers), ids, config), request))
        pipeline.step()
        now = time.perf_counter()
        for handle, request in running:
            while handle.can_read():
                for output in handle.read().values():
                    request["times"] += [now] * len(output.generated_ids)
        done += [request for _, request in running if len(request["times"]) >= job["output_tokens"]]
        running = [pair for pair in running if len(pair[1]["times"]) < job["output_tokens"]]
    duration = time.perf_counter() - started
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return {"duration_s": duration, "requests": done}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-concurrency", type=int, required=True)
    parser.add_argument("--cache-gigabytes", type=int, default=2)
    args = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = args.cache_gigabytes
    scheduler.max_num_seqs = args.max_concurrency
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        args.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": args.threads}
    )
    print(json.dumps({"version": openvino_genai.__version__}), flush=True)
    numbers = iter(range(1 << 60))
    for line in sys.stdin:
        print(json.dumps(run(pipeline, numbers, json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
