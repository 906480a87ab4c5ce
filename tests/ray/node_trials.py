"""One model on two nodes of a Ray cluster: by `--distributed-executor-backend ray`, and as replicas on Ray Serve."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psutil

from tests.e2e.running import DEMO, ROOT, RunningServer, alive
from tests.ray.cluster import Cluster, Replica, eventually, ranks
from tests.ray.faults import killed
from tests.ray.nodes import CORES, LAYERS_ON_TWO, NodeCluster, oarlock_with_ray, part_of, parts
from tests.ray.trial import FAST, both_running, node_trial, streams_on_both

PROMPTS = ["Q: What does os.path.join do?\nA:", "import os\nimport sys\n\n", "for line in file:\n"]
ONE_RANK = ("--device", "cpu", "--num-threads", 1, "--dtype", "float32")
ON_RAY = (*ONE_RANK, "--distributed-executor-backend", "ray")
SIZES = {
    "TP 2": ("-tp", 2, "--nnodes", 2),
    "PP 2": ("-pp", 2),
    "TP 2 x PP 2": ("-tp", 2, "-pp", 2),
}


@contextlib.contextmanager
def server(cluster: Cluster, *flags: str | int, ready: bool = True, **changes: str) -> Iterator[RunningServer]:
    """`oarlock serve` on the head's host, with Ray in its environment."""
    env = {name: value for name, value in cluster.environment.items() if name.startswith("RAY_")} | changes
    made = RunningServer(DEMO, *flags, env=env, python=oarlock_with_ray(cluster.directory / "oarlock"))
    try:
        yield made.wait_ready() if ready else made
    finally:
        made.kill_all()


def answers(one: RunningServer) -> list[Any]:
    """Text and log-probabilities, greedy and with a seed, for each prompt alone and for all at once."""
    found = []
    for ask in ({"temperature": 0}, {"temperature": 0.8, "seed": 7}):
        alone = [one.complete(prompt, **ask, max_tokens=12, logprobs=1)["choices"][0] for prompt in PROMPTS]
        together = one.complete(PROMPTS, **ask, max_tokens=12, logprobs=1)["choices"]
        found += [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in (*alone, *together)]
    return found


def refused(cluster: Cluster, *flags: str | int, python: str | None = None, **changes: str) -> str:
    """Returns what a start printed that ended with status 3."""
    environment = cluster.environment | changes
    interpreter = python or oarlock_with_ray(cluster.directory / "oarlock")
    words = [interpreter, "-m", "oarlock", "serve", DEMO, *flags]
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr


@node_trial
def answers_on_two_nodes(cluster: Cluster) -> tuple[str, str, str]:
    with RunningServer(DEMO, *ONE_RANK, python=ROOT / ".venv" / "bin" / "python") as one:
        expected = answers(one)
    for size, flags in SIZES.items():
        with server(cluster, *ON_RAY, *flags) as head:
            assert answers(head) == expected, size
            (part,) = parts()
            assert len(ranks(part.children(recursive=True))) == (2 if "x" in size else 1), size
            assert head.stop() == 0, head.log
            eventually(lambda part=part: not part.is_running(), f"{size}: the part has ended")
    followed = (
        f"text and log-probabilities of {len(expected)} answers bit for bit those of one rank; ends with status 0"
    )
    return f"`--distributed-executor-backend ray` with {', '.join(SIZES)}", followed, "0"


@node_trial
def killed_part_of_a_server(cluster: Cluster) -> tuple[str, str, str]:
    with server(cluster, *ON_RAY, "-pp", 2, ready=False) as head:
        eventually(parts, "the part has been started")[0].kill()
        assert head.process.wait(60) == 5, head.log
        assert "error: " in head.log and "Traceback" not in head.log, head.log
    for _ in range(2):  # what was reserved has been given back
        with server(cluster, *ON_RAY, "-pp", 2) as head:
            (part,) = parts()
            part.kill()
            assert head.process.wait(60) == 5, head.log
            assert "node 1 (node1, 10.83.0.2) has closed the connection" in head.log, head.log
            assert "Traceback" not in head.log, head.log
            eventually(lambda head=head: not head.left_behind(), "every process of the server has ended")
    return (
        "SIGKILL to the part of a server on the other node, while it starts and later",
        "the server ends with status 5 and names it; it can be started again",
        "all",
    )


@node_trial
def starts_that_ray_cannot_place(cluster: Cluster) -> tuple[str, str, str]:
    large = refused(cluster, *ON_RAY, "-pp", 2, "--num-threads", 64, "--node-timeout", 3)
    assert "error: Ray could not reserve 64 CPU on each of 2 hosts" in large, large
    many = refused(cluster, *ON_RAY, "-pp", 4, "--node-timeout", 3)
    assert "error: Ray could not reserve 1 CPU on each of 4 hosts" in many, many
    nobody = refused(cluster, *ON_RAY, "-pp", 2, RAY_AUTH_TOKEN_PATH="", RAY_AUTH_TOKEN="0" * 64)
    assert "error: No Ray cluster can be used" in nobody, nobody
    alone = refused(cluster, *ON_RAY, "-pp", 2, RAY_ADDRESS="127.0.0.1:1")
    assert "error: No Ray cluster can be used at 127.0.0.1:1" in alone, alone
    without = refused(cluster, *ON_RAY, "-pp", 2, python=str(ROOT / ".venv" / "bin" / "python"))
    assert "needs the Python package ray, which is missing" in without, without
    return (
        "a share that no node has, more nodes than there are, a wrong token, no cluster, no Ray",
        "one line of cause and one of fix each, status 3",
        "0",
    )


@node_trial
def killed_part_of_a_replica(cluster: Cluster) -> tuple[str, str, str]:
    gone: list[psutil.Process] = []

    def kill(replica: Replica) -> None:
        gone.append(part_of(replica))
        gone[0].kill()

    lost, followed = killed(cluster, kill, LAYERS_ON_TWO, max_ongoing_requests=4)  # half of the streams
    eventually(lambda: len(parts()) == 2, "each replica has its part")
    assert gone[0].pid not in [part.pid for part in parts()]
    cluster.clear()
    eventually(lambda: not parts(), "the parts have ended with the application")
    return (
        "SIGKILL to a part of one of two replicas of two nodes each",
        f"{followed}; replaced as a whole group",
        str(lost),
    )


def lose(cluster: NodeCluster, fault: str) -> None:
    """Take the second node from the cluster: its raylet is killed, or the link to it is cut."""
    if fault == "raylet":
        cluster.kill_raylet(cluster.hosts.node)
    else:
        cluster.hosts.unplug(cluster.hosts.node)


def bring_back(cluster: NodeCluster, cores: int = CORES) -> None:
    """The second node as after a restart: nothing runs on it but a new raylet."""
    cluster.switch_off(cluster.hosts.node)
    cluster.hosts.plug_in(cluster.hosts.node)
    cluster.join(cluster.hosts.node, cores)


@node_trial
def lost_node_of_a_server(cluster: NodeCluster) -> tuple[str, str, str]:
    seconds = {}
    for fault in ("raylet", "link"):
        with server(cluster, *ON_RAY, "-pp", 2) as head:
            (part,) = parts()
            group = [part, *part.children(recursive=True)]
            began = time.monotonic()
            lose(cluster, fault)
            assert head.process.wait(60) == 5, head.log
            eventually(lambda group=group: not any(map(alive, group)), "the part has ended")
            seconds[fault] = time.monotonic() - began
            assert "node 1 (node1, 10.83.0.2) has " in head.log and "Traceback" not in head.log, head.log
        bring_back(cluster)
    return (
        "the raylet of a server's other node is killed; the link to that node is cut",
        f"server and part end after {seconds['raylet']:.1f} s and {seconds['link']:.1f} s, status 5 and the node's "
        "name; it can be started again when the node is back",
        "all",
    )


@node_trial
def lost_node_of_a_replica(cluster: NodeCluster) -> tuple[str, str, str]:
    bring_back(cluster, cores=1)
    options = FAST | {"max_ongoing_requests": 4}  # half of the streams
    cluster.deploy(cluster.config(LAYERS_ON_TWO, num_replicas=1, **options))
    (first,) = cluster.running(1)  # so it is on the head and the second node
    third = cluster.hosts.hosts[2]
    cluster.join(third, cores=1)
    cluster.deploy(cluster.config(LAYERS_ON_TWO, num_replicas=2, **options))
    told, lost = [], []
    for fault in ("raylet", "link"):
        living, dying = sorted(both_running(cluster), key=lambda replica: replica.id == first.id)
        part = part_of(dying)
        group = [*dying.processes[1:], part, *part.children(recursive=True)]
        streams, (whole, broken) = streams_on_both(cluster, [living, dying])
        began = time.monotonic()
        lose(cluster, fault)
        eventually(lambda group=group: not any(map(alive, group)), "the group has ended")
        group_s = time.monotonic() - began
        eventually(lambda ends=streams.ends, broken=broken: len(ends.errors) == broken, "clients have been told")
        told_s = time.monotonic() - began
        ends = streams.finish()
        assert (ends.whole, ends.lost) == (whole, broken), str(ends)
        bring_back(cluster, cores=1)
        replicas = cluster.running(2)
        (first,) = (replica for replica in replicas if replica.id != living.id)
        assert first.id != dying.id and len(parts()) == 2
        lost.append(str(broken))
        codes = " or ".join(sorted({f"`{error.split()[1]}`" for error in ends.errors}))
        told.append(f"after {group_s:.1f} s the group has ended, and its streams by {codes} after {told_s:.1f} s")
    assert "node 1 (node1, 10.83.0.2) has " in cluster.logs()
    cluster.clear()
    cluster.switch_off(third)
    bring_back(cluster)
    return (
        "two replicas of two nodes each, on three; the raylet of a node that one of them has is killed, then the link "
        "to it is cut",
        f"{'; '.join(told)}; the other's streams whole; replaced as a whole group when the node is back",
        " and ".join(lost),
    )
