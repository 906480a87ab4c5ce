"""Options of one model on several hosts: how many there are, which one this is, and how they find each other."""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.server.config.options import option

_GROUP = "Several hosts"
MASTER_PORT = 29550
RAY = "ray"


@dataclass(frozen=True)
class NodeSettings:
    """Options of the group `Several hosts`."""

    distributed_executor_backend: str = option(
        "mp",
        group=_GROUP,
        example="ray",
        choices=("mp", RAY),
        help="who starts the parts of a model: mp: this command, on each host; ray: Ray, on nodes of its cluster, of "
        "which this host is one",
    )
    nnodes: int = option(
        1,
        group=_GROUP,
        example="2",
        minimum=1,
        maximum=64,
        help="number of hosts that the ranks are dealt to; the same command runs on each, but for Ray (default: as "
        "torchrun or LeaderWorkerSet says; on Ray one for each stage; else 1)",
    )
    node_rank: int | None = option(
        None,
        group=_GROUP,
        example="1",
        minimum=0,
        maximum=63,
        help="number of this host; 0, the head node, serves HTTP (default: as torchrun or LeaderWorkerSet says)",
    )
    master_addr: str | None = option(
        None,
        group=_GROUP,
        example="10.0.0.1",
        help="name or address of the head node (default: as torchrun or LeaderWorkerSet says)",
    )
    master_port: int = option(
        MASTER_PORT,
        group=_GROUP,
        example="29600",
        minimum=1,
        maximum=65535,
        help="port of the store in which the hosts meet: the head node keeps it, or torchrun",
    )
    node_interface: str | None = option(
        None,
        group=_GROUP,
        example="eth1",
        help="network interface of this host, or its address, for all that goes between hosts (default: the one that "
        "leads to the head node)",
    )
    node_timeout: float = option(
        300.0,
        group=_GROUP,
        example="600",
        minimum=1,
        maximum=86_400,
        help="seconds that the hosts wait for each other at the start",
    )
