"""Cost of LoRA adapters: of decode steps, and of loading adapters while others are served.

    python -m benchmarks.lora [--shape 0.5b | small-mixture] [--threads N] [--rounds 9] [--steps 8]
                              [--sequences 1 32] [--skip steps loading] [--json FILE]

Steps: a rank without adapters (`base`) and a rank with slots for eight adapters of rank 64 take turns in each round.
A turn is a number of decode steps in a row, of 1 or 32 sequences. Each has an adapter, or none has (`LoRA off`).
Figures are milliseconds of a step, medians over rounds; the ratio to `base` is computed in each round, and shown with
its range. With `--threads 1`, times are processor time of the rank, so that a busy machine matters less. Adapters of a
mixture, such as `small-mixture`, update all its experts.

Loading: a server has eight clients that decode without a pause. In each round they do so first without a load
(`idle`), then while adapters of rank 64 are loaded, used once, and unloaded, one after the other, over HTTP
(`/v1/load_lora_adapter`). `p50` and `p99` are of the time between two tokens of the eight clients, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks import load, machine
from benchmarks.adapters import AdapterFiles, target_modules, write_adapters
from benchmarks.checkpoint import ALL, ensure, prompts, title
from benchmarks.systems.system import SERVED_NAME, HttpSystem, clean_environment
from benchmarks.tables import cell, spread, table
from oarlock.engine.config import EngineConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.types import Request, SamplingParams, TokenEvent
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor, start_executor
from oarlock.workers.platform.processor import features

SLOTS, RANKS = 8, (16, 64)
PROMPT = 16  # tokens; all have to be computed before a turn begins
CLIENTS, OUTPUT = 8, 96  # of the server that adapters are loaded into, and tokens of each of its requests
ADMIN_KEY = "benchmark"
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Case:
    """Decode steps of `rows` sequences, whose adapters are `adapters` by turns. `base`: by the rank without slots."""

    name: str
    rows: int
    adapters: tuple[str, ...] = ()
    base: bool = False


def cases(adapters: Sequence[AdapterFiles], sequences: Sequence[int]) -> list[Case]:
    """Return the cases in the order of their turns: for each number of rows the base first."""
    names = {rank: tuple(one.name for one in adapters if one.name.startswith(f"r{rank}-")) for rank in RANKS}
    found = []
    for rows in sequences:
        count = min(rows, SLOTS)
        found += [Case("base", rows, base=True), Case("LoRA off", rows)]
        for rank in RANKS:
            what = "one adapter" if count == 1 else f"{count} adapters"
            found.append(Case(f"{what} of rank {rank}", rows, names[rank][:count]))
    return found


class Engine:
    """An engine without a process of its own, that decodes a number of sequences a number of times."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._core = EngineCore(EngineConfig(executor.config, enable_prefix_caching=False), executor, time.monotonic)
        self._next_id = 0

    def load(self, adapters: Sequence[AdapterFiles]) -> None:
        """Load all adapters into the host memory of the rank."""
        queue = self._core.scheduler.adapters
        assert queue is not None
        for one in adapters:
            queue.add(one.name, one.digest, str(one.directory), time.monotonic())
        missing = {one.name for one in adapters}
        while missing:
            self._step()
            for name, failure in queue.registry.take_outcomes():
                assert failure is None, f"{name}: {failure}"
                missing.discard(name)

    def turn(self, case: Case, steps: int, seed: int) -> float:
        """Return the milliseconds of a decode step: the median, or the mean in processor time."""
        ids = range(self._next_id, self._next_id + case.rows)
        self._next_id += case.rows
        for number, prompt in zip(ids, prompts(case.rows, PROMPT, 1000, seed), strict=True):
            name = case.adapters[number % len(case.adapters)] if case.adapters else None
            params = SamplingParams(max_tokens=1 << 20, temperature=0.0)
            self._core.scheduler.add(Request(number, tuple(prompt), params, adapter=name), time.monotonic())
        waiting = set(ids)
        while waiting:
            waiting -= {event.request_id for event in self._step() if event.token_ids}
        self._step()
        begun, took = self._processor_ns(), []
        for _ in range(steps):
            events = self._step()
            assert len(events) == case.rows, f"{len(events)} sequences of {case.rows} decode in {case.name}"
            took.append(self._executor.step_times_ns[0])
        ended = self._processor_ns()
        for number in ids:
            self._core.scheduler.abort(number, time.monotonic())
        return (statistics.median(took) if begun is None or ended is None else (ended - begun) / steps) / 1e6

    def _step(self) -> list[TokenEvent]:
        if self._core.begin() is None and not self._core.num_in_flight:
            time.sleep(0.001)  # adapters are being loaded
            return []
        return list(self._core.finish())

    def _processor_ns(self) -> int | None:
        """Return the processor time of the rank; None if it has several threads."""
        if self._executor.config.num_threads != 1:
            return None
        tasks = Path(f"/proc/{self._executor.rank_pids[0]}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks)


def measure_steps(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the cases, with their milliseconds of a step in each round."""
    adapters = [one for rank in RANKS for one in write_adapters(model, folder, rank, SLOTS)]
    all_cases, batch = cases(adapters, args.sequences), max(args.sequences)
    most = PROMPT + args.steps + 8
    plain = WorkerConfig(
        str(model), dtype=args.dtype, max_model_len=1 << 10, max_num_seqs=batch, max_num_batched_tokens=batch * PROMPT,
        num_kv_blocks=batch * (most // 32 + 2), num_threads=args.threads, log_level="WARNING",
    )  # fmt: skip
    adapted = replace(
        plain, max_loras=SLOTS, max_lora_rank=max(RANKS), max_cpu_loras=len(adapters),
        lora_target_modules=target_modules(args.shape),
    )  # fmt: skip
    times: list[list[float]] = [[] for _ in all_cases]
    with (
        closing(start_executor(plain, lambda *_: None)) as one,
        closing(start_executor(adapted, lambda *_: None)) as two,
    ):
        base, lora = Engine(one), Engine(two)
        lora.load(adapters)
        for number in range(args.rounds + 1):
            for case, own in zip(all_cases, times, strict=True):
                ms = (base if case.base else lora).turn(case, args.steps, number)
                if number:  # the first round compiles, fills slots and allocates
                    own.append(ms)
    return {"cases": [asdict(case) | {"ms": own} for case, own in zip(all_cases, times, strict=True)]}


def steps_table(result: dict[str, Any]) -> str:
    rows, base = [], []
    for case in result["cases"]:
        base = case["ms"] if case["base"] else base
        ratio = spread(mine / theirs for mine, theirs in zip(case["ms"], base, strict=True))
        rows.append([str(case["rows"]), case["name"], cell(spread(case["ms"])), "" if case["base"] else cell(ratio)])
    return table(["sequences", "step", "ms", "of base"], rows)


class Loads:
    """Loads of adapters into a server, one after the other, from a thread; each is used once and unloaded again."""

    def __init__(self, url: str, adapters: Sequence[AdapterFiles]) -> None:
        self._adapters = adapters
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False)
        self._has_to_end = threading.Event()
        self._failure: BaseException | None = None
        self.seconds: list[float] = []  # of each load
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Loads:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_to_end.set()
        self._thread.join()
        self._client.close()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._has_to_end.is_set():
                self._load(self._adapters[len(self.seconds) % len(self._adapters)])
        except BaseException as failure:
            self._failure = failure

    def _load(self, one: AdapterFiles) -> None:
        begun = time.perf_counter()
        self._post("load_lora_adapter", {"lora_name": one.name, "lora_path": str(one.directory)})
        self.seconds.append(time.perf_counter() - begun)
        self._post("completions", {"model": one.name, "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0})
        self._post("unload_lora_adapter", {"lora_name": one.name})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        response = self._client.post(f"/v1/{path}", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"/v1/{path}: {response.status_code} {response.text}")


def measure_loading(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the times between tokens of each round, without and with loads."""
    adapters = write_adapters(model, folder, max(RANKS), 3, first=SLOTS)
    command = [
        sys.executable, "-P", "-m", "oarlock", "serve", str(model), "--port", "{port}", "--served-model-name",
        SERVED_NAME, "--no-enable-prefix-caching", "--dtype", args.dtype, "--enable-lora", "--max-loras", "2",
        "--max-lora-rank", str(max(RANKS)), "--lora-target-modules", *target_modules(args.shape), "--lora-dir",
        str(folder), "--admin-api-key", ADMIN_KEY, *(["--num-threads", str(args.threads)] if args.threads else []),
    ]  # fmt: skip
    env = clean_environment(os.cpu_count() or 1, PYTHONPATH=str(ROOT))
    del env["OMP_NUM_THREADS"]
    rounds = []
    with closing(HttpSystem("oarlock", "Oarlock", {}, command, env, ROOT)) as server:
        for number in range(args.rounds):
            work = prompts(2 * CLIENTS, PROMPT, 1000, number)
            idle = load.run(server.url, SERVED_NAME, work, CLIENTS, OUTPUT)
            with Loads(server.url, adapters) as loads:
                loading = load.run(server.url, SERVED_NAME, work, CLIENTS, OUTPUT)
            found = {"idle": asdict(idle), "loading": asdict(loading), "load_s": loads.seconds}
            rounds.append(found)
    return {"clients": CLIENTS, "rounds": rounds}


def loading_table(result: dict[str, Any]) -> str:
    rows = []
    for name in ("idle", "loading"):
        gaps = [one[name]["itl_ms"] for one in result["rounds"]]
        rows.append([name, *(cell(spread(gap[of] for gap in gaps)) for of in ("p50", "p99"))])
    ratio = spread(one["loading"]["itl_ms"]["p99"] / one["idle"]["itl_ms"]["p99"] for one in result["rounds"])
    rows.append(["ratio", "", cell(ratio)])
    seconds = [taken for one in result["rounds"] for taken in one["load_s"]]
    about = f"{len(seconds)} loads of an adapter of rank {max(RANKS)}, each in {cell(spread(seconds))} s."
    return table([f"between two tokens of {CLIENTS} clients", "p50, ms", "p99, ms"], rows) + f"\n\n{about}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=ALL, default="0.5b")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, help="of each rank (default: as a server)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32], help="sequences of a step")
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a turn")
    parser.add_argument("--skip", nargs="+", choices=["steps", "loading"], default=[])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args()
    model = ensure(args.shape)
    result: dict[str, Any] = {
        "machine": machine.about(features()),
        "measured": time.strftime("%Y-%m-%d"),
        "model": {"shape": args.shape, "dtype": args.dtype},
        "threads": args.threads,
        "clock": "processor" if args.threads == 1 else "wall",
    }
    with tempfile.TemporaryDirectory(prefix="oarlock-lora-") as name:
        folder = Path(name).resolve()
        if "steps" not in args.skip:
            result["steps"] = measure_steps(model, folder, args)
            print(
                f"{title(args.shape)}'s shape, {args.dtype}, {result['clock']} time.\n\n{steps_table(result['steps'])}"
            )
        if "loading" not in args.skip:
            result["loading"] = measure_loading(model, folder, args)
            print(f"\n{loading_table(result['loading'])}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
