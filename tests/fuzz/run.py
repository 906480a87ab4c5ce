"""10,000 hostile requests against a real server over a socket: no 5xx, no hang, errors in shape, nothing held after.

    python -m tests.fuzz.run                    # about five minutes on two cores
    python -m tests.fuzz.run --requests 2000 --seed 7
    python -m tests.fuzz.run --decoder kimi_linear -tp 2 --requests 2000
    python -m tests.fuzz.run --encoder modernbert-score --requests 2000

Four parts: broken HTTP, the corpus on every route, schemathesis over the OpenAPI document, and random mutations up to
the number asked for. With `--encoder` the routes of vectors and scores alone, which the demo model refuses early. With
`--decoder` a tiny model with random weights and the demo model's tokenizer. Both without schemathesis and broken HTTP,
which test no model. Prints what was sent, how long answers took and everything that went wrong; the exit status is 1
if anything did.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oarlock.server.http.middleware import POOLING
from tests.e2e.running import DEMO, RunningServer
from tests.fuzz.bodies import routes_of
from tests.fuzz.flood import Flood
from tests.fuzz.schema_run import run_schemathesis
from tests.fuzz.seeded import finish, seed_of
from tests.fuzz.traces import Traces
from tests.golden.class_models import FOR_KERNELS, make_class
from tests.golden.tiny_encoders import ENCODERS, SCORING, make_encoder

# Small, so that requests end soon and the limits are met; a time limit, because a random body may ask for a lot.
FLAGS = ("--dtype", "float32", "--served-model-name", "demo", "--max-model-len", 512, "--request-timeout", 10)

DECODERS = ("deepseek_v3", "kimi_linear")  # latent attention, and recurrent layers beside it
FEWEST_MUTATIONS = 500


def fuzz(
    server: RunningServer, requests: int, seed: int, examples: int, canary: tuple[str, dict], *, is_demo: bool
) -> list[str]:
    """Everything that went wrong. `canary`: a request whose answer must stay the same. `is_demo`: all four parts."""
    traces = Traces(server, *canary)
    is_pooling = canary[0] in POOLING
    vectors = {"/v1/embeddings", "/pooling"}
    flood = Flood(server, POOLING if not is_pooling else frozenset(() if canary[0] in vectors else vectors))
    routes = routes_of(server.client.get("/openapi.json").json())
    if is_pooling:
        routes = [route for route in routes if route.path in POOLING]
    problems: list[str] = []

    began = time.monotonic()
    if is_demo:
        asyncio.run(flood.wire(routes))
    asyncio.run(flood.corpus(routes))
    report("broken HTTP and corpus" if is_demo else "corpus", flood.sent, began, flood.problems)
    by_schema = 0
    if is_demo:
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
    """Print one line of progress."""
    seconds = time.monotonic() - began
    print(f"    {part}: {number} requests in {seconds:.0f} s, problems so far: {len(problems)}", flush=True)


def started(folder: Path, given: argparse.Namespace) -> RunningServer:
    """The server that is attacked, which may write into `folder`."""
    ranks = ("-tp", given.tensor_parallel_size)
    if given.encoder is None:
        model = make_class(folder / "model", given.decoder, **FOR_KERNELS) if given.decoder else DEMO
        return RunningServer(model, *FLAGS, "--batch-dir", folder / "batches", *ranks)
    return RunningServer(make_encoder(folder, given.encoder, tokenizer=True), "--request-timeout", 10, *ranks)


def canary_of(encoder: str | None) -> tuple[str, dict]:
    """A route, and a body for it."""
    if encoder is None:
        prompt = "Q: What does os.path.join do?\nA:"
        return "/v1/completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    if encoder in SCORING:
        return "/v1/score", {"text_1": "a river", "text_2": ["the bank", "money"]}
    return "/v1/embeddings", {"input": ["a river", "the bank"]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="all parts together (default: 10,000)")
    parser.add_argument("--seed", type=int, help="of the random parts (default: a new one, printed)")
    parser.add_argument("--examples", type=int, default=80, help="of schemathesis for each operation (default: 80)")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1, help="ranks of the server")
    parser.add_argument("--decoder", choices=DECODERS, help="serve a tiny decoder instead of the demo model")
    parser.add_argument("--encoder", choices=ENCODERS, help="serve a tiny encoder instead of the demo model")
    given = parser.parse_args(arguments)
    seed = seed_of(given)
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), given) as server:
        try:
            is_demo, canary = not (given.encoder or given.decoder), canary_of(given.encoder)
            problems = fuzz(server, given.requests, seed, given.examples, canary, is_demo=is_demo)
        except (AssertionError, OSError, subprocess.SubprocessError):
            print(server.log[-4000:], file=sys.stderr)
            raise
        status = server.stop()
        if status:
            problems.append(f"the server left with {status}")
        problems += [f"in the server's log: {line}" for line in server.log.splitlines() if "Traceback" in line]
    return finish(problems, seed)


if __name__ == "__main__":
    raise SystemExit(main())
