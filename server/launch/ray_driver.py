"""The driver of a server that Ray places. It reserves a share of each host, and runs a part on all hosts except ours.

    python -m oarlock.server.launch.ray_driver FD

Reads one line of JSON, then waits for the end of its input, which is the end of the server; writes lines of JSON to FD.
Only this process imports Ray, to keep Ray's threads and signal handlers out of the server. When it ends, in any way,
Ray ends the parts and releases the reservation. Ray does not take part in the model's work, only torch does.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO

_REACH_S = 10.0
_CONNECT_S = 60.0
_CHECK_INTERVAL_S = 1.0  # interval of checks of a reservation
_POLL_S = 0.2
_END_S = 12.0  # time for parts to end after the server
_KEPT_LINES = 40
_OF_NODE = 0.001  # amount of the resource that every Ray node has under its own name, to choose the node
# Becomes a command that the kernel kills when the process that asked for it ends, so that no part outlives its actor.
_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class FailedError(Exception):
    """Nothing can be reserved or started: a line of cause and a line of fix."""

    def __init__(self, cause: str, fix: str, exit_code: int = 3) -> None:
        super().__init__(cause)
        self.cause, self.fix, self.exit_code = cause, fix, exit_code


class HostActor:
    """An actor on one host. Ray sends its code there: Ray's processes import nothing of Oarlock."""

    def devices(self) -> str | None:
        """Return the GPUs that Ray gave to this actor."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def run(self, command: list[str], environment: dict[str, str], directory: str) -> tuple[int, list[str]]:
        """Run the command, whose first word is a Python interpreter, to its end. Returns its status and its last lines.
        Ray's log has all lines."""
        try:
            process = subprocess.Popen(
                [command[0], "-I", "-c", _WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, **environment},
                cwd=directory if os.path.isdir(directory) else None,
            )
        except OSError as error:
            fix = "fix: Install Oarlock at the same path on every host of the Ray cluster."
            return 3, [f"error: {command[0]} cannot be run: {error.strerror}.", fix]
        kept: deque[str] = deque(maxlen=_KEPT_LINES)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.append(line.strip())
        return process.wait(), list(kept)


class Driver:
    """One group of hosts, from its reservation to its end."""

    def __init__(self, asked: dict[str, Any], channel: TextIO) -> None:
        """Import Ray. `asked`: request of `oarlock.server.launch.ray_group`. `channel`: lines of JSON are written to
        it."""
        self._asked = asked
        self._channel = channel
        for name in ("RAY_DEDUP_LOGS", "RAY_COLOR_PREFIX"):  # a part's log has every line, without colours
            os.environ.setdefault(name, "0")
        self._ray: Any = importlib.import_module("ray")
        self._is_left = threading.Event()  # the server has ended

    def run(self) -> None:
        """Reserve the hosts, start the parts and watch them. Raises `FailedError`."""
        self._connect()
        threading.Thread(target=self._wait_for_server, name="input", daemon=True).start()
        own = self._own_node()
        group = self._reserve(own)
        scheduling = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        share = self._asked["resources"]
        parts = [
            self._ray.remote(HostActor)
            .options(
                num_cpus=share.get("CPU", 0),
                num_gpus=share.get("GPU", 0),
                scheduling_strategy=scheduling(group, placement_group_bundle_index=index),
            )
            .remote()
            for index in range(self._asked["nnodes"])
        ]
        port = self._asked["port"] or _free_port(own["NodeManagerAddress"])
        devices = self._ray.get(parts[0].devices.remote())  # its actor holds the share of this host
        self._send("reserved", address=own["NodeManagerAddress"], port=port, devices=devices)
        hosts = self._hosts(group)
        running = {}
        for number, part in enumerate(parts[1:], 1):
            where = [f"--nnodes={self._asked['nnodes']}", f"--node-rank={number}"]
            where += [f"--master-addr={own['NodeManagerAddress']}", f"--master-port={port}"]
            ended = part.run.remote(
                [*self._asked["command"], *where], self._asked["environment"], self._asked["directory"]
            )
            running[ended] = hosts[number]
        self._watch(running)

    def _connect(self) -> None:
        address = os.environ.get("RAY_ADDRESS", "auto")
        fix = (
            "Start `ray start --head` on one host and `ray start --address=HOST:6379` on the others, "
            "including this one; if there are several clusters, set RAY_ADDRESS."
        )
        watchdog = threading.Timer(_CONNECT_S, self._fail_connection, [address, fix])
        watchdog.daemon = True
        watchdog.start()
        try:
            _check_listens(address)
            self._ray.init(address=address, logging_level="ERROR", log_to_driver=True)
        except Exception as error:
            raise FailedError(f"No Ray cluster can be used at {address}: {_first_line(error)}", fix) from None
        watchdog.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):  # the server decides; Ray has set handlers of its own
            signal.signal(number, signal.SIG_IGN)

    def _fail_connection(self, address: str, fix: str) -> None:
        """Give up a cluster that does not respond: Ray itself would keep trying for minutes."""
        self._fail(f"No Ray cluster can be used at {address}: it did not respond within {_CONNECT_S:g} s.", fix, 3)
        os._exit(1)

    def _own_node(self) -> dict[str, Any]:
        own = self._ray.get_runtime_context().get_node_id()
        return next(node for node in self._ray.nodes() if node["NodeID"] == own)

    def _reserve(self, own: dict[str, Any]) -> Any:
        """Return a placement group with a bundle for each host, the first for this one. Raises `FailedError`."""
        nnodes, share = self._asked["nnodes"], self._asked["resources"]
        bundles = [dict(share) for _ in range(nnodes)]
        bundles[0][f"node:{own['NodeManagerAddress']}"] = _OF_NODE
        groups = importlib.import_module("ray.util.placement_group")
        group = groups.placement_group(bundles, strategy="STRICT_SPREAD" if nnodes > 1 else "PACK")
        deadline = time.monotonic() + self._asked["timeout_s"]
        wanted = " and ".join(f"{number:g} {name}" for name, number in share.items())
        while not group.wait(_CHECK_INTERVAL_S):
            left = deadline - time.monotonic()
            if self._is_left.is_set():
                raise FailedError("The server has ended.", "")
            if left < 0:
                raise FailedError(
                    f"Ray could not reserve {wanted} on each of {nnodes} hosts, including this one, within "
                    f"{self._asked['timeout_s']:g} s; it has {self._sizes()}.",
                    "Free or add hosts (`ray status`), choose --nnodes and the number of ranks to fit, or raise "
                    "--node-timeout.",
                )
            self._send("waiting", text=f"{wanted} on each of {nnodes} hosts, {left:.0f} s left")
        return group

    def _sizes(self) -> str:
        """Return the resources of the nodes of the cluster, free or not."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        sizes = [
            f"{node['NodeManagerAddress']} with {node['Resources'].get('CPU', 0):g} CPU and "
            f"{node['Resources'].get('GPU', 0):g} GPU"
            for node in nodes
        ]
        return ", ".join(sizes)

    def _hosts(self, group: Any) -> list[str]:
        """Return name and address of the host of each bundle."""
        table = importlib.import_module("ray.util").placement_group_table(group)
        nodes = {
            node["NodeID"]: f"{node['NodeManagerHostname']}, {node['NodeManagerAddress']}" for node in self._ray.nodes()
        }
        of_bundle = table["bundles_to_node_id"]
        return [nodes[of_bundle[index]] for index in range(len(of_bundle))]

    def _watch(self, running: dict[Any, str]) -> None:
        """Watch the parts until the server has ended, and then until they have ended. Reports each part that ends
        before the server."""
        end = None
        while end is None or (running and time.monotonic() < end):
            if end is None and self._is_left.is_set():
                end = time.monotonic() + _END_S
            if not running:
                time.sleep(_POLL_S)
                continue
            for ended in self._ray.wait(list(running), timeout=_POLL_S)[0]:
                self._report(ended, running.pop(ended))

    def _report(self, ended: Any, host: str) -> None:
        try:
            status, lines = self._ray.get(ended)
        except Exception as error:  # Ray's: the actor or its node is gone
            self._fail(f"The Ray task on {host} was lost: {_first_line(error)}", "See `ray status` and Ray's logs.", 5)
            return
        if status:
            cause, fix = last_error(lines, status)
            self._fail(f"On {host}: {cause}", fix, status if status > 0 else 5)

    def _fail(self, cause: str, fix: str, exit_code: int) -> None:
        self._send("failed", cause=cause, fix=fix, exit_code=exit_code)

    def _send(self, kind: str, **fields: Any) -> None:
        try:
            self._channel.write(json.dumps({"kind": kind, **fields}) + "\n")
            self._channel.flush()
        except BrokenPipeError:
            self._is_left.set()

    def _wait_for_server(self) -> None:
        sys.stdin.read()
        self._is_left.set()


def last_error(lines: list[str], status: int) -> tuple[str, str]:
    """Return cause and fix as a part printed them, or how it ended and its last line."""
    cause = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
    fix = next((line.removeprefix("fix: ") for line in reversed(lines) if line.startswith("fix: ")), None)
    if cause is None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        cause = f"the task {how}. {(lines[-1] if lines else 'It printed nothing.')}"
    return cause, fix or "See Ray's logs for its whole output."


def _check_listens(address: str) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def main() -> int:
    channel = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the parts goes to the log
    try:
        Driver(json.loads(sys.stdin.readline()), channel).run()
    except FailedError as error:
        fields = {"cause": error.cause, "fix": error.fix, "exit_code": error.exit_code}
        channel.write(json.dumps({"kind": "failed", **fields}) + "\n")
        channel.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
