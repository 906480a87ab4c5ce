"""Real clients, each in an environment of its own, against a real server over a socket.

    python -m tests.clients.run                       # the newest, but for those that take gigabytes
    python -m tests.clients.run --all
    python -m tests.clients.run openai-3 curl         # these
    python -m tests.clients.run --all --write-docs    # and the table in docs/clients.md

Prints a line per exercise and one table; the exit status is 1 if anything failed. What is
exercised is written in `scripts/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.agents import try_agent
from tests.clients.environments import CACHE, HERE, NotInstalledError, prepare, version
from tests.clients.matrix import CLIENTS, Client
from tests.clients.scripted_model import scripted_model
from tests.clients.snippets import run_snippet
from tests.clients.table import as_text, write_docs
from tests.e2e.embedding_demo import embedding_demo
from tests.e2e.long_context import long_context_demo
from tests.e2e.running import DEMO, ROOT, RunningServer

MODEL = "demo"
FLAGS = ("--dtype", "float32", "--served-model-name", MODEL)
SMALL = (*FLAGS, "--max-num-seqs", 1, "--max-waiting-requests", 16)
SCRIPTED = ("--served-model-name", MODEL, "--kv-cache-memory", "64MiB")
MARK = "@@ "


@dataclass(frozen=True)
class Served:
    """The servers that all clients share."""

    url: str  # of the demo model
    embedding: list[str]  # arguments, from `embedding_server`
    scripted: RunningServer | None  # of the model whose answers are scripted, if a client needs it
    reference: Path  # log-probabilities that transformers computed


@dataclass
class Outcome:
    """Outcome of one client's run."""

    client: Client
    version: str = "?"
    exercised: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""  # why it was not tried

    def report(self, what: str, problem: str | None) -> None:
        """Add and print one exercise. `problem`: None if it went well."""
        if problem is None:
            self.exercised.append(what)
            print(f"    ok      {what}", flush=True)
        else:
            self.problems.append(f"{what}: {problem}")
            print(f"    FAILED  {self.problems[-1]}", flush=True)


def try_client(client: Client, prepared: Future[tuple[list[str], bool]], served: Served) -> Outcome:
    """Wait for its environment, run its script, collect its lines.

    `prepared`: the result of `environments.prepare`.
    """
    outcome = Outcome(client)
    began = time.monotonic()
    try:
        interpreter, fresh = prepared.result()
        outcome.version = version(client)
    except NotInstalledError as reason:
        outcome.skipped = str(reason)
        print(f"==> {client.name}: skipped, {reason}", flush=True)
        return outcome
    except (OSError, subprocess.CalledProcessError) as error:
        outcome.problems.append(f"no environment: {error}")
        return outcome
    made = f", environment made, {time.monotonic() - began:.0f} s waited for" if fresh else ""
    print(f"==> {client.name} ({client.package} {outcome.version}){made}", flush=True)
    began = time.monotonic()
    with small_server(client) as small, encoder_servers(client) as encoders:
        command = [*interpreter, str(HERE / "scripts" / client.script), "--url", served.url, "--model", MODEL]
        command += ["--tokenizer", str(DEMO), *small, *encoders]
        if client.needs_embedding_server:
            command += served.embedding
        if client.needs_scripted_server and served.scripted is not None:
            command += ["--scripted-url", served.scripted.url]
        if client.needs_transformers_numbers:
            command += ["--reference", str(served.reference)]
        if client.script:
            run_script(command, client, outcome)
    if client.is_agent and served.scripted is not None:
        try_agent(client, interpreter, served.scripted, outcome.report)
    elif client.snippet:
        try_snippet(client, interpreter, served.url, outcome)
    outcome.seconds = time.monotonic() - began
    return outcome


@contextlib.contextmanager
def small_server(client: Client) -> Generator[list[str]]:
    """Arguments that name a separate server for a client that will fill it and end it."""
    if not client.needs_small_server:
        yield []
        return
    with (
        tempfile.TemporaryDirectory(prefix="oarlock-long-context-") as directory,
        RunningServer(long_context_demo(Path(directory)), *SMALL) as server,
    ):
        yield ["--small-url", server.url, "--small-pid", str(server.process.pid)]


@contextlib.contextmanager
def embedding_server(clients: Sequence[Client]) -> Generator[list[str]]:
    """Arguments that name a server of vectors, one for all clients that need it, and its checkpoint."""
    if not any(client.needs_embedding_server for client in clients):
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="oarlock-embedding-") as directory:
        checkpoint = embedding_demo(Path(directory) / "demo", dense=96)
        with RunningServer(checkpoint, *FLAGS) as server:
            yield ["--embedding-url", server.url, "--embedding-checkpoint", str(checkpoint)]


@contextlib.contextmanager
def scripted_server(clients: Sequence[Client]) -> Generator[RunningServer | None]:
    """Serve the model whose answers are scripted, for all clients that need it."""
    if not any(client.needs_scripted_server for client in clients):
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="oarlock-scripted-") as directory,
        RunningServer(scripted_model(Path(directory) / "scripted"), *SCRIPTED) as server,
    ):
        yield server


@contextlib.contextmanager
def encoder_servers(client: Client) -> Generator[list[str]]:
    """Arguments for clients that need encoders, which are served meanwhile."""
    if not client.needs_encoder_servers:
        yield []
        return
    from tests.golden.tiny_encoders import make_encoder, write_modules  # imports torch

    with tempfile.TemporaryDirectory(prefix="oarlock-encoders-") as directory:
        embeds = make_encoder(Path(directory), "modernbert", tokenizer=True)
        write_modules(embeds, "cls_token", 500)
        scores = make_encoder(Path(directory), "bert-score", tokenizer=True)
        with RunningServer(embeds) as first, RunningServer(scores, "--tensor-parallel-size", 2) as second:
            yield ["--encoders", first.url, str(embeds), second.url, str(scores)]


def run_script(command: list[str], client: Client, outcome: Outcome) -> None:
    """Run a script until it ends or its time is up; its lines become progress and, if it failed, an excerpt."""
    other: list[str] = []
    ended = False
    directory = CACHE / client.name
    directory.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command, cwd=directory, env=environment(client), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    watchdog = threading.Timer(client.timeout_s, process.kill)
    watchdog.start()
    try:
        for line in process.stdout or ():
            if not line.startswith(MARK):
                other.append(line)
                continue
            line_read = json.loads(line.removeprefix(MARK))
            if "end" in line_read:
                ended = line_read["end"] == len(outcome.exercised) + len(outcome.problems)
            else:
                outcome.report(line_read["exercised"], line_read["problem"])
        status = process.wait()
    finally:
        watchdog.cancel()
        process.kill()
    if not ended or (status and not outcome.problems):
        outcome.problems.append(f"the script broke off with status {status}")
    if not outcome.exercised and not outcome.problems:
        outcome.problems.append("the script exercised nothing")
    if outcome.problems:
        print("".join(f"    | {line}" for line in other[-60:]), flush=True)


def try_snippet(client: Client, interpreter: list[str], url: str, outcome: Outcome) -> None:
    """Run the snippet that `oarlock snippets` prints for a client."""
    what = f"`oarlock snippets --client {client.snippet}`, run as printed"
    try:
        run_snippet(client, interpreter, url, environment(client))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        outcome.report(what, str(error))
    else:
        outcome.report(what, None)


def environment(client: Client) -> dict[str, str]:
    """Our environment without anything that would point a client elsewhere; hub and telemetry off, separate caches."""
    foreign = ("OPENAI_", "OARLOCK_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(foreign)}
    kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
    caches = {"HF_HOME": str(CACHE / client.name / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return kept | caches | quiet | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(arguments: list[str] | None = None) -> int:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"of {', '.join(names)}")
    parser.add_argument("--all", action="store_true", help="older, slow and very large ones as well")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the table into docs/clients.md; needs all clients"
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in names]
    if unknown:
        parser.error(f"unknown client {', '.join(unknown)}; there are {', '.join(names)}")
    if given.all and given.names:
        parser.error("--all and names contradict each other")
    if given.write_docs and not given.all:
        parser.error("--write-docs wants all clients: add --all")
    wanted = [
        client for client in CLIENTS if (client.name in given.names if given.names else given.all or client.is_quick)
    ]
    with tempfile.TemporaryDirectory() as directory:
        reference = Path(directory) / "reference.json"
        if any(client.needs_transformers_numbers for client in wanted):
            print("==> asking transformers for its numbers", flush=True)
            subprocess.run([sys.executable, "-m", "tests.clients.reference", str(reference)], cwd=ROOT, check=True)
        # The next environments are made while a client runs, two at a time: much of it is waiting for the network.
        with (
            RunningServer(DEMO, *FLAGS) as server,
            embedding_server(wanted) as embedding,
            scripted_server(wanted) as scripted,
            ThreadPoolExecutor(2) as pool,
        ):
            print(f"==> serving {DEMO.name} at {server.url}", flush=True)
            prepared = [pool.submit(prepare, client) for client in wanted]
            served = Served(server.url, embedding, scripted, reference)
            outcomes = [try_client(client, future, served) for client, future in zip(wanted, prepared, strict=True)]
            idle = server.metrics()
    print("\n" + as_text(outcomes))
    failed = [outcome.client.name for outcome in outcomes if outcome.problems]
    if idle["oarlock:kv_blocks_held"] or idle["vllm:num_requests_running"]:
        failed.append("the server still holds blocks or requests")
    if given.write_docs:  # failures too: the page shows the outcome as it is
        write_docs(outcomes)
    tried = sum(not outcome.skipped for outcome in outcomes)
    skipped = f", {len(outcomes) - tried} skipped" if tried < len(outcomes) else ""
    print(f"\nfailed: {', '.join(failed)}" if failed else f"\n{tried} clients, all well{skipped}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
