"""Deployed, scaled, updated, placed: by the YAML of the repository."""

from __future__ import annotations

import re

import httpx

from tests.ray.cluster import SLOTS, Cluster, command, eventually, ranks
from tests.ray.traffic import LONG, SHORT, Streams, Traffic
from tests.ray.trial import FAST, PLAIN, expected_of, failed, trial, two_replicas


@trial
def deploy_by_command(cluster: Cluster) -> tuple[str, str, str]:
    cluster.deploy_by_command(cluster.config(PLAIN, num_replicas=1, **FAST))
    direct = cluster.running(1)[0].url
    for method, path, body in (
        ("GET", "/v1/models/demo?api-version=%2F&beta", None),
        ("POST", "/v1/completions", {"prompt": "import os", "max_tokens": 8, "temperature": 0}),
        ("POST", "/v1/completions", {"prompt": "import os", "max_tokens": 8, "temperature": 0, "stream": True}),
        ("POST", "/v1/completions", {"prompt": "x " * 200_000}),
        ("POST", "/v1/completions", {"prompt": "import os", "max_tokens": -1}),
        ("GET", "/nothing", None),
    ):
        answers = [
            httpx.request(method, url + path, json=body, headers={"X-Request-Id": "trial"}, timeout=60)
            for url in (direct, cluster.url)
        ]
        one, other = (comparable(answer) for answer in answers)
        assert one == other, f"{method} {path}: {one} through the server, {other} through the proxy"
    assert httpx.get(f"{cluster.url}/metrics").status_code == 404
    exported = f"http://127.0.0.1:{cluster.exported}/metrics"
    eventually(lambda: "ray_oarlock_requests_waiting{" in httpx.get(exported).text, "Ray's metrics have the load")
    return "`serve deploy`; answers, a stream and errors", "bodies, status and headers as from the server itself", "0"


def comparable(answer: httpx.Response) -> tuple[int, dict[str, str], str]:
    """Part of an answer that must be equal for one request: all but times and the headers of a connection."""
    left_out = {"date", "server", "server-timing", "connection", "keep-alive", "transfer-encoding"}
    headers = {name: value for name, value in answer.headers.items() if name not in left_out}
    return answer.status_code, headers, re.sub(r'"created":\d+', "", answer.text)


@trial
def scaling_by_hand(cluster: Cluster) -> tuple[str, str, str]:
    replicas = two_replicas(cluster)
    with Traffic(cluster.url, 6, expected_of(replicas[0], SHORT)) as traffic:
        for number in (1, 3, 1, 2):
            before = traffic.ends.whole
            cluster.deploy(cluster.config(PLAIN, num_replicas=number, **FAST))
            cluster.running(number)
            eventually(lambda before=before: traffic.ends.whole > before + 6, "streams go on")
    assert not traffic.ends.lost, str(traffic.ends)
    return "2, 1, 3, 1, 2 replicas under load", f"{traffic.ends.whole} streams, all whole", "0"


@trial
def autoscaling(cluster: Cluster) -> tuple[str, str, str]:
    scaling = {
        **cluster.config(PLAIN)["applications"][0]["deployments"][0]["autoscaling_config"],
        **{"max_replicas": 2, "look_back_period_s": 4, "upscale_delay_s": 1, "downscale_delay_s": 3},
    }
    few = command("--max-num-seqs", 2)
    cluster.deploy(cluster.config(few, autoscaling_config=scaling, **FAST))
    replica = cluster.running(1)[0]
    with Traffic(cluster.url, 10, expected_of(replica, SHORT)) as traffic:
        cluster.running(2)
    more = traffic.ends.whole
    cluster.running(1)
    assert not traffic.ends.lost, str(traffic.ends)
    return "10 clients on replicas of 2 slots, then none", f"1, then 2, then 1 replica; {more} streams, all whole", "0"


@trial
def rolling_update(cluster: Cluster) -> tuple[str, str, str]:
    old = two_replicas(cluster)
    with Traffic(cluster.url, 6, expected_of(old[0], SHORT)) as traffic:
        streams = Streams(cluster.url, 4, expected_of(old[0], LONG))
        cluster.deploy(cluster.config(command("--max-num-seqs", SLOTS + 1), num_replicas=2, **FAST))
        eventually(lambda: all(replica.is_gone() for replica in old), "the old replicas have ended")
        cluster.running(2)
    ends = streams.finish()
    assert (ends.whole, ends.lost, traffic.ends.lost) == (4, 0, 0), f"long: {ends}; short: {traffic.ends}"
    followed = f"both replaced, the new before the old; {traffic.ends.whole + 4} streams, all whole"
    return "another command deployed under load", followed, "0"


@trial
def bad_update(cluster: Cluster) -> tuple[str, str, str]:
    old = two_replicas(cluster)
    with Traffic(cluster.url, 4, expected_of(old[0], SHORT)) as traffic:
        cluster.deploy(cluster.config(PLAIN.replace("oarlock-demo", "missing"), num_replicas=2, **FAST))
        message = failed(cluster)
    assert "is neither a directory" in message and "Check the path" in message, message
    assert not traffic.ends.lost and not any(replica.is_gone() for replica in old), str(traffic.ends)
    followed = f"`DEPLOY_FAILED` with cause and fix; the old replicas served on, {traffic.ends.whole} streams whole"
    return "an update to a model that is not there, under load", followed, "0"


@trial
def placement(cluster: Cluster) -> tuple[str, str, str]:
    two_ranks = command("--max-num-seqs", SLOTS, "--tensor-parallel-size", 2)
    cluster.deploy(cluster.config(two_ranks, num_replicas=1, **FAST))
    replica = cluster.running(1)[0]
    assert len(ranks(replica.processes)) == 2
    options = cluster.status()["deployments"]["Oarlock"]["deployment_config"]["ray_actor_options"]
    assert options["num_cpus"] == 2, options
    cluster.deploy(cluster.config(two_ranks, num_replicas=5, **FAST))  # of a cluster with 8 cores
    states = ["RUNNING"] * 4 + ["STARTING"]

    def four_run() -> bool:
        found = cluster.status()["deployments"]["Oarlock"]["replicas"]
        return sorted(one["state"] for one in found) == states

    eventually(four_run, "four replicas run and one waits for cores")
    script = cluster.directory / "oarlock"  # asks for GPUs, and does without them
    script.write_text('#!/bin/bash\n[ "$1" = serve ] && set -- "${@/#cuda/cpu}"\nexec .venv/bin/oarlock "$@"\n')
    script.chmod(0o755)
    asking = two_ranks.replace(".venv/bin/oarlock", str(script)).replace("cpu", "cuda")
    cluster.deploy(cluster.config(asking, num_replicas=2, max_surge_percent=0, **FAST))
    seen = sorted(replica.server.environ()["CUDA_VISIBLE_DEVICES"] for replica in cluster.running(2))
    assert seen == ["0,1", "2,3"], seen
    followed = "4 run, the fifth waits; two replicas that ask for 2 GPUs each see `0,1` and `2,3`"
    return "5 replicas of 2 ranks on a node with 8 cores and, so Ray was told, 4 GPUs", followed, "0"


@trial
def bad_input(cluster: Cluster) -> tuple[str, str, str]:
    cases = [
        ({"comand": PLAIN}, "args has an unknown key: comand."),
        ({}, "args.command is not a command line."),
        ({"command": PLAIN.replace("cpu", "auto")}, "leaves the device open"),
        ({"command": f"{PLAIN} --tensor-paralel-size 2"}, "Did you mean --tensor-parallel-size?"),
        ({"command": f"{PLAIN} --port 8000"}, "each replica sets for itself"),
        ({"command": PLAIN.replace(".venv", ".nowhere")}, "cannot be run: No such file or directory"),
        ({"command": PLAIN.replace("oarlock-demo", "missing")}, "is neither a directory"),
        ({"command": f"{PLAIN} --tensor-parallel-size 3"}, "tensor_parallel_size 3 does not fit this model"),
    ]
    for number, (args, cause) in enumerate(cases):
        starts = cluster.failed_starts()
        cluster.deploy(cluster.config("", args=args, num_replicas=1, **FAST))
        message = failed(cluster)
        assert cause in message and "error: " in message and "fix: " in message, f"{args}: {message}"
        starts = cluster.failed_starts() - starts
        assert starts <= 3, f"{args}: {starts} starts"
        print(f"    {number + 1} of {len(cases)}: {cause}", flush=True)
    followed = "`DEPLOY_FAILED` after at most 3 starts, one line of cause and one of fix in `serve status`"
    return f"{len(cases)} mistakes in `args`", followed, "0"
