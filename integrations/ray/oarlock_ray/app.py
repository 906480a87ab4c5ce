"""The Serve application: `application` is the import path of the YAML.

A replica is one actor, which starts one whole `oarlock serve` with all its ranks below itself. All ranks are therefore
on the actor's node, and see the devices that Ray gave the actor. A replica of several nodes has a placement group with
a bundle on each; its actor is in the first, and actors of `parts` are in the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from ray import serve, util
from ray.serve import metrics

from oarlock_ray import arguments
from oarlock_ray.forward import Forwarder
from oarlock_ray.parts import Parts
from oarlock_ray.policy import RUNNING, SLOTS, WAITING
from oarlock_ray.server_process import ServerProcess

_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_LAST_BYTES_S = 0.5  # for error events that are written but not yet taken by the proxy
_log = logging.getLogger("ray.serve")


@serve.deployment(name="Oarlock", max_surge_percent=50, health_check_period_s=5, graceful_shutdown_timeout_s=600)
@serve.ingress()
class Oarlock:
    """One replica."""

    async def __init__(self, replica: arguments.Replica) -> None:
        self._replica = replica
        self._parts = Parts(replica, util.get_current_placement_group()) if replica.nnodes > 1 else None
        command = replica.command if self._parts is None else self._parts.head_command
        self._server = ServerProcess(command, replica.drain_timeout_s)
        self._watch: asyncio.Task[None] | None = None  # set, as what it watches, once the server runs
        try:
            url = await (self._server.start() if self._parts is None else self._parts.start(self._server))
        except arguments.ArgumentError as error:
            _log.error("the server of this replica did not start\n%s", error)
            raise
        _log.info("serving %s, process %d", url, self._server.pid)
        if not os.environ.get(_CALLBACK):
            _log.warning(
                "error: a replica that is killed will cut its streams without an error event.\n"
                "fix: Start Ray with %s=oarlock_ray.lost_replica.middlewares",
                _CALLBACK,
            )
        self._gauges = {
            name: metrics.Gauge(f"oarlock_requests_{name}", description=f"Requests {name} in the engines of a replica.")
            for name in (WAITING, RUNNING)
        }
        self._forwarder = Forwarder(url)
        self._watch = asyncio.create_task(self._end_with_server())

    def __serve_build_asgi_app__(self) -> Forwarder:
        return self._forwarder

    async def check_health(self) -> None:
        """Serve replaces a replica whose server is not healthy. One that is says its load in Ray's metrics."""
        await self._forwarder.check_health()
        for name, number in (await self._forwarder.load()).items():
            self._gauges[name].set(number)

    async def record_autoscaling_stats(self) -> dict[str, Any]:
        """Queue length of this replica, for `policy.QueueLength`."""
        return {SLOTS: self._replica.slots, **await self._forwarder.load()}

    async def __del__(self) -> None:
        """Serve calls it once no request is open, when its patience has ended, and after a start that failed."""
        if self._watch is None:
            return
        self._watch.cancel()
        await self._server.stop()
        await self._forwarder.close()

    async def _end_with_server(self) -> None:
        """A replica without its server would answer faster than any other, and so draw all requests to itself."""
        await self._server.wait()
        if self._server.stopping:
            return
        _log.error("this replica ends, and Serve starts another one\n%s", self._server.error())
        await self._forwarder.idle()
        await asyncio.sleep(_LAST_BYTES_S)
        os._exit(1)


def application(args: dict[str, Any]) -> serve.Application:
    """The application, from the `args` of the YAML. Raises `ArgumentError` before any replica is started."""
    replica = arguments.read(args)
    nodes = {"placement_group_bundles": replica.bundles(), "placement_group_strategy": "STRICT_SPREAD"}
    return Oarlock.options(
        ray_actor_options={"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus},
        **(nodes if replica.nnodes > 1 else {}),
        max_ongoing_requests=replica.max_ongoing_requests,
    ).bind(replica)
