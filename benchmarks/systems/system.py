"""Systems that are measured: a server behind HTTP, or an engine without a server in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import httpx
import psutil

from benchmarks import load
from oarlock.base.python_child import die_with_parent

SERVED_NAME = "load"
READY_WITHIN_S = 900.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings that every system is started with. `threads`: of one system in all."""

    model: Path
    dtype: str
    threads: int
    max_concurrency: int
    max_tokens: int  # of one sequence: prompt and answer
    quantization: str = "none"  # none | int8 | int4: weights of so many bits, in the form of each system
    level: str | None = None  # avx2: systems keep to these instructions, and to AVX-VNNI


class System(Protocol):
    """One running system. It is idle, and uses no processor time, between two calls of `measure`."""

    name: str
    title: str
    about: dict[str, Any]  # version, number type, options: what a reader needs to know
    process: Process

    def measure(self, work: list[list[int]], concurrency: int, output_tokens: int) -> dict[str, Any]:
        """The fields of `load.Report` for these prompts, and what else this system knows about itself."""
        ...

    def close(self) -> None: ...


class Process:
    """A child process with a log of its own, ended with everything below it."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: Path, jobs: bool = False) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", prefix="oarlock-bench-", suffix=".log")  # noqa: SIM115
        pipe = subprocess.PIPE if jobs else None
        output = subprocess.PIPE if jobs else self._log
        self.started = time.perf_counter()
        # It ends with this program even if that is killed, for example by `timeout`.
        ends = partial(die_with_parent, os.getpid(), signal.SIGTERM)
        self.child = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=pipe, stdout=output, stderr=self._log, text=True,
            start_new_session=True, preexec_fn=ends,
        )  # fmt: skip

    def fail(self, what: str) -> RuntimeError:
        """An error with the end of the log."""
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        return RuntimeError("\n".join([what, *lines[-25:]]))

    def seconds_of_processor(self) -> float:
        """User and system time of the process and all below it."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.child.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def close(self) -> None:
        """Ask it to end; after 20 seconds end it."""
        tree = self._tree()
        if self.child.stdin:
            self.child.stdin.close()
        self.child.terminate()
        _, left = psutil.wait_procs(tree, timeout=20)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.child.wait(20)
        self._log.close()


class HttpSystem:
    """A server with OpenAI's completions API on a free port."""

    def __init__(
        self, name: str, title: str, about: dict[str, Any], command: list[str], env: dict[str, str], cwd: Path
    ) -> None:
        """`command` may hold `{port}`. Returns when /health answers 200."""
        self.name, self.title, self.about = name, title, about
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = Process([part.replace("{port}", str(port)) for part in command], env, cwd)
        try:
            self._wait_ready()
        except BaseException:
            self.process.close()
            raise
        self.about["start_s"] = round(time.perf_counter() - self.process.started, 1)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            if self.process.child.poll() is not None:
                raise self.process.fail(f"{self.name} ended with {self.process.child.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=10, trust_env=False).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise self.process.fail(f"{self.name} is not ready after {READY_WITHIN_S:.0f} s")
            time.sleep(0.1)

    def measure(self, work: list[list[int]], concurrency: int, output_tokens: int) -> dict[str, Any]:
        return asdict(load.run(self.url, SERVED_NAME, work, concurrency, output_tokens))

    def close(self) -> None:
        self.process.close()


class JobSystem:
    """An engine in a process that reads one job per line and answers with the times of its tokens.

    A job is {"prompts": [[ids]], "concurrency": c, "output_tokens": n}, its answer
    {"duration_s": …, "requests": [{"sent": …, "times": […]}]} with one time per token. The first answer is what the
    process says about itself.
    """

    def __init__(
        self, name: str, title: str, about: dict[str, Any], command: list[str], env: dict[str, str], cwd: Path
    ) -> None:
        self.name, self.title = name, title
        self.process = Process(command, env, cwd, jobs=True)
        try:
            self.about = about | self._answer()
        except BaseException:
            self.process.close()
            raise
        self.about["start_s"] = round(time.perf_counter() - self.process.started, 1)

    def _pipe(self, name: str) -> IO[str]:
        pipe = getattr(self.process.child, name)
        assert pipe is not None
        return pipe

    def _answer(self) -> dict[str, Any]:
        """The next line that is JSON: libraries may print to standard output as well."""
        for line in self._pipe("stdout"):
            if line.startswith("{"):
                return json.loads(line)
        raise self.process.fail(f"{self.name} ended with {self.process.child.wait()}")

    def measure(self, work: list[list[int]], concurrency: int, output_tokens: int) -> dict[str, Any]:
        job = {"prompts": work, "concurrency": concurrency, "output_tokens": output_tokens}
        self._pipe("stdin").write(json.dumps(job) + "\n")
        self._pipe("stdin").flush()
        answer = self._answer()
        samples = []
        for request in answer["requests"]:
            times = request["times"]
            if len(times) != output_tokens:
                raise RuntimeError(f"{self.name}: asked for {output_tokens} tokens, got {len(times)}")
            samples.append(load.Sample(output_tokens, request["sent"], times, times[-1]))
        return asdict(load.report(samples, concurrency, answer["duration_s"]))

    def close(self) -> None:
        self.process.close()


def clean_environment(threads: int, **changes: str) -> dict[str, str]:
    """This process's environment for a peer: no settings of ours, no hub, one number of threads."""
    foreign = ("OARLOCK_", "VLLM_", "OMP_", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    return kept | quiet | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"} | changes
