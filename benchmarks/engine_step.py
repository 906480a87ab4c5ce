"""Cost of a decode step for the engine itself, part by part, in alternation with other checkouts.

    python -m benchmarks.engine_step [--sequences N ...] [--rounds N] [--longest N] [--tree OTHER_CHECKOUT ...]
                                    [--kv-events] [--logprobs K] [--json FILE]

The ranks are simulated, so what remains is what stands between two steps of real ranks. Every sequence decodes one
token per step, with a context of 500 tokens or more, and of `--longest` tokens in the first of them. Their lengths are
spread, so that each step has its share of new blocks and of full ones:

    schedule   the decision, `Scheduler.schedule`
    build      its arrays, `InputBatch.build`
    pack       the arrays in a slot of the ring
    record     step times and sums over steps, for the live state and for what is told of single requests
    update     the answer applied, `Scheduler.update_from_output`
    encode     the events as a frame for the frontend
    tell       what entered and left the prefix cache, to the thread that publishes it; with `--kv-events` alone, which
               measures each checkout without and with it

    unpack     not in the sum: the part of each rank, from the slot to the arrays
    read       not in the sum: the frontend's part, from the bytes of the frame to an event for each request, and to the
               entries of its logprobs

With `--logprobs`, each sequence wants those of its token and of the K best.

Figures are processor milliseconds: the median over a round's steps, then over rounds. Before each step a large array is
read, so that no cache holds the engine's state, as after a step of a model whose weights no cache holds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("schedule", "build", "pack", "record", "update", "encode", "tell")
BESIDE = ("unpack", "read")  # in other processes
ALL = (*PARTS, *BESIDE)
BLOCK_SIZE, PROMPT, OUTPUT, VOCAB = 32, 500, 200, 32_000
STEPS = 30
_CACHE_BYTES = 64 << 20


@contextmanager
def published(scheduler: Any, address: str | None) -> Generator[Callable[[], None]]:
    """Function that publishes the KV events of `scheduler` at `address`, called in each step. None: it does nothing."""
    if address is None:
        yield lambda: None
        return
    from oarlock.engine.config import KvEventsConfig
    from oarlock.engine.kv_cache.block_events import BlockEventLog
    from oarlock.engine.kv_cache.publisher import KvEventPublisher

    def tell() -> None:
        if events := log.take():
            publisher.publish(events)

    log = scheduler.memory.leader.pool.event_log = BlockEventLog()
    publisher = KvEventPublisher(KvEventsConfig(address))
    publisher.start(BLOCK_SIZE)
    with closing(publisher):
        yield tell


def recorder(scheduler: Any) -> Callable[[Any, float], None]:
    """Function that notes each step before its answer is applied, as the engine does."""
    steps, stats, rank_ns = scheduler.requests.log.steps, scheduler.stats, (10_000_000, 10_000_000)

    def record(output: Any, now: float) -> None:
        steps.observe(now, 0.01, output.num_seqs, output.num_prompt_tokens, stats.generation_tokens, rank_ns)

    return record


def input_batch(made: type, **sizes: int) -> Any:
    """Return an `InputBatch`. Those of other checkouts may need more sizes."""
    sizes |= {"block_size": BLOCK_SIZE, "vocab_size": VOCAB}
    known = inspect.signature(made).parameters
    return made(**{name: size for name, size in sizes.items() if name in known})


def scores(rows: int, num_logprobs: int | None) -> dict[str, Any]:
    """The arrays of logprobs in an answer of `rows` rows."""
    if num_logprobs is None:
        return {}
    ids, numbers = np.full((rows, num_logprobs), 7, np.int32), np.full((rows, num_logprobs), -1.5, np.float32)
    own, ranks = np.full(rows, -0.5, np.float32), np.ones(rows, np.int32)
    return {"logprobs": own, "ranks": ranks, "top_ids": ids, "top_logprobs": numbers}


def milliseconds(
    num_seqs: int, longest: int = PROMPT, kv_events: str | None = None, num_logprobs: int | None = None
) -> dict[str, float]:
    """The parts of one decode step of `num_seqs` sequences, from the packages that this process imports. `kv_events`:
    the address at which events of the prefix cache are published."""
    from oarlock.engine.config import EngineConfig
    from oarlock.engine.input_batch.input_batch import InputBatch
    from oarlock.engine.ipc import messages
    from oarlock.engine.ipc.frames import FrameReader
    from oarlock.engine.scheduler.scheduler import Scheduler
    from oarlock.engine.scheduler.sequence import ModelRunnerOutput
    from oarlock.engine.types import Request, SamplingParams
    from oarlock.workers.config import WorkerConfig, WorkerInfo
    from oarlock.workers.protocol import StepOutput, pack_step, step_bytes, unpack_step

    length = longest + BLOCK_SIZE + OUTPUT
    num_blocks = num_seqs * -(-(PROMPT + BLOCK_SIZE + OUTPUT) // BLOCK_SIZE) + -(-length // BLOCK_SIZE) + 1
    worker = WorkerConfig("none", max_num_seqs=num_seqs, max_num_batched_tokens=8192, block_size=BLOCK_SIZE)
    info = WorkerInfo(num_blocks, BLOCK_SIZE, length, VOCAB, 1, "simulated", "none", "none", "None", 0, 0, 0, 0.0)
    scheduler = Scheduler(EngineConfig(worker, max_waiting_requests=num_seqs, max_waiting_tokens=10**9), info)
    batch = input_batch(InputBatch, max_num_seqs=num_seqs, max_model_len=length)
    for number in range(num_seqs):
        prompt_length = PROMPT + number % BLOCK_SIZE if number else longest
        prompt = tuple((number * 7 + index) % VOCAB for index in range(prompt_length))
        params = SamplingParams(max_tokens=OUTPUT, eos_token_ids=(0,), logprobs=num_logprobs)
        scheduler.add(Request(number, prompt, params), 0.0)
    reader, scored = FrameReader(), num_logprobs is not None
    buffer, memory = memoryview(bytearray(1 << 24)), np.zeros(_CACHE_BYTES // 8, np.int64)
    record = recorder(scheduler)
    samples: list[list[float]] = []
    now = 0.0
    with published(scheduler, kv_events) as tell:
        while len(samples) < STEPS:
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
            rows = len(unpack_step(buffer).logits_indices)
            marks.append(time.thread_time())
            tokens, finite = np.full(rows, 5, np.int32), np.ones(rows, np.uint8)
            answer = StepOutput(step.step_id, tokens, finite, **scores(rows, num_logprobs))
            marks.append(time.thread_time())
            record(output, now)
            marks.append(time.thread_time())
            events = scheduler.update_from_output(output, ModelRunnerOutput(answer), now + 0.01)
            marks.append(time.thread_time())
            frame = messages.encode(messages.Events.of(events))
            marks.append(time.thread_time())
            tell()
            marks.append(time.thread_time())
            for payload in reader.feed(frame):
                message = messages.read_from_engine(payload)
                assert isinstance(message, messages.Events)
                num_events = sum(len([*event.logprobs]) == scored for event in message.read())
            marks.append(time.thread_time())
            assert num_events == rows
            if step.num_tokens == num_seqs == rows:
                times = [(later - earlier) * 1e3 for earlier, later in pairwise(marks)]
                # Behind `pack` comes `unpack`, then the simulated answer, which is none of the parts.
                samples.append([*times[:3], *times[5:-1], times[3], times[-1]])
    return dict(zip(ALL, (statistics.median(part) for part in zip(*samples, strict=True)), strict=True))


def measure(tree: Path, num_seqs: int, longest: int, kv_events: bool, logprobs: int | None) -> dict[str, float]:
    """Measure a decode step, in a process that imports the packages of `tree`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(num_seqs), "--longest", str(longest)]
    command += ["--kv-events"] * kv_events
    command += [] if logprobs is None else ["--logprobs", str(logprobs)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    result = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Table in Markdown: the median of each part over the rounds of each tree, and the sum of the engine's."""
    lines = ["| checkout | " + " | ".join((*PARTS, "sum", *BESIDE)) + " |", "|---|" + "---:|" * (len(ALL) + 1)]
    for name, rounds in found.items():
        medians = {part: statistics.median(one[part] for one in rounds) for part in ALL}
        total = statistics.median(sum(one[part] for part in PARTS) for one in rounds)
        shown = [*(medians[part] for part in PARTS), total, *(medians[part] for part in BESIDE)]
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=PROMPT, help="tokens of the first sequence's prompt")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to measure in turn")
    parser.add_argument("--kv-events", action="store_true", help="measure with published KV events too")
    parser.add_argument("--logprobs", type=int, help="alternatives that each token has")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        with tempfile.TemporaryDirectory() as folder:
            address = f"ipc://{folder}/events" if arguments.kv_events else None
            num_seqs, longest, logprobs = arguments.measure, arguments.longest, arguments.logprobs
            print(json.dumps(milliseconds(num_seqs, longest, kv_events=address, num_logprobs=logprobs)))
        return
    trees = {
        name: (tree, False) for name, tree in [("this", ROOT), *((one.name, one.resolve()) for one in arguments.tree)]
    }
    if arguments.kv_events:
        trees |= {f"{name}, KV events": (tree, True) for name, (tree, _) in trees.items()}
    everything: dict[int, dict[str, list[dict[str, float]]]] = {}
    for num_seqs in arguments.sequences:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(arguments.rounds):
            for name, (tree, kv_events) in trees.items():
                found[name].append(measure(tree, num_seqs, arguments.longest, kv_events, arguments.logprobs))
        everything[num_seqs] = found
        print(f"\n{num_seqs} sequences, processor milliseconds of one decode step\n\n{table(found)}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
