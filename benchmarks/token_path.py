"""Way of one decoded token: which Python files of ours it passes in each process, and with how many calls.

    python -m benchmarks.token_path [--tree OTHER_CHECKOUT ...] [--tokens N] [--functions] [--model DIRECTORY]
                                   [--option=OPTION_OF_SERVE ...] [--json FILE]

Serves a model with one rank, and streams greedy completions over HTTP, one after the other: a short one, and one with
`--tokens` tokens more. The main thread of the frontend, of the engine and of the rank, which is the one that tokens
pass through, is profiled meanwhile (`benchmarks/token_profiler`). What the longer answer takes beyond the shorter one,
divided by its further tokens, is the way of a token; the begin and the end of a request cancel out.

    files      files of ours with a function that is called for at least half of the tokens
    calls      calls of functions in these packages for each token. A generator or coroutine that is resumed counts as
               called, and so do comprehensions before Python 3.12: as in cProfile
    others     calls of Python functions of the standard library and of other packages, and of generated ones such as
               the constructors of dataclasses

Functions written in C are not counted. The rank has one thread, so that on two cores the engine works one step ahead of
it, as it does on a larger machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.systems.system import SERVED_NAME, HttpSystem, clean_environment

ROOT = Path(__file__).resolve().parents[1]
PROFILER = Path(__file__).resolve().parent / "token_profiler"
PROCESSES = ("frontend", "engine", "rank")
PACKAGES = ("server", "engine", "workers", "base", "oarlock")
TOKENS = 200
_FIRST_TOKENS = 32
_PROMPT = list(range(100, 108))
_WRITES_WITHIN_S = 60.0
_SHOWN = 0.02  # calls per token: fewer are those of timers

Counts = Counter[tuple[str, int, str]]  # calls by file, line and name of a function


class Way(NamedTuple):
    """Way of a token through one process."""

    functions: dict[str, float]  # ours, as "file:line name": calls per token
    others: dict[str, float]  # those of other packages

    @property
    def files(self) -> set[str]:
        return {name.partition(":")[0] for name, calls in self.functions.items() if calls >= 0.5}

    @property
    def calls(self) -> float:
        return sum(self.functions.values())


def ask(url: str, num_tokens: int) -> None:
    """Stream a greedy completion of `num_tokens` to its end."""
    body = {
        "model": SERVED_NAME,
        "prompt": _PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        *_, usage, _ = [line for line in response.iter_lines() if line]
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == num_tokens


def take_counts(folder: Path, number: int) -> dict[str, Counts]:
    """Let all processes write their counts for the time that is numbered `number`; return them."""
    for process in PROCESSES:
        os.kill(int((folder / f"{process}.pid").read_text()), signal.SIGUSR2)
    deadline, found = time.monotonic() + _WRITES_WITHIN_S, {}
    for process in PROCESSES:
        file = folder / f"{process}.{number}.json"
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the process of the {process} has not written its counts")
            time.sleep(0.01)
        counts = Counts()  # generated functions share file, line and name
        for name, line, function, calls in json.loads(file.read_text()):
            counts[name, line, function] += calls
        found[process] = counts
    return found


def way_of(short: Counts, long: Counts, num_tokens: int, tree: Path) -> Way:
    """Way of each of the `num_tokens` tokens by which the `long` answer is longer."""
    ours: dict[str, float] = {}
    others: dict[str, float] = {}
    for key in long.keys() | short.keys():
        calls = (long[key] - short[key]) / num_tokens
        file, line, function = key
        path = Path(os.path.realpath(file))
        inside = path.relative_to(tree) if path.is_relative_to(tree) else None
        is_ours = inside is not None and inside.parts[0] in PACKAGES
        (ours if is_ours else others)[f"{inside if is_ours else file}:{line} {function}"] = calls
    return Way(ours, others)


def measure(tree: Path, model: Path, num_tokens: int, options: Sequence[str]) -> dict[str, Way]:
    """Measure the processes of a server of the checkout `tree`, run by its `.venv` if it has one."""
    own = tree / ".venv" / "bin" / "python"
    command = [str(own) if own.exists() else sys.executable, "-P", "-m", "oarlock", "serve", str(model)]
    command += ["--port", "{port}", "--served-model-name", SERVED_NAME, "--device", "cpu", "--num-threads", "1"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = clean_environment(1, PYTHONPATH=f"{PROFILER}{os.pathsep}{tree}", TOKEN_PROFILER_FOLDER=name)
        with closing(HttpSystem("oarlock", "Oarlock", {}, [*command, *options], env, tree)) as server:
            take_counts(folder, 0)  # begins to count
            ask(server.url, _FIRST_TOKENS)
            take_counts(folder, 1)
            ask(server.url, _FIRST_TOKENS)
            short = take_counts(folder, 2)
            ask(server.url, _FIRST_TOKENS + num_tokens)
            long = take_counts(folder, 3)
    return {process: way_of(short[process], long[process], num_tokens, tree) for process in PROCESSES}


def table(found: dict[str, dict[str, Way]]) -> str:
    """Table in Markdown: a row for each checkout and process."""
    lines = ["| checkout | process | files | calls | others |", "|---|---|---:|---:|---:|"]
    for name, ways in found.items():
        for process, way in ways.items():
            others = sum(way.others.values())
            lines.append(f"| {name} | {process} | {len(way.files)} | {way.calls:.0f} | {others:.0f} |")
        files = set[str]().union(*(way.files for way in ways.values()))
        calls = sum(way.calls for way in ways.values())
        others = sum(sum(way.others.values()) for way in ways.values())
        lines.append(f"| {name} | all three | {len(files)} | {calls:.0f} | {others:.0f} |")
    return "\n".join(lines)


def functions(found: dict[str, dict[str, Way]]) -> str:
    """Calls per token of each function, most first."""
    lines: list[str] = []
    for name, ways in found.items():
        for process, way in ways.items():
            for title, calls in (("ours", way.functions), ("others", way.others)):
                lines.append(f"\n{name}, {process}, {title}\n")
                most_first = sorted(calls.items(), key=lambda item: (-item[1], item[0]))
                lines += [f"{count:8.2f}  {function}" for function, count in most_first if count >= _SHOWN]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to measure")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--functions", action="store_true", help="print each function's calls per token")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "oarlock-demo")
    parser.add_argument("--option", action="append", default=[], help="of serve, such as --option=--dtype=bfloat16")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    model = arguments.model.resolve()
    trees = {"this": ROOT, **{tree.name: tree.resolve() for tree in arguments.tree}}
    found = {name: measure(tree, model, arguments.tokens, arguments.option) for name, tree in trees.items()}
    print(table(found))
    if arguments.functions:
        print(functions(found))
    if arguments.json is not None:
        everything = {name: {process: way._asdict() for process, way in ways.items()} for name, ways in found.items()}
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
