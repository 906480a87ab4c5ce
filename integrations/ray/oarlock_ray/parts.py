"""The parts of a replica on other nodes: an actor in each further bundle of its placement group, with a server below.

They live as long as the replica's own actor, which is in the first bundle: Ray ends them with it, and Serve removes the
placement group and makes another one for the replica that follows. What the parts compute goes between their ranks.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from oarlock_ray.arguments import ArgumentError, Replica
from oarlock_ray.server_process import ServerProcess

_FAILURE_REPORT_TIMEOUT_S = 3.0  # for the server of the first node, which says better why a group does not start


@ray.remote(max_restarts=0)
class Part:
    """The actor on one node."""

    async def run(self, command: list[str]) -> str:
        """Until the part has ended. Returns why, in lines of cause and fix; nothing where it ended in order."""
        server = ServerProcess(command, 0.0)
        server.launch()
        if not await server.wait():
            return ""
        return f"On {socket.gethostname()} ({ray.util.get_node_ip_address()}): {server.error()}"


class Parts:
    """Starts the parts of one replica. Make it in the replica's actor."""

    def __init__(self, replica: Replica, group: PlacementGroup) -> None:
        address = ray.util.get_node_ip_address()
        port = _free_port(address)
        self.head_command = replica.part(0, address, port)
        self._actors: list[Any] = []
        self._runs: list[asyncio.Task[str]] = []
        for number in range(1, replica.nnodes):
            actor = Part.options(
                num_cpus=replica.num_cpus,
                num_gpus=replica.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            ).remote()
            self._actors.append(actor)  # without a reference Ray would end it
            self._runs.append(asyncio.create_task(_result(actor.run.remote(replica.part(number, address, port)))))

    async def start(self, server: ServerProcess) -> str:
        """Start the first node's server. Returns its URL. Raises `ArgumentError`, also when a part has ended."""
        starting = asyncio.create_task(server.start())
        await asyncio.wait((starting, *self._runs), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await asyncio.wait((starting,), timeout=_FAILURE_REPORT_TIMEOUT_S)
        if starting.done():
            return starting.result()
        starting.cancel()
        ended = [run.result() for run in self._runs if run.done()]
        raise ArgumentError(*_cause_and_fix(next(filter(None, ended), "A part of the replica was told to end.")))


async def _result(answer: Any) -> str:
    try:
        return await answer
    except ray.exceptions.RayError as error:
        return f"A part of the replica is lost: {str(error).splitlines()[0]}"


def _cause_and_fix(text: str) -> tuple[str, str]:
    cause, _, fix = text.replace("error: ", "", 1).partition("\nfix: ")
    return cause, fix or "`serve status` and the logs of Ray say more."


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
