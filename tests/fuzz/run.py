"""10,000 hostile requests against a real server over a socket: no 5xx, no hang, errors in shape, nothing held after.

    python -m tests.fuzz.run                    # about five minutes on two cores
    python -m tests.fuzz.run --requests 2000 --seed 7

Four parts: broken HTTP, the corpus on every route, schemathesis over the OpenAPI document, and random mutations up to
the number asked for. Prints what was sent, how long answers took and everything that went wrong; the exit status is 1
if anything did.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import subprocess
import sys
import tempfile
import time

from tests.e2e.running import DEMO, RunningServer
from tests.fuzz.bodies import routes_of
from tests.fuzz.flood import Flood
from tests.fuzz.schema_run import run_schemathesis
from tests.fuzz.traces import Traces

# Small, so that requests end soon and the limits are met; a time limit, because a random body may ask for a lot.
FLAGS = ("--dtype", "float32", "--served-model-name", "demo", "--max-model-len", 512, "--request-timeout", 10)

FEWEST_MUTATIONS = 500


def fuzz(server: RunningServer, requests: int, seed: int, examples: int) -> list[str]:
    """Everything that went wrong."""
    traces = Traces(server)
    flood = Flood(server)
    routes = routes_of(server.client.get("/openapi.json").json())
    problems: list[str] = []

    began = time.monotonic()
    asyncio.run(flood.wire(routes))
    asyncio.run(flood.corpus(routes))
    report("broken HTTP and corpus", flood.sent, began, flood.problems)
    began, before = time.monotonic(), traces.answers()
    found = run_schemathesis(server.url, seed, examples)
    by_schema = int(traces.answers() - before)
    report("schemathesis", by_schema, began, found)
    if by_schema < 500:
        found.append(f"schemathesis sent {by_schema} requests only")
    problems += found
    began, already = time.monotonic(), flood.sent
    asyncio.run(flood.mutations(routes, max(FEWEST_MUTATIONS, requests - already - by_schema), seed))
    report("mutations", flood.sent - already, began, flood.problems)
    problems += flood.problems
    problems += traces.left(flood.sent)
    print(f"\nrequests: {flood.sent + by_schema}; answers by status: {flood.by_status()}")
    print(f"seconds to an answer: {flood.durations()}")
    print(f"longest wait of the liveness probe meanwhile: {flood.longest_probe_s:.3f} s")
    return problems


def report(part: str, number: int, began: float, problems: list[str]) -> None:
    """One line of progress."""
    seconds = time.monotonic() - began
    print(f"    {part}: {number} requests in {seconds:.0f} s, problems so far: {len(problems)}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="all parts together (default: 10,000)")
    parser.add_argument("--seed", type=int, help="of the random parts (default: a new one, printed)")
    parser.add_argument("--examples", type=int, default=80, help="of schemathesis for each operation (default: 80)")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1, help="ranks of the server")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else secrets.randbelow(2**31)
    print(f"==> seed {seed}", flush=True)
    with (
        tempfile.TemporaryDirectory() as batches,
        RunningServer(DEMO, *FLAGS, "--batch-dir", batches, "-tp", given.tensor_parallel_size) as server,
    ):
        try:
            problems = fuzz(server, given.requests, seed, given.examples)
        except (AssertionError, OSError, subprocess.SubprocessError):
            print(server.log[-4000:], file=sys.stderr)
            raise
        status = server.stop()
        if status:
            problems.append(f"the server left with {status}")
        problems += [f"in the server's log: {line}" for line in server.log.splitlines() if "Traceback" in line]
    for problem in problems[:200]:
        print(f"    FAILED  {problem[:600]}")
    print(f"\n{len(problems)} problems; again with --seed {seed}" if problems else "\nall well")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
