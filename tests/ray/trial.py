"""Register of trials, and the replicas that most trials begin with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.ray.cluster import SLOTS, Cluster, Replica, command, eventually
from tests.ray.traffic import LONG, Streams, texts

FAST = {"graceful_shutdown_wait_loop_s": 0.2, "health_check_period_s": 1}
PLAIN = command("--max-num-seqs", SLOTS)
Trial = Callable[[Cluster], tuple[str, str, str]]
TRIALS: dict[str, Trial] = {}  # on a cluster of one node
NODE_TRIALS: dict[str, Trial] = {}  # on one of two nodes


def trial(function: Trial) -> Trial:
    """Register a trial, which returns the action, its consequence, and the requests lost, or raises AssertionError."""
    TRIALS[function.__name__.replace("_", "-")] = function
    return function


def node_trial(function: Trial) -> Trial:
    """A trial on a cluster of two nodes, `tests.ray.nodes.NodeCluster`."""
    NODE_TRIALS[function.__name__.replace("_", "-")] = function
    return function


def two_replicas(cluster: Cluster, serve: str = PLAIN, **options: object) -> list[Replica]:
    """Deploy two replicas that run, and that the proxy sends requests to."""
    cluster.deploy(cluster.config(serve, num_replicas=2, **FAST | options))
    return both_running(cluster)


def both_running(cluster: Cluster) -> list[Replica]:
    """The two replicas, once they run and the proxy sends requests to both: it hears of a new one after the status."""
    replicas = cluster.running(2)
    before = [replica.accepted() for replica in replicas]

    def both_answer() -> bool:
        asyncio.run(texts(cluster.url, 8))  # four at once
        return all(replica.accepted() > number for replica, number in zip(replicas, before, strict=True))

    eventually(both_answer, "the proxy sends requests to both")
    return replicas


def expected_of(replica: Replica, tokens: int) -> dict[str, str]:
    with replica.inside():
        return asyncio.run(texts(replica.url, tokens))


def streams_on_both(cluster: Cluster, replicas: list[Replica]) -> tuple[Streams, list[int]]:
    """Eight streams that have all begun, and how many each replica has."""
    streams = Streams(cluster.url, 8, expected_of(replicas[0], LONG))
    eventually(lambda: streams.ends.begun == 8, "all streams have begun")
    counts = [replica.running() for replica in replicas]
    assert sum(counts) == 8 and all(counts), f"streams of the replicas: {counts}"
    return streams, counts


def failed(cluster: Cluster) -> str:
    """Messages of `serve status` once the application has failed."""

    def message() -> str | None:
        status = cluster.status()
        texts = [status.get("message", ""), *(one["message"] for one in status.get("deployments", {}).values())]
        return "\n".join(texts) if status.get("status") == "DEPLOY_FAILED" else None

    return eventually(message, "the application has failed")
