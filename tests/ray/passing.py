"""Trials of the way through the proxy: its refusals, its routing and its cost."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid

import httpx
import openai

from tests.ray.cluster import MODEL, SLOTS, Cluster, Replica, command
from tests.ray.traffic import LONG, Streams, client, prompt
from tests.ray.trial import FAST, PLAIN, expected_of, trial, two_replicas
from tests.ray.wire import check

RAY_ROUTER = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"


@trial
def wire(cluster: Cluster) -> tuple[str, str, str]:
    number = asyncio.run(check())
    done = f"{number} answers and requests that are hard to forward, without Ray"
    return done, "what is whole arrives unchanged; what breaks off ends in an error", "0"


@trial
def full_queue(cluster: Cluster) -> tuple[str, str, str]:
    tight = command("--max-num-seqs", 1, "--max-waiting-requests", 1)
    cluster.deploy(cluster.config(tight, num_replicas=1, max_ongoing_requests=20, **FAST))
    replica = cluster.running(1)[0]
    expected = expected_of(replica, LONG)
    ends = Streams(cluster.url, 8, expected).finish()
    assert set(ends.errors) == {"429 queue_full"} and ends.whole + len(ends.errors) == 8 and ends.whole >= 2, str(ends)
    cluster.deploy(cluster.config(tight, num_replicas=1, max_ongoing_requests=1, max_queued_requests=1, **FAST))
    cluster.running(1)
    proxy = Streams(cluster.url, 8, expected).finish()
    assert set(proxy.errors) == {"429 queue_full"} and proxy.whole + len(proxy.errors) == 8 and proxy.whole, str(proxy)
    followed = (
        f"engine full: {len(ends.errors)} times its 429; proxy full: {len(proxy.errors)} times a 429 of the same shape"
    )
    return "8 streams at once where 2 fit", f"{followed}; all others whole", "0"


@trial
def strangers(cluster: Cluster) -> tuple[str, str, str]:
    """A program that reaches the ports of Ray could run any other on the nodes: without the token it runs none."""
    cluster.deploy(cluster.config(PLAIN, **FAST))
    cluster.running(1)
    assert "RUNNING" in cluster.status_in_a_bare_shell()
    asked = [
        httpx.put(f"{cluster.rest_url}/api/serve/applications/", json=cluster.config(PLAIN), timeout=60),
        httpx.post(f"{cluster.rest_url}/api/jobs/", json={"entrypoint": "true"}, timeout=60),
        httpx.get(f"{cluster.rest_url}/api/jobs/", headers={"Authorization": "Bearer another"}, timeout=60),
    ]
    statuses = [answer.status_code for answer in asked]
    assert set(statuses) <= {401, 403}, statuses
    cluster.running(1)
    followed = f"refused with {', '.join(map(str, sorted(set(statuses))))}"
    followed += "; `serve status` with the token works in a bare shell"
    return "an application and a job without the cluster's token, or with another", followed, "0"


@trial
def prefixes(cluster: Cluster) -> tuple[str, str, str]:
    """Prompts of several groups, all groups at the same time: how many replicas computed a group's beginning."""
    counts = []
    # A proxy keeps the router of an application's name for as long as it runs, so another router wants another name.
    for name, options in (("ours", {}), ("ray", {"request_router_config": {"request_router_class": RAY_ROUTER}})):
        replicas = two_replicas(cluster, name=name, **options)
        counts.append(asyncio.run(beginnings_computed(cluster.url, groups=6, turns=5)))
        if name == "ours":
            burst = asyncio.run(burst_that_begins_alike(cluster.url, replicas))
        cluster.clear()
    (computed, cached), (ray_computed, ray_cached) = counts
    assert computed <= 8 < ray_computed <= 12 and cached > ray_cached, counts
    assert burst[0], burst
    followed = (
        f"{computed} of 30 beginnings computed, {cached} tokens from the cache; with Ray's own router {ray_computed} "
        f"and {ray_cached}; of 8 equal prompts at once {burst[0]} and {burst[1]} to each replica"
    )
    return "6 groups of 5 prompts that begin alike, all groups at once, on 2 replicas", followed, "0"


def _beginning(group: int) -> str:
    return f"{group} {uuid.uuid4().hex} " + "import os; print(os.name) " * 30


async def beginnings_computed(url: str, groups: int, turns: int) -> tuple[int, int]:
    """The prompts that had nothing in the prefix cache of the replica that answered, and the tokens from the caches."""
    cached: list[int] = []
    beginnings = [_beginning(group) for group in range(groups)]

    async def ask(one: openai.AsyncOpenAI, text: str) -> None:
        answer = await one.completions.create(model=MODEL, prompt=text, max_tokens=8)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)

    async with client(url) as one:
        for turn in range(turns):  # the groups at the same time, as their users would ask
            await asyncio.gather(*(ask(one, f"{beginning}# {turn}") for beginning in beginnings))
    return cached.count(0), sum(cached)


async def burst_that_begins_alike(url: str, replicas: list[Replica]) -> list[int]:
    """Numbers of requests that each replica got, of eight with one beginning that came at the same time."""
    before = [replica.accepted() for replica in replicas]
    text, long = _beginning(0), {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    async with client(url) as one:
        await asyncio.gather(*(one.completions.create(model=MODEL, prompt=text, **long) for _ in range(8)))
    return sorted(replica.accepted() - number for replica, number in zip(replicas, before, strict=True))


@trial
def overhead(cluster: Cluster) -> tuple[str, str, str]:
    """Not a fault: what the way through the proxy costs. The same requests, in turns."""
    cluster.deploy(cluster.config(PLAIN, num_replicas=1, **FAST))
    direct = cluster.running(1)[0].url
    ways = {"directly": direct, "through the proxy": cluster.url}
    firsts: dict[str, list[float]] = {way: [] for way in ways}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(9):
        for way, url in ways.items():
            firsts[way].append(asyncio.run(first_and_rate(url, 1, 20))[0])
            rates[way].append(asyncio.run(first_and_rate(url, SLOTS, 200))[1])
    medians = {way: (statistics.median(firsts[way]) * 1000, statistics.median(rates[way])) for way in ways}
    shown = [f"{first:.1f} ms to the first token, {rate:.0f} tokens/s {way}" for way, (first, rate) in medians.items()]
    return f"1 and {SLOTS} streams of the demo model, medians of 9 turns", "; ".join(shown), "0"


async def first_and_rate(url: str, streams: int, tokens: int) -> tuple[float, float]:
    """Seconds to the first token of the first stream, and tokens per second of all together."""
    first = 0.0

    async def one_stream(one: openai.AsyncOpenAI, number: int) -> None:
        nonlocal first
        answer = await one.completions.create(
            model=MODEL, prompt=prompt(number), max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in answer:
            first = first or time.monotonic() - began

    async with client(url) as one:
        await one.models.list()  # opens a connection
        began = time.monotonic()
        await asyncio.gather(*(one_stream(one, number) for number in range(streams)))
        return first, streams * tokens / (time.monotonic() - began)
