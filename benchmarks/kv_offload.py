"""Time to the first token of a long prompt: computed, and with its beginning loaded from the disk or from host memory.

    python -m benchmarks.kv_offload [--shape 0.5b] [--tokens 8192] [--rounds 3] [--ranks 1] [--path DIR]

The pool holds one prompt. Each round computes a new prompt, pushes it out with another one, and asks for it again: once
with what host memory has, and once from files, which are read past the page cache. All ways take turns in each round,
so that a noisy machine is noisy for all; ratios are medians over rounds, in brackets the lowest and highest. The texts
must be equal.
"""

import argparse
import os
import select
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.checkpoint import SHAPES, ensure
from oarlock.engine.config import EngineConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor, start_executor
from oarlock.workers.kv_tiers.directory import SUFFIX

BLOCK = 32
NUM_GENERATED = 4


class Asked:
    """An engine without a process that answers one request at a time."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        config = EngineConfig(executor.config)
        self._core = EngineCore(config, executor, time.monotonic)
        self.scheduler = self._core.scheduler
        self._request_id = 0

    def ask(self, prompt: tuple[int, ...]) -> tuple[float, list[int], int]:
        """Seconds to the first token, all tokens, and how many of the prompt were not computed."""
        self._request_id += 1
        begun, first_s, tokens, cached = time.perf_counter(), 0.0, [], 0
        self.scheduler.add(
            Request(self._request_id, prompt, SamplingParams(max_tokens=NUM_GENERATED)), time.monotonic()
        )
        while self.scheduler.has_work:
            for event in self._turn():
                if event.token_ids and not tokens:
                    first_s = time.perf_counter() - begun
                tokens += event.token_ids
                cached = max(cached, event.num_cached_tokens)
        return first_s, tokens, cached

    def settle(self) -> None:
        """Wait until all saved blocks are in files, two minutes at most."""
        stats = self.scheduler.stats
        deadline = time.monotonic() + 120
        while stats.kv_offload_written_blocks < stats.kv_offload_saved_blocks and time.monotonic() < deadline:
            self._turn()
            time.sleep(0.01)

    def _turn(self) -> list:
        self._core.receive_reports()
        output = self._core.begin()
        if output is None and not self._core.num_in_flight:
            assert self._executor.kv_reports is not None
            select.select([self._executor.kv_reports], [], [], 0.01)
            return []
        return list(self._core.finish())


def prompt_of(number: int, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple((number * 7919 + place * 104_729 + place * place) % (vocab_size - 10) + 5 for place in range(length))


def drop_page_cache(directory: Path) -> None:
    for path in directory.rglob(f"*{SUFFIX}"):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure(executor: Executor, directory: Path, tokens: int, rounds: int) -> None:
    asked = Asked(executor)
    vocab_size = executor.info.vocab_size
    times: dict[str, list[float]] = {"computed": [], "host memory": [], "disk": []}
    asked.ask(prompt_of(0, tokens, vocab_size))
    for number in range(1, rounds + 1):
        prompt = prompt_of(2 * number, tokens, vocab_size)
        computed_s, text, _ = asked.ask(prompt)
        asked.ask(prompt_of(2 * number + 1, tokens, vocab_size))
        asked.settle()
        memory_s, again, in_memory = asked.ask(prompt)
        asked.scheduler.memory.reset_prefix_cache()
        drop_page_cache(directory)
        disk_s, from_disk, on_disk = asked.ask(prompt)
        assert text == again == from_disk, "the texts differ"
        for name, seconds in zip(times, (computed_s, memory_s, disk_s), strict=True):
            times[name].append(seconds)
        shares = (
            f"{memory_s / computed_s:.1%} from memory ({in_memory}), {disk_s / computed_s:.1%} from disk ({on_disk})"
        )
        print(f"round {number}: computed {computed_s:.2f} s, {shares}", flush=True)
    print("\n| first token | seconds | of computing |\n|---|---|---|")
    for name, seconds in times.items():
        ratios = sorted(some / computed for some, computed in zip(seconds, times["computed"], strict=True))
        print(f"| {name} | {median(seconds):.3f} | {median(ratios):.1%} ({ratios[0]:.1%} to {ratios[-1]:.1%}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--path", help="directory on the disk that is measured (default: a new temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.path) as name:
        files = Path(name) / "kv"
        config = WorkerConfig(
            str(ensure(args.shape)),
            dtype=args.dtype,
            tensor_parallel_size=args.ranks,
            max_model_len=args.tokens + 2 * BLOCK,
            max_num_seqs=2,
            block_size=BLOCK,
            num_kv_blocks=args.tokens // BLOCK + 4,
            kv_offload_bytes=1 << 30,
            kv_offload_path=str(files),
        )
        executor = start_executor(config, lambda *_: None)
        try:
            info = executor.info.kv_offload
            assert info is not None and info.read_bytes_per_s is not None
            print(f"{args.shape}, {args.tokens} tokens, {args.ranks} rank(s), {executor.info.dtype}; a block has")
            print(f"{info.bytes_per_block} bytes; the disk was measured at {info.read_bytes_per_s / 1e6:.0f} MB/s\n")
            measure(executor, files, args.tokens, args.rounds)
        finally:
            executor.close()


if __name__ == "__main__":
    main()
