"""A Ray cluster of one node, and the application of integrations/ray/oarlock.yaml on it, watched from outside.

Uses Ray's commands, the REST interface of its dashboard and the process table; imports nothing of Ray.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from oarlock_ray.policy import load_of

from tests.e2e.running import DEMO, ROOT, alive, environment, free_port

CONFIG = ROOT / "integrations" / "ray" / "oarlock.yaml"
NAME = "Oarlock"
MODEL = "demo"
SERVE = (".venv/bin/oarlock", "serve", str(DEMO), "--device", "cpu", "--num-threads", "1", "--dtype", "float32")
SLOTS = 8
WITHIN_S = 240.0
HEAD_PORT = 6379


def command(*flags: str | int) -> str:
    """A command line for `args` of the YAML: the demo model on the CPU."""
    return shlex.join([*SERVE, "--served-model-name", MODEL, *map(str, flags)])


def eventually(condition: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> Any:
    """The first true value of `condition`; fails, naming `what`, when the time is up."""
    deadline = time.monotonic() + within_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)


# Errors of looking at a replica whose processes have just ended.
ENDED = (psutil.NoSuchProcess, StopIteration, IndexError)


class Replica:
    """One running replica: its actor's process and its server's."""

    def __init__(self, details: dict[str, Any], inside: Callable[[], AbstractContextManager[None]]) -> None:
        """`inside`: where this thread is on the replica's node. Raises one of `ENDED` once the replica has ended."""
        self.inside = inside
        self.id = details["replica_id"]
        self.actor = psutil.Process(details["pid"])
        self.server = next(child for child in self.actor.children() if _runs_oarlock(child.cmdline()))
        self.processes = [self.actor, self.server, *self.server.children(recursive=True)]
        with inside():
            listening = [c for c in self.server.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        self.url = f"http://127.0.0.1:{listening[0].laddr.port}"

    def metrics(self) -> str:
        with self.inside():
            return httpx.get(f"{self.url}/metrics", timeout=60).text

    def running(self) -> int:
        """Requests in its engine, those that wait among them."""
        return int(sum(load_of(self.metrics()).values()))

    def accepted(self) -> int:
        """Number of requests that the replica has ever taken."""
        return int(self._sample("oarlock:requests_accepted_total"))

    def held_blocks(self) -> float:
        return self._sample("oarlock:kv_blocks_held")

    def _sample(self, name: str) -> float:
        line = next(line for line in self.metrics().splitlines() if re.match(rf"{name}[ {{]", line))
        return float(line.split()[-1])

    def is_gone(self) -> bool:
        """Whether no process of the replica lives."""
        return not any(map(alive, self.processes))


def _runs_oarlock(words: list[str]) -> bool:
    """Whether a command line runs the program, by whatever path it is named."""
    return any(Path(word).name == "oarlock" for word in words)


def ranks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Processes that are ranks."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if "oarlock.workers.runner.worker_process" in process.cmdline():
                found.append(process)
    return found


class Cluster:
    """Use as a context manager; leaving it ends every process of the cluster."""

    def __init__(self, num_cpus: int, num_gpus: int, address: str | None = None) -> None:
        """`address`: of a head that other nodes join."""
        self.directory = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets below it: a short path
        self.port, self.dashboard, self.agent, self.exported = (free_port() for _ in range(4))
        self.url = f"http://127.0.0.1:{self.port}"
        self._size = ("--num-cpus", str(num_cpus), "--num-gpus", str(num_gpus), "--object-store-memory=100000000")
        self._head = ("--port=0",) if address is None else (f"--node-ip-address={address}", f"--port={HEAD_PORT}")
        self.rest_url = f"http://127.0.0.1:{self.dashboard}"
        self._rest = httpx.Client(
            base_url=self.rest_url, timeout=120, headers={"Authorization": f"Bearer {self._token().read_text()}"}
        )
        base = environment(
            RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH="oarlock_ray.lost_replica.middlewares",
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(self._token()),
            RAY_USAGE_STATS_ENABLED="0",
            RAY_worker_niceness="0",  # not 15, with which servers wait for whatever else this machine does
            RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1",
            RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1",
        )
        self.environment = {name: value for name, value in base.items() if name != "OARLOCK_NUM_THREADS"}

    def _token(self) -> Path:
        """The file with the cluster's token, as `ray get-auth-token --generate` would make it."""
        path = self.directory / "auth-token"
        if not path.exists():
            path.write_text(secrets.token_hex(32))
            path.chmod(0o600)
        return path

    def __enter__(self) -> Cluster:
        before = ray_processes()
        assert not before, f"another Ray cluster runs on this machine: {before}"
        try:
            ports = [*self._head, "--min-worker-port=0", "--max-worker-port=0", f"--dashboard-port={self.dashboard}"]
            ports += [f"--dashboard-agent-listen-port={self.agent}", f"--temp-dir={self.directory}"]
            ports += [f"--metrics-export-port={self.exported}"]
            self.ray("ray", "start", "--head", *self._size, *ports)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.ray("ray", "stop", "--force")
        eventually(lambda: not ray_processes(), "every process of Ray has ended", 60)
        shutil.rmtree(self.directory, ignore_errors=True)

    def ray(self, *words: str) -> str:
        """Run one of Ray's commands and return its output."""
        done = subprocess.run(
            words, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=300, start_new_session=True
        )
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def config(
        self, serve: str, args: dict[str, Any] | None = None, name: str = "oarlock", **deployment: Any
    ) -> dict[str, Any]:
        """The YAML of the repository on this cluster's port, with another command and other options."""
        whole = copy.deepcopy(yaml.safe_load(CONFIG.read_text()))
        whole["http_options"]["port"] = self.port
        application = whole["applications"][0]
        application["name"] = name
        application["args"] = {"command": serve} if args is None else args
        options = application["deployments"][0]
        if isinstance(deployment.get("num_replicas"), int):
            del options["autoscaling_config"]
        options.update(deployment)
        return whole

    def deploy(self, config: dict[str, Any]) -> None:
        """Deploy as `serve deploy` does; that command itself is used where a trial is about it."""
        answer = self._rest.put("/api/serve/applications/", json=config)
        assert answer.status_code == 200, answer.text

    def clear(self) -> None:
        """End the application: nothing of a trial that has failed is left to the next one."""
        self.deploy({**self.config(""), "applications": []})
        eventually(lambda: not self.status(), "the application has ended")

    def deploy_by_command(self, config: dict[str, Any]) -> None:
        path = self.directory / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        self.ray("serve", "deploy", "--address", f"http://127.0.0.1:{self.dashboard}", str(path))

    def status_in_a_bare_shell(self) -> str:
        """Output of `serve status` where only the token and the address are known, in another folder."""
        kept = {name: value for name, value in self.environment.items() if name in ("PATH", "HOME")}
        token = {name: value for name, value in self.environment.items() if name.startswith("RAY_AUTH_")}
        done = subprocess.run(
            ["serve", "status", "--address", self.rest_url],
            cwd=self.directory, env=kept | token, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        """Status of the application as `serve status` shows it."""
        applications = self._rest.get("/api/serve/applications/").json()["applications"]
        return next(iter(applications.values()), {})

    def running(self, number: int) -> list[Replica]:
        """The replicas once just so many run, none is starting or stopping, and the application says that it runs."""

        def ready() -> list[Replica] | None:
            status = self.status()
            assert status.get("status") != "DEPLOY_FAILED", status["message"]
            found = status.get("deployments", {}).get(NAME, {}).get("replicas", [])
            fit = [one for one in found if one["state"] == "RUNNING"]
            settled = status.get("status") == "RUNNING" and len(fit) == len(found) == number
            try:
                return [Replica(one, functools.partial(self.inside, one["node_ip"])) for one in fit if settled] or None
            except ENDED:  # it has ended, and Ray does not know it yet
                return None

        return eventually(ready, f"{number} replicas run")

    def inside(self, address: str) -> AbstractContextManager[None]:
        """Context in which this thread is on the node with that address."""
        return contextlib.nullcontext()

    def failed_starts(self) -> int:
        """Number of failed starts of replicas' servers since the cluster was made."""
        return self.logs().count("the server of this replica did not start")

    def logs(self) -> str:
        """All that replicas and proxies have written."""
        folder = self.directory / "session_latest" / "logs" / "serve"
        return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))


def ray_processes() -> list[int]:
    """Ids of the processes of any cluster on this machine that this user started."""
    found = []
    for process in psutil.process_iter(["name", "cmdline", "uids"]):
        words = process.info["cmdline"] or [""]
        own = process.info["uids"] is not None and process.info["uids"].real == os.getuid()
        if own and (words[0].startswith("ray::") or Path(words[0]).name in ("raylet", "gcs_server")):
            found.append(process.pid)
    return found
