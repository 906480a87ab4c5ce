"""How long `oarlock serve` takes until it is ready, in alternation with other checkouts.

    python -m benchmarks.start_time --rounds 5 [--compile] [--tree OTHER_CHECKOUT ...] [-- --dtype float32 ...]

Everything after `--` goes to `serve`. The first start of each tree is not counted: it fills the page cache and, where
sources are new, compiles the kernels. With `--compile` every start does, as the first one on a machine. Counted are the
seconds until `/health` answers 200, and of all its processes together the processor seconds until then, which say more
where other programs use the same cores, and the memory that they hold then (each shared page once).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.checkpoint import ensure

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 180.0
_POLL_S = 0.02


class Start(NamedTuple):
    """Cost of one start: time, processor time and memory."""

    wall_s: float
    processor_s: float
    memory_mib: float


def start_once(tree: Path, model: Path, options: list[str], cache: str | None = None) -> Start:
    """One start, until the server is ready. Raises `RuntimeError` if it ends before.

    `cache`: the directory of caches, in place of the user's.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = str(tree / ".venv/bin/python")
    command = [python, "-P", "-m", "oarlock", "serve", str(model), "--port", str(port), *options]
    environment = {**os.environ, "PYTHONPATH": str(tree), **({"XDG_CACHE_HOME": cache} if cache else {})}
    begun, silent = time.monotonic(), subprocess.DEVNULL
    with subprocess.Popen(command, cwd=tree, env=environment, stdout=silent, stderr=silent) as server:
        try:
            while not is_ready(port):
                if server.poll() is not None or time.monotonic() - begun > _LIMIT_S:
                    raise RuntimeError(f"{' '.join(command)} was not ready after {time.monotonic() - begun:.0f} s")
                time.sleep(_POLL_S)
            wall_s = time.monotonic() - begun
            return Start(wall_s, processor_seconds(server.pid), memory_mib(server.pid))
        finally:
            server.send_signal(signal.SIGTERM)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:  # not listening yet, or 503 while loading
        return False


def processor_seconds(pid: int) -> float:
    """User and system time of a process and those it started, also those that have ended since."""
    times = [process.cpu_times() for process in family(pid)]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def memory_mib(pid: int) -> float:
    """Resident memory of a process and those it started, with each shared page divided among those that share it."""
    return sum(process.memory_full_info().pss for process in family(pid)) / (1 << 20)


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.start_time", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="begin every start with an empty cache of kernels")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout with a .venv")
    parser.add_argument("--model", type=Path, help="default: random weights of --shape")
    parser.add_argument("--shape", default="0.5b", help="of the random weights made where --model is not given")
    own, options = (arguments, []) if "--" not in arguments else split_at_dashes(arguments)
    parsed = parser.parse_args(own)
    model = parsed.model or ensure(parsed.shape)
    trees = [*parsed.tree, ROOT]
    found: dict[Path, list[Start]] = {tree: [] for tree in trees}
    print(f"| round | checkout | ready, s | processor, s | memory, MiB | load of the machine |\n{'|---' * 6}|")
    for number in range(parsed.rounds + 1):
        for tree in trees:
            with tempfile.TemporaryDirectory() as empty:
                start = start_once(tree, model, options, empty if parsed.compile else None)
            cells = [str(number or "not counted"), tree.name, f"{start.wall_s:.2f}", f"{start.processor_s:.2f}"]
            cells += [f"{start.memory_mib:.0f}", f"{os.getloadavg()[0]:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
            if number:
                found[tree].append(start)
    for tree, starts in found.items():
        walls, processors, memory = zip(*starts, strict=True)
        print(
            f"{tree.name}: ready in {statistics.median(walls):.2f} s ({min(walls):.2f} to {max(walls):.2f}), "
            f"processor {statistics.median(processors):.2f} s ({min(processors):.2f} to {max(processors):.2f}), "
            f"memory {statistics.median(memory):.0f} MiB"
        )
    return 0


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments at `--`: those before it, and those after it."""
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
