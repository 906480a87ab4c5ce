"""How a prompt begins, as the proxy says it, and the replica that follows from it; without Ray."""

import asyncio
import importlib
import json
import sys
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from oarlock_ray.prefix import BLOCK_CHARACTERS, HEADER, MAX_BLOCKS, MAX_BODY_BYTES, PromptPrefix, chain_of
from oarlock_ray.prefix_choice import SentPrefixes, ranked

LONG = "What a rank holds. " * 40


def body(**fields):
    return json.dumps(fields).encode()


@pytest.mark.parametrize("make", [lambda text: {"prompt": text}, lambda text: {"messages": [{"content": text}]}])
def test_prompts_share_hashes_as_far_as_they_share_text(make):
    short, longer = chain_of(body(**make(LONG))), chain_of(body(**make(LONG + "And more. " * 40)))
    other = chain_of(body(**make(LONG[:300] + "another" + LONG[300:])))
    assert len(short) >= len(LONG) // BLOCK_CHARACTERS
    assert longer[: len(short) - 1] == short[:-1] and len(longer) > len(short)  # the last block has the end of a list
    shared = [one == two for one, two in zip(short, other, strict=False)]
    assert all(shared[: 300 // BLOCK_CHARACTERS]) and not any(shared[300 // BLOCK_CHARACTERS + 1 :])


def test_the_order_of_fields_and_other_parameters_change_nothing():
    one = chain_of(body(temperature=1, messages=[{"role": "user", "content": LONG}], tools=[], stream=True))
    assert one == chain_of(body(tools=[], stream=False, messages=[{"role": "user", "content": LONG}]))
    assert one != chain_of(body(tools=[{"type": "function"}], messages=[{"role": "user", "content": LONG}]))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1]", b"null", b'{"name": "x"}', b"[" * 100_000, b'"\\ud800"', body(prompt="short"), b"\xff" * 999],
)
def test_requests_without_a_long_prompt_have_no_hash_chain(text):
    assert chain_of(text) == []


def test_a_chain_has_an_end():
    assert len(chain_of(body(prompt="x" * 300_000))) == MAX_BLOCKS
    assert len(chain_of(body(prompt="\ud800" * 300))) == 300 // BLOCK_CHARACTERS


def through(pieces, headers=(), method="POST"):
    """The headers and the messages that reach the proxy, for a body that comes in these pieces."""
    seen = {}
    last = len(pieces) - 1
    coming = [{"type": "http.request", "body": one, "more_body": at < last} for at, one in enumerate(pieces)]

    async def app(scope, receive, send):
        seen["headers"] = scope["headers"]
        seen["messages"] = [await receive() for _ in range(len(pieces) + 1)]

    async def receive():
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    asyncio.run(PromptPrefix(app)({"type": "http", "method": method, "headers": [*headers]}, receive, None))
    return seen["headers"], seen["messages"]


@pytest.mark.parametrize("size", [7, 100, 10_000])
def test_the_body_arrives_as_it_was_sent_and_the_header_is_ours(size):
    whole = body(prompt=LONG)
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    headers, messages = through(pieces, [(b"X-Session-Id", b"theirs"), (b"a", b"b")])
    assert headers == [(b"a", b"b"), (HEADER, ",".join(chain_of(whole)).encode())]
    assert [one.get("body") for one in messages] == [*pieces, None] and messages[-1] == {"type": "http.disconnect"}


def test_a_body_over_the_bound_passes_without_a_chain():
    pieces = [body(prompt=LONG)[:-2], *([b" " * (MAX_BODY_BYTES // 2)] * 3), b'"}']
    headers, messages = through(pieces)
    assert headers == [] and [one.get("body") for one in messages] == [*pieces, None]


def test_a_client_that_leaves_within_its_body_is_reported_as_it_is():
    gone = {"type": "http.disconnect"}
    seen = []

    async def app(scope, receive, send):
        seen.extend([await receive(), await receive()])

    async def receive(messages=[{"type": "http.request", "body": b"{", "more_body": True}, gone, gone]):  # noqa: B006
        return messages.pop(0)

    asyncio.run(PromptPrefix(app)({"type": "http", "method": "POST", "headers": []}, receive, None))
    assert seen == [{"type": "http.request", "body": b"{", "more_body": True}, gone]


def test_a_prompt_follows_its_beginning_until_that_replica_is_too_busy():
    sent = SentPrefixes()
    chain = ["1", "2", "3"]
    sent.add(["1", "2"], "a")
    sent.add(["1"], "b")
    assert sent.matches(chain) == {"a": 2, "b": 1} and sent.matches(["9", "2"]) == {}
    assert ranked(chain, sent.matches(chain), {"c": 0, "b": 2, "a": 4}, slack=4) == ["a", "b", "c"]
    assert ranked(chain, sent.matches(chain), {"c": 0, "b": 2, "a": 5}, slack=4) == ["b", "c", "a"]
    assert ranked([], {}, {"c": 2, "b": 0, "a": 1}, slack=4) == ["b", "a", "c"]
    assert ranked(chain, {}, {}, slack=4) == []


def test_new_beginnings_are_spread_and_every_proxy_chooses_alike():
    loads = dict.fromkeys("abcd", 0)
    first = {chain: ranked([chain], {}, loads, 4)[0] for chain in map(str, range(200))}
    assert {replica: 25 < list(first.values()).count(replica) < 75 for replica in loads} == dict.fromkeys(loads, True)
    fewer = {chain: ranked([chain], {}, dict.fromkeys("abc", 0), 4)[0] for chain in first}
    assert all(fewer[chain] == replica for chain, replica in first.items() if replica != "d")


def test_remembered_prefixes_are_bounded_and_removed_with_their_replica():
    sent = SentPrefixes(max_hashes=4)
    sent.add(["1", "2", "3"], "a")
    sent.add(["1", "5", "6"], "b")
    assert sent.matches(["1", "2", "3"]) == {"a": 2, "b": 1} and sent.matches(["1", "5", "6"])["b"] == 3
    sent.keep({"a"})
    assert sent.matches(["1", "5", "6"]) == {"a": 1}


class ReplicaId(NamedTuple):
    unique_id: str


class RoutesBeforeItSends:
    """Stands in for Ray's router where it is unfortunate: a burst is given replicas before any of it is sent, and what
    the replicas report stays as it was."""

    def __init__(self):
        self.replica_queue_len_cache = {}

    async def _choose_replica_for_request(self, pending_request, *, is_retry=False):
        (first, *_), *_ = await self.choose_replicas(REPLICAS, pending_request)
        await asyncio.sleep(0)
        return first


REPLICAS = [SimpleNamespace(replica_id=ReplicaId(name), max_ongoing_requests=20) for name in "ab"]


def test_a_burst_that_begins_alike_leaves_a_replica_that_has_enough(monkeypatch):
    names = dict.fromkeys(["PendingRequest", "ReplicaID", "RunningReplica"], object)
    ray = SimpleNamespace(RequestRouter=RoutesBeforeItSends, **names)
    for name in ("ray", "ray.serve", "ray.serve.request_router"):
        monkeypatch.setitem(sys.modules, name, ray)
    monkeypatch.delitem(sys.modules, "oarlock_ray.prefix_router", raising=False)
    router = importlib.import_module("oarlock_ray.prefix_router").PrefixRouter()
    monkeypatch.delitem(sys.modules, "oarlock_ray.prefix_router")

    def request(number):
        metadata = SimpleNamespace(internal_request_id=str(number), session_id="1,2")
        return router._choose_replica_for_request(SimpleNamespace(metadata=metadata, routing_context=SimpleNamespace()))

    async def burst(number):
        return [one.replica_id for one in await asyncio.gather(*map(request, range(number)))]

    async def cancelled():
        task = asyncio.ensure_future(request("cancelled"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    first, more = asyncio.run(burst(8)), asyncio.run(burst(2))
    counts = Counter(one.unique_id for one in first)
    assert sorted(counts.values()) == [2, 6], "with `slack` 4"
    assert {one.unique_id for one in more} == set("ab"), "those that were sent count until they end"
    for one in first + more:
        router.on_request_completed(one, "")
    asyncio.run(cancelled())
    assert Counter(one.unique_id for one in asyncio.run(burst(8))) == counts, "nothing is left of what has ended"
