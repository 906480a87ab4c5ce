"""Arguments of the application in its YAML, checked, and the resources that one replica takes of a node.

Asks Oarlock's own parser (`oarlock config`) what a command line means. Knows neither Ray nor HTTP.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMMAND = "command"
_EXAMPLE = "oarlock serve Qwen/Qwen2.5-7B-Instruct --device cuda --tensor-parallel-size 2"
# A replica listens on a free port of loopback, and only its own actor connects to it; which host is which, Ray says.
_OURS = ("--host", "--port", "--node-rank", "--master-addr", "--master-port")
_PARSE_TIMEOUT_S = 120.0
_LOGGED_ERROR = re.compile(r'\blevel"?[=:] ?"?ERROR\b')  # in both formats of the log


class ArgumentError(ValueError):
    """The application cannot be built or started: one line of cause, one of fix."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(f"error: {cause}\nfix: {fix}")


@dataclass(frozen=True)
class Replica:
    """One replica: its command line and what it takes of each node that it is placed on."""

    command: tuple[str, ...]  # without --host and --port, and without what says which host is which
    nnodes: int
    num_cpus: float  # on each node, as are the GPUs
    num_gpus: float
    slots: int  # sequences that it runs at a time
    drain_timeout_s: float

    def bundles(self) -> list[dict[str, float]]:
        """Resources that Ray must reserve on each of several nodes."""
        share = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return [{name: number for name, number in share.items() if number} for _ in range(self.nnodes)]

    def part(self, node_rank: int, address: str, port: int) -> list[str]:
        """The command of one of several nodes. The last of two flags counts, so a `ray` before it does not."""
        where = {"--nnodes": self.nnodes, "--node-rank": node_rank, "--master-addr": address, "--master-port": port}
        words = [f"{name}={value}" for name, value in where.items()]
        return [*self.command, "--distributed-executor-backend=mp", *words]

    @property
    def max_ongoing_requests(self) -> int:
        """A batch, and a quarter more to fill it from: what waits beyond that waits where any replica can take it."""
        return self.slots + math.ceil(self.slots / 4)


def read(arguments: Mapping[str, Any]) -> Replica:
    """The replica that the `args` of the YAML describe. Raises `ArgumentError`."""
    unknown = sorted(set(arguments) - {COMMAND})
    if unknown:
        raise ArgumentError(f"args has an unknown key: {unknown[0]}.", f"There is only `{COMMAND}`: {_EXAMPLE}")
    text = arguments.get(COMMAND)
    if not isinstance(text, str) or not text.strip():
        raise ArgumentError(f"args.{COMMAND} is not a command line.", f"For example: {COMMAND}: {_EXAMPLE}")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentError(f"args.{COMMAND} cannot be split: {error}.", "Close the quotation mark.") from None
    if len(words) < 2 or words[1] != "serve":
        raise ArgumentError(f"args.{COMMAND} does not begin with `oarlock serve`: {text}", f"For example: {_EXAMPLE}")
    given = next((word for word in words if word.split("=")[0] in _OURS), None)
    if given is not None:
        raise ArgumentError(
            f"args.{COMMAND} has {given}, which each replica sets for itself.",
            "Leave it out; address and port of the proxy are `http_options` of the YAML.",
        )
    return describe(tuple(words), settings_of(words))


def settings_of(words: list[str]) -> dict[str, str]:
    """Reads `oarlock serve [MODEL] FLAGS`: settings by name, as `oarlock config` prints them."""
    program, _, *rest = words
    named = ["--model", *rest] if rest and not rest[0].startswith("-") else rest
    try:
        asked = subprocess.run(
            [program, "config", "show", *named], capture_output=True, text=True, timeout=_PARSE_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise ArgumentError(
            f"args.{COMMAND}: {program} cannot be run: {error.strerror}.",
            f"Name the program by its absolute path; it was looked for from {os.getcwd()} and on the PATH.",
        ) from None
    except subprocess.TimeoutExpired:
        raise ArgumentError(
            f"args.{COMMAND}: `{program} config` did not answer within {_PARSE_TIMEOUT_S:g} s.",
            "Try the command in a shell on the node of Ray's head.",
        ) from None
    if asked.returncode:
        raise ArgumentError(*last_error(asked.stderr, f"`{program} config` left with {asked.returncode}."))
    rows = (line.split() for line in asked.stdout.splitlines())
    return {row[0]: " ".join(row[1:-1]) for row in rows if len(row) > 2}


def describe(words: tuple[str, ...], settings: Mapping[str, str]) -> Replica:
    """One actor holds all ranks of a replica that are on one node. Raises `ArgumentError`."""
    device = settings["device"]
    if device == "auto":
        raise ArgumentError(
            f"args.{COMMAND} leaves the device open, so Ray cannot know what a replica takes.",
            "Add --device cuda or --device cpu.",
        )
    nnodes, engines = int(settings["nnodes"]), int(settings.get("data_parallel_size", "1"))
    ranks = engines * int(settings["tensor_parallel_size"]) * int(settings["pipeline_parallel_size"])
    if ranks % nnodes:
        raise ArgumentError(
            f"args.{COMMAND} has {ranks} ranks, which cannot be divided equally among {nnodes} nodes.",
            "Choose --nnodes so that it divides --tensor-parallel-size times --pipeline-parallel-size.",
        )
    if engines > 1 and nnodes > 1:
        raise ArgumentError(
            f"args.{COMMAND} has --data-parallel-size {engines}, whose engines share one node, and --nnodes {nnodes}.",
            "Leave --data-parallel-size out, and give the deployment so many num_replicas.",
        )
    ranks //= nnodes
    threads = settings["num_threads"]
    on_cpu = device == "cpu"
    return Replica(
        command=words,
        nnodes=nnodes,
        num_cpus=ranks * (int(threads) if on_cpu and threads.isdigit() else 1),
        num_gpus=0 if on_cpu else ranks,
        slots=engines * int(settings["max_num_seqs"]),
        drain_timeout_s=float(settings["drain_timeout"]),
    )


def last_error(printed: str, otherwise: str) -> tuple[str, str]:
    """Cause and fix as Oarlock printed them; without such lines, `otherwise` and the last error of its log, or line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    cause = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
    fix = next((line.removeprefix("fix: ") for line in reversed(lines) if line.startswith("fix: ")), None)
    logged = next((f" Its last error: {line}" for line in reversed(lines) if _LOGGED_ERROR.search(line)), "")
    last = logged or f" Its last line: {lines[-1]}" if lines and cause is None else ""
    return f"{cause or otherwise}{last}", fix or "The log of the replica has all of its output."
