"""How long `oarlock serve` takes until it is ready, in alternation with other checkouts.

    python -m benchmarks.start_time --rounds 5 [--compile] [--tree OTHER_CHECKOUT ...] [-- --dtype float32 ...]

Everything after `--` goes to `serve`. The first start of each tree is not counted: it fills the page cache and, where
sources are new, compiles the kernels. With `--compile` every start does, as the first one on a machine. Counted are the
seconds until `/health` answers 200, and the processor seconds of all its processes until then, which say more where
other programs use the same cores.
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

import psutil

from benchmarks.checkpoint import ensure

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 180.0
_POLL_S = 0.02


def start_once(tree: Path, model: Path, options: list[str], cache: str | None = None) -> tuple[float, float]:
    """(seconds until ready, processor seconds until then) of one start. Raises `RuntimeError` if it ends before.

    `cache`: the directory of caches, in place of the user's.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(tree / ".venv/bin/oarlock"), "serve", str(model), "--port", str(port), *options]
    environment = {**os.environ, "XDG_CACHE_HOME": cache} if cache else None
    begun, silent = time.monotonic(), subprocess.DEVNULL
    with subprocess.Popen(command, cwd=tree, env=environment, stdout=silent, stderr=silent) as server:
        try:
            while not is_ready(port):
                if server.poll() is not None or time.monotonic() - begun > _LIMIT_S:
                    raise RuntimeError(f"{' '.join(command)} was not ready after {time.monotonic() - begun:.0f} s")
                time.sleep(_POLL_S)
            seconds = time.monotonic() - begun
            return seconds, processor_seconds(server.pid)
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
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


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
    found: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
    print("| round | checkout | ready, s | processor, s | load of the machine |\n|---|---|---|---|---|")
    for number in range(parsed.rounds + 1):
        for tree in trees:
            with tempfile.TemporaryDirectory() as empty:
                wall, processor = start_once(tree, model, options, empty if parsed.compile else None)
            label = number or "not counted"
            print(f"| {label} | {tree.name} | {wall:.2f} | {processor:.2f} | {os.getloadavg()[0]:.1f} |", flush=True)
            if number:
                found[tree].append((wall, processor))
    for tree, pairs in found.items():
        walls, processors = zip(*pairs, strict=True)
        print(
            f"{tree.name}: ready in {statistics.median(walls):.2f} s ({min(walls):.2f} to {max(walls):.2f}), "
            f"processor {statistics.median(processors):.2f} s ({min(processors):.2f} to {max(processors):.2f})"
        )
    return 0


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is before `--`, and what after it."""
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
