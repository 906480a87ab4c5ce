"""Arguments and report of the client scripts: one line for everything they have exercised.

Runs inside the clients' environments, so it imports the standard library alone. A failed exercise is printed with its
traceback and the script continues; its exit status is 0 if all went well.
"""

from __future__ import annotations

import argparse
import json
import traceback
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager

MARK = "@@ "  # begins a line for the program that started the script


class Report:
    """Counts and prints exercises; `finish()` gives the exit status."""

    def __init__(self) -> None:
        self._failed = 0
        self._exercised = 0

    @contextmanager
    def exercise(self, what: str) -> Generator[None]:
        """`what` went well if the block raises nothing."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._failed += 1
            self._say(what, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        else:
            self._say(what, None)

    def finish(self) -> int:
        """Print the last line, without which the script counts as broken off, and return the exit status."""
        print(MARK + json.dumps({"end": self._exercised}), flush=True)
        return 1 if self._failed else 0

    def _say(self, what: str, problem: str | None) -> None:
        self._exercised += 1
        print(MARK + json.dumps({"exercised": what, "problem": problem}), flush=True)


def arguments() -> argparse.Namespace:
    """Parse the arguments: the server to talk to, and for some clients more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="the served name")
    parser.add_argument("--tokenizer", required=True, help="directory of the checkpoint")
    parser.add_argument("--small-url", help="a server with room for one sequence of 64,000 tokens and 16 waiting")
    parser.add_argument("--small-pid", type=int, help="its process, which may be asked to leave")
    parser.add_argument("--reference", help="log-probabilities that transformers computed")
    parser.add_argument("--embedding-url", help="a server of vectors")
    parser.add_argument("--embedding-checkpoint", help="directory of what it serves")
    parser.add_argument("--scripted-url", help="a server of the model whose answers are scripted, which calls tools")
    parser.add_argument("--encoders", nargs=4, help="servers of vectors and of scores, each before its directory")
    return parser.parse_args()


def expect(condition: object, problem: object) -> None:
    """Raise `AssertionError` with `problem` unless `condition` holds."""
    if not condition:
        raise AssertionError(str(problem))


def answers_with_status(url: str, status: int) -> int:
    """Number of answers with this status that the server at `url` counts."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    wanted = [line for line in lines if line.startswith("oarlock:http_responses") and f'status="{status}"' in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in wanted))
