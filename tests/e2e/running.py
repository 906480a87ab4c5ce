"""A server as a user runs it: a separate process on a real port, watched from outside.

Uses the command line, HTTP and the process table; imports nothing of the server's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "oarlock-demo"
QUICK_COMPILER = ROOT / "tests" / "e2e" / "quick_compiler"  # its kernels are slow, and there in seconds
READY_WITHIN_S = 120.0


# Below the ports of clients, and a thousand for each worker of a test run: no other test takes one between the moment
# in which it is found free and the one in which a server listens there.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.cycle(random.sample(range(12_000 + 1_000 * _WORKER, 13_000 + 1_000 * _WORKER), 1_000))


def free_port() -> int:
    """A port that is free at this moment, and that only this worker of the test run is given."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def command(*arguments: str | int | Path, module: str = "oarlock", python: str | Path = sys.executable) -> list[str]:
    """`oarlock …` of this very interpreter; like the installed command, it does not import from where it stands."""
    return [str(python), "-P", "-m", module, *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """Our environment without settings that would leak into the server.

    One thread per rank: the demo model gains nothing from more, and several servers share the machine.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OARLOCK_")}
    return kept | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OARLOCK_NUM_THREADS": "1"} | changes


def eventually(condition: Callable[[], Any], within_s: float, what: str, every_s: float = 0.02) -> Any:
    """The first true value of `condition`; fails, naming `what`, when the time is up."""
    deadline = time.monotonic() + within_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(every_s)


def shared_memory() -> set[str]:
    """Names of the files in /dev/shm."""
    return set(os.listdir("/dev/shm"))


class RunningServer:
    """`oarlock serve` on a free port. Use as a context manager; leaving it stops the server with SIGTERM."""

    def __init__(
        self,
        model: str | Path | None = DEMO,
        *flags: str | int | Path,
        env: dict[str, str] | None = None,
        module: str = "oarlock",
        cwd: Path = ROOT,
        python: str | Path = sys.executable,
        at_start: Callable[[], None] | None = None,
        port: int | None = None,
        torchrun: Sequence[str | int] | None = None,
    ) -> None:
        """`at_start` is called in the new process before it becomes the server. `port`: of a server that it follows.
        `torchrun`: options of torchrun, where that starts the server."""
        self.shared_before = shared_memory()
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.NamedTemporaryFile("w+", prefix="oarlock-test-", suffix=".log")  # noqa: SIM115
        words = ["serve", *([model] if model else []), "--port", self.port, *flags]
        if torchrun is not None:
            words, module = [*torchrun, "-m", module, *words], "torch.distributed.run"
        self.process = subprocess.Popen(
            command(*words, module=module, python=python),
            cwd=cwd,
            env=environment(**(env or {})),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the test run is not the server's
            preexec_fn=at_start,
        )
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> RunningServer:
        try:
            return self.wait_ready()
        except BaseException:
            self.kill_all()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            self.kill_all()

    @property
    def log(self) -> str:
        """Everything the server has printed."""
        return Path(self._log.name).read_text(errors="replace")

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> RunningServer:
        """Wait until /health says 200; fail with the log when the server ends instead."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server left with {self.process.returncode}:\n{self.log}")
            with contextlib.suppress(httpx.TransportError):
                return self.client.get("/health").status_code == 200
            return False

        try:
            eventually(ready, within_s, "/health answers 200", every_s=0.1)  # each question takes milliseconds
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None
        self.processes()
        return self

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it that live, and remembers them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if alive(process)]

    def left_behind(self) -> list[psutil.Process]:
        """Processes of this server that outlive it."""
        return [process for process in self._seen.values() if process.pid != self.process.pid and alive(process)]

    def send(self, number: signal.Signals) -> None:
        """Send one signal to the server's process."""
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM, within_s: float = 40) -> int:
        """Ask the server to end; return its exit status."""
        self.processes()
        self.send(number)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{number.name} did not end the server within {within_s:g} s:\n{self.log}") from None

    def kill_all(self) -> None:
        """End whatever of this server still lives: a test that fails must not burden the next."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(60)
        self.client.close()
        self._log.close()

    # ------------------------------------------------------------------ requests
    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """One `/v1/completions`, not streamed: the body, which must be a 200."""
        response = self.client.post("/v1/completions", json={"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, prompt: Any, **fields: Any) -> str:
        """The first choice's text."""
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def stream(self, prompt: Any, **fields: Any) -> Iterator[dict[str, Any]]:
        """The chunks of one streamed `/v1/completions`, which must end in `[DONE]`."""
        with self.client.stream("POST", "/v1/completions", json={"prompt": prompt, "stream": True, **fields}) as answer:
            if answer.status_code != 200:
                raise AssertionError(answer.read().decode())
            yield from events(answer)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name, summed over its labels."""
        found: Counter[str] = Counter()
        for of_engine in self.metrics_by_engine().values():
            found.update(of_engine)
        return dict(found)

    def metrics_by_engine(self) -> dict[str, dict[str, float]]:
        """Samples by the label of each replica. Those that belong to no replica are under an empty label."""
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                own = found.setdefault(sample.labels.get("engine", ""), {})
                if not sample.name.endswith("_bucket"):
                    own[sample.name] = own.get(sample.name, 0.0) + sample.value
        return found

    def metric_label(self, name: str, label: str) -> str:
        """One label of a metric's first sample."""
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    return sample.labels[label]
        raise KeyError(name)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of every server-sent event up to `[DONE]`, without which the stream counts as cut."""
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        yield json.loads(line[len("data: ") :])
    raise AssertionError("the stream ended without [DONE]")


def alive(process: psutil.Process) -> bool:
    """Neither gone nor a zombie waiting to be collected."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
