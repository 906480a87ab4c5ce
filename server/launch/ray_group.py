"""The hosts of one model as placed by Ray: starts `ray_driver` next to the server, and receives reports about its
parts.

Imports nothing of Ray.
"""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.base.python_child import import_path, python_command, start_python
from oarlock.server.config.nodes import ray_resources
from oarlock.server.config.sources import LoadedSettings, as_flags
from oarlock.server.launch.banner import Progress
from oarlock.server.observability import logs
from oarlock.workers.config import NodesConfig

_HEAD_ONLY = ("HTTP",)  # groups of options that parts do not need
_PREFIXES = ("HF_", "HUGGING_FACE_", "NCCL_", "GLOO_", "UCX_")  # prefixes of variables that parts get from this process
_VARIABLES = ("OARLOCK_CPU_LEVEL",)
_FAILURE_REPORT_TIMEOUT_S = 3.0  # time for a failed group to report its own, more precise error, and to end
_CLOSE_S = 15.0


class RayGroup:
    """The reserved hosts. `nodes`: how this host, the head, meets the others; None if there are none."""

    def __init__(self, loaded: LoadedSettings) -> None:
        """Wait for the reservation. Afterwards this process sees the GPUs that Ray gave it. Raises `StartupError`."""
        settings = loaded.settings
        logs.configure(settings.log_level, settings.log_format)
        self._failure: Future[StartupError] = Future()
        read_fd, write_fd = os.pipe()
        with os.fdopen(write_fd, "wb"):
            driver = ["-m", "oarlock.server.launch.ray_driver", str(write_fd)]
            self._driver = start_python(driver, pass_fds=[write_fd], stdin=subprocess.PIPE)
        self._channel = os.fdopen(read_fd, "rb")
        try:
            self._send(request(loaded, os.environ))
            reserved = self._wait_until_reserved(Progress(as_events=settings.log_format == "json"))
        except BaseException:
            self.close()
            raise
        if reserved["devices"] is not None and settings.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = reserved["devices"]
        self.nodes = None
        if settings.nnodes > 1:
            self.nodes = NodesConfig(
                node_rank=0,
                nnodes=settings.nnodes,
                address=reserved["address"],
                port=reserved["port"],
                interface=settings.node_interface,
                timeout_s=settings.node_timeout,
            )
        threading.Thread(target=self._read_messages, name="ray-driver", daemon=True).start()

    async def failed(self) -> StartupError:
        """Wait until a part has failed, and the group has had time to report its own error. Returns the part's
        error."""
        error = await asyncio.shield(asyncio.wrap_future(self._failure))
        await asyncio.sleep(_FAILURE_REPORT_TIMEOUT_S)
        return error

    def close(self, *, in_order: bool = False) -> None:
        """Let the driver end after the parts. Parts of a failed group end by themselves, and an unreachable part
        reports nothing, so the driver does not wait long for them."""
        assert self._driver.stdin is not None
        try:
            self._driver.stdin.close()
            self._driver.wait(_CLOSE_S if in_order else _FAILURE_REPORT_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._driver.kill()
            self._driver.wait()

    def _send(self, asked: dict[str, Any]) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(asked).encode() + b"\n")
        self._driver.stdin.flush()

    def _wait_until_reserved(self, on_progress: Progress) -> dict[str, Any]:
        on_progress("waiting for Ray", 0.0)
        while (said := self._receive())["kind"] == "waiting":
            on_progress("waiting for Ray", 0.0, said["text"])
        on_progress.finish()
        if said["kind"] == "failed":
            raise _error(said)
        return said

    def _receive(self) -> dict[str, Any]:
        line = self._channel.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        cause = f"The process that requests hosts from Ray exited with status {self._driver.wait()}."
        return {"kind": "failed", "cause": cause, "fix": "See the lines above.", "exit_code": 5}

    def _read_messages(self) -> None:
        while (said := self._receive())["kind"] != "failed":
            pass
        self._failure.set_result(_error(said))


def request(loaded: LoadedSettings, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the request to the driver: a share of each host, and the command, variables and directory of a part
    there."""
    settings = loaded.settings
    words = as_flags(loaded, without=_HEAD_ONLY)
    return {
        "nnodes": settings.nnodes,
        "resources": ray_resources(settings),
        "timeout_s": settings.node_timeout,
        "port": 0 if loaded.origins.get("master_port", "default") == "default" else settings.master_port,
        "command": python_command(["-m", "oarlock", "serve", *words, "--distributed-executor-backend=mp"]),
        "environment": {
            "PYTHONPATH": import_path(environment.get("PYTHONPATH", "")),
            **{name: value for name, value in environment.items() if name.startswith(_PREFIXES) or name in _VARIABLES},
        },
        "directory": os.getcwd(),
    }


def _error(said: Mapping[str, Any]) -> StartupError:
    return StartupError(said["cause"], said["fix"], said["exit_code"])
