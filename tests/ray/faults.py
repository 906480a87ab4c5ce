"""Something of a replica ends within answers, or a client does: who notices, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.e2e.running import DEMO
from tests.ray.cluster import MODEL, Cluster, Replica, eventually, ranks
from tests.ray.traffic import LONG, LONGEST, SHORT, Streams, Traffic, client, prompt
from tests.ray.trial import FAST, PLAIN, expected_of, streams_on_both, trial, two_replicas


def killed(cluster: Cluster, kill: Callable[[Replica], None], serve: str = PLAIN, **options: object) -> tuple[int, str]:
    """Kill something of one replica within eight streams: exactly its own streams must end in an error event."""
    replicas = two_replicas(cluster, serve, **options)
    streams, (dying, living) = streams_on_both(cluster, replicas)
    kill(replicas[0])
    ends = streams.finish()
    assert (ends.whole, len(ends.errors), ends.lost) == (living, dying, dying), str(ends)
    assert all(error.startswith("event ") for error in ends.errors), str(ends)
    eventually(replicas[0].is_gone, "no process of the replica lives")
    new = {replica.id for replica in cluster.running(2)}
    assert replicas[1].id in new and replicas[0].id not in new
    return dying, f"{living} of 8 streams whole, {dying} ended by an error event `{ends.errors[0].split()[1]}`"


@trial
def killed_server(cluster: Cluster) -> tuple[str, str, str]:
    lost, followed = killed(cluster, lambda replica: replica.server.kill())
    return "SIGKILL to the server of one of two replicas", followed, str(lost)


@trial
def killed_actor(cluster: Cluster) -> tuple[str, str, str]:
    lost, followed = killed(cluster, lambda replica: replica.actor.kill())
    return "SIGKILL to the actor of one of two replicas", f"{followed}; its server ended with it", str(lost)


@trial
def killed_rank(cluster: Cluster) -> tuple[str, str, str]:
    lost, followed = killed(cluster, lambda replica: ranks(replica.processes)[0].kill())
    return "SIGKILL to a rank of one of two replicas", followed, str(lost)


@trial
def failing_replacement(cluster: Cluster) -> tuple[str, str, str]:
    model = cluster.directory / "model"
    model.symlink_to(DEMO)
    replicas = two_replicas(cluster, PLAIN.replace(str(DEMO), str(model)))
    model.unlink()
    starts = cluster.failed_starts()
    # Clients that send a 503 again, as OpenAI's do by default: an actor lives on for a moment without its server.
    with Traffic(cluster.url, 4, expected_of(replicas[0], SHORT), retries=2) as traffic:
        eventually(lambda: traffic.ends.whole > 4, "streams flow")
        replicas[0].server.kill()
        eventually(lambda: cluster.failed_starts() >= starts + 3, "the replacement has failed three times")
        lost, whole = traffic.ends.lost, traffic.ends.whole
        eventually(lambda: traffic.ends.whole > whole + 8, "streams go on")
        status, (one,) = cluster.status(), cluster.status()["deployments"].values()
        model.symlink_to(DEMO)
        cluster.running(2)
        tries = cluster.failed_starts() - starts
    assert status["status"] == one["status"] == "UNHEALTHY", status
    assert "is neither a directory" in one["message"] and "fix: " in one["message"], one["message"]
    assert traffic.ends.lost == lost <= 4 and set(traffic.ends.errors) <= {"event replica_lost"}, str(traffic.ends)
    assert not replicas[1].is_gone()
    followed = (
        f"started again until it could, {tries} times in vain, with cause and fix in `serve status` (`UNHEALTHY`)"
    )
    done = "SIGKILL to the server of one of two replicas under load, and its model is away for a while"
    return done, f"{followed}; the other served on, {traffic.ends.whole} streams whole", str(lost)


@trial
def impatient_stop(cluster: Cluster) -> tuple[str, str, str]:
    short = {"graceful_shutdown_timeout_s": 0.5}
    replicas = two_replicas(cluster, **short)
    streams = Streams(cluster.url, 8, expected_of(replicas[0], LONGEST), LONGEST)
    eventually(lambda: streams.ends.begun == 8, "all streams have begun")
    cluster.deploy(cluster.config(PLAIN, num_replicas=1, **FAST, **short))
    ends = streams.finish()
    cluster.running(1)
    assert set(ends.errors) == {"event replica_lost"} and ends.whole + ends.lost == 8 and ends.whole, str(ends)
    followed = f"{ends.whole} of 8 streams whole, {len(ends.errors)} ended by an error event `replica_lost`"
    return "a replica stopped whose streams outlast `graceful_shutdown_timeout_s`", followed, str(ends.lost)


@trial
def disconnects(cluster: Cluster) -> tuple[str, str, str]:
    replicas = two_replicas(cluster)

    async def leave() -> None:
        async with client(cluster.url) as one:
            for number in range(8):
                request = one.completions.create(
                    model=MODEL,
                    prompt=prompt(number),
                    max_tokens=LONG,
                    stream=number % 2 == 0,
                    extra_body={"ignore_eos": True},
                )
                if number % 2:  # in the middle of a whole answer
                    task = asyncio.ensure_future(request)
                    await asyncio.sleep(0.5)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                else:
                    answer = await request
                    await anext(aiter(answer))
                    await answer.close()

    asyncio.run(leave())
    eventually(lambda: not any(replica.running() for replica in replicas), "no engine has a request")
    assert [replica.held_blocks() for replica in replicas] == [0, 0]
    finished = sum(replica.metrics().count('finished_reason="abort"') for replica in replicas)
    assert finished, "no engine has counted an abort"
    return "8 clients leave within their answers", "aborted in the engines; no block is held", "0"
