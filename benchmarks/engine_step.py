"""What a decode step costs the engine itself, part by part, in alternation with other checkouts.

    python -m benchmarks.engine_step [--sequences N ...] [--rounds N] [--tree OTHER_CHECKOUT ...] [--json FILE]

The ranks are simulated, so what remains is what stands between two steps of real ranks. Every sequence decodes one
token per step, with a context of 500 tokens or more:

    schedule   the decision, `Scheduler.schedule`
    build      its arrays, `InputBatch.build`
    pack       the arrays in a slot of the ring
    update     the answer applied, `Scheduler.update_from_output`
    encode     the events as a frame for the frontend

Figures are processor milliseconds: the median over a round's steps, then over rounds. Before each step a large array is
read, so that no cache holds the engine's state, as after a step of a model whose weights no cache holds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("schedule", "build", "pack", "update", "encode")
BLOCK_SIZE, PROMPT, OUTPUT, VOCAB = 32, 500, 200, 32_000
STEPS = 30
_CACHE_BYTES = 64 << 20


def milliseconds(num_seqs: int, num_steps: int = STEPS) -> dict[str, float]:
    """The parts of one decode step of `num_seqs` sequences, from the packages that this process imports."""
    from engine.config import EngineConfig, WorkerConfig
    from engine.input_batch.input_batch import InputBatch
    from engine.ipc import messages
    from engine.sampling_params import SamplingParams
    from engine.scheduler.output import ModelRunnerOutput
    from engine.scheduler.scheduler import Scheduler
    from engine.types import Request
    from workers.config import WorkerInfo
    from workers.protocol import pack_step, step_bytes

    length = PROMPT + OUTPUT
    num_blocks = num_seqs * -(-length // BLOCK_SIZE) + 1
    worker = WorkerConfig("none", max_num_seqs=num_seqs, max_num_batched_tokens=8192, block_size=BLOCK_SIZE)
    info = WorkerInfo(num_blocks, BLOCK_SIZE, length, VOCAB, 1, "simulated", "none", "none", "None", 0, 0, 0, 0.0)
    scheduler = Scheduler(EngineConfig(worker, max_waiting_requests=num_seqs, max_waiting_tokens=10**9), info)
    batch = InputBatch(max_num_seqs=num_seqs, max_model_len=length, block_size=BLOCK_SIZE, vocab_size=VOCAB)
    for number in range(num_seqs):
        prompt = tuple((number * 7 + index) % VOCAB for index in range(PROMPT))
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=OUTPUT, eos_token_ids=(0,))), 0.0)
    buffer, memory = memoryview(bytearray(1 << 24)), np.zeros(_CACHE_BYTES // 8, np.int64)
    samples: list[list[float]] = []
    now = 0.0
    while len(samples) < num_steps:
        memory.sum()
        now += 0.02
        marks = [time.thread_time()]
        output = scheduler.schedule(now)
        assert output is not None
        marks.append(time.thread_time())
        step = batch.build(output).step
        marks.append(time.thread_time())
        assert step_bytes(step) <= len(buffer)
        pack_step(step, buffer)
        marks.append(time.thread_time())
        rows = len(step.logits_indices)
        events = scheduler.update_from_output(output, ModelRunnerOutput([5] * rows, [True] * rows), now + 0.01)
        marks.append(time.thread_time())
        messages.events(events)
        marks.append(time.thread_time())
        if step.num_tokens == num_seqs == rows:
            samples.append([(later - earlier) * 1e3 for earlier, later in pairwise(marks)])
    return dict(zip(PARTS, (statistics.median(part) for part in zip(*samples, strict=True)), strict=True))


def measure(tree: Path, num_seqs: int) -> dict[str, float]:
    """The same in a process that imports the packages of `tree`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(num_seqs)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    result = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Lines of Markdown: the median of each part over the rounds of each tree, and their sum."""
    lines = ["| checkout | " + " | ".join((*PARTS, "sum")) + " |", "|---|" + "---:|" * (len(PARTS) + 1)]
    for name, rounds in found.items():
        medians = [statistics.median(one[part] for one in rounds) for part in PARTS]
        total = statistics.median(sum(one.values()) for one in rounds)
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in (*medians, total)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to measure in turn")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(milliseconds(arguments.measure)))
        return
    trees = {"this": ROOT, **{tree.name: tree.resolve() for tree in arguments.tree}}
    everything: dict[int, dict[str, list[dict[str, float]]]] = {}
    for num_seqs in arguments.sequences:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(arguments.rounds):
            for name, tree in trees.items():
                found[name].append(measure(tree, num_seqs))
        everything[num_seqs] = found
        print(f"\n{num_seqs} sequences, processor milliseconds of one decode step\n\n{table(found)}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
