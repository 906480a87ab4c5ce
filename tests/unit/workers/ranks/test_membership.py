"""Hosts meet in torch's store: all are there and agree, or each ends with the same cause. Hosts are threads here."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from oarlock.base.errors import StartupError
from oarlock.workers.config import NodesConfig
from oarlock.workers.distributed.topology import StoreAddress
from oarlock.workers.ranks import membership as module
from oarlock.workers.ranks.membership import Membership, join
from oarlock.workers.ranks.nodes import Ending, first_difference, own_interface
from tests.e2e.running import eventually, free_port

FACTS = {"setting": {"dtype": "float32"}}


def silent(text: str) -> None:
    """Ignore the progress."""


def nodes_of(number: int, timeout_s: float = 60.0) -> list[NodesConfig]:
    head = NodesConfig(0, number, "127.0.0.1", free_port(), None, timeout_s)
    return [replace(head, node_rank=rank) for rank in range(number)]


def joined(
    threads: ThreadPoolExecutor, nodes: NodesConfig, facts: Any = FACTS, on_waiting: Callable = silent
) -> Future:
    return threads.submit(join, nodes, facts, on_waiting)


@pytest.mark.slow
def test_three_hosts_meet_whoever_comes_first_and_read_the_first_ending() -> None:
    head, *others = nodes_of(3)
    with ThreadPoolExecutor(3) as threads:
        waiting = [joined(threads, nodes) for nodes in others]
        members: list[Membership] = [joined(threads, head).result(60), *(each.result(60) for each in waiting)]
    assert [member.names for member in members] == [members[0].names] * 3
    assert [name[:6] for name in members[0].names] == ["node 0", "node 1", "node 2"]
    endings, both = [], threading.Barrier(3)

    def on_ending(ending: Ending | str) -> None:
        endings.append(ending)
        both.wait(60)

    for member in members[1:]:
        member.watch(on_ending)
    first = members[0].end(Ending(5, "the first"))
    assert members[1].end(Ending(6, "what follows")) == first, "the first cause stays"
    both.wait(60)
    assert endings == [first, first]


def test_a_difference_ends_the_start_everywhere_with_both_values() -> None:
    head, *others = nodes_of(3)
    other = {"setting": {"dtype": "bfloat16"}}
    with ThreadPoolExecutor(3) as threads:
        starts = [joined(threads, head), joined(threads, others[0]), joined(threads, others[1], other)]
        causes = []
        for start in starts:
            with pytest.raises(StartupError) as caught:
                start.result(60)
            causes.append((caught.value.cause, caught.value.fix))
    assert causes == [causes[0]] * 3
    assert "differ in the setting dtype: float32 on node 0" in causes[0][0] and "bfloat16 on node 2" in causes[0][0]


@pytest.mark.slow
def test_a_host_that_does_not_come_is_named_on_those_that_are_there() -> None:
    head, node, _ = nodes_of(3, timeout_s=3.0)
    with ThreadPoolExecutor(2) as threads:
        for start in [joined(threads, head), joined(threads, node)]:
            with pytest.raises(StartupError, match="node 2 of 3 did not join in time"):
                start.result(60)


@pytest.mark.slow
def test_a_host_that_left_while_others_were_awaited_may_come_again() -> None:
    head, node, last = nodes_of(3)
    seen: list[str] = []

    def leave(text: str) -> None:
        if "waiting for" in text:
            raise KeyboardInterrupt

    with ThreadPoolExecutor(3) as threads:
        starts = [joined(threads, head, on_waiting=seen.append)]
        with pytest.raises(KeyboardInterrupt):
            join(node, FACTS, leave)
        eventually(lambda: "waiting for nodes 1, 2 of 3" in "".join(seen[-1:]), 60, "node 1 has left")
        starts += [joined(threads, node), joined(threads, last)]
        assert all(len(start.result(60).names) == 3 for start in starts)


@pytest.mark.slow
def test_the_later_of_two_hosts_with_one_number_stays() -> None:
    head, node, _ = nodes_of(3, timeout_s=8.0)
    with ThreadPoolExecutor(3) as threads:
        start = joined(threads, head)
        there = threading.Event()
        first = joined(threads, node, on_waiting=lambda text: there.set() if "waiting for" in text else None)
        assert there.wait(60)
        second = joined(threads, node)
        with pytest.raises(
            StartupError, match=r"has joined with the --node-rank of this host .*, which is node 1 too"
        ) as caught:
            first.result(60)
        assert "--node-rank" in caught.value.fix
        for other in (start, second):
            with pytest.raises(StartupError, match="node 2 of 3 did not join"):
                other.result(60)


def test_a_node_names_the_difference_even_if_the_head_has_gone_meanwhile(monkeypatch) -> None:
    """A loaded host may take longer to compare the facts than the head waits for it."""
    head, node, _ = nodes_of(3)
    host = {"host": "head", "address": "127.0.0.1", "start": "a", "facts": {"number of": {"nodes": 3}, **FACTS}}
    heads = [dist.TCPStore("127.0.0.1", head.port, is_master=True, wait_for_workers=False)]
    dist.PrefixStore("oarlock", heads[0]).set("hosts/0", json.dumps(host))

    def client() -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", head.port, is_master=False, wait_for_workers=False)

    def compare_late(*facts: Any) -> StartupError | None:
        heads.clear()  # the store ends with its last reference
        return first_difference(*facts)

    monkeypatch.setattr(module, "first_difference", compare_late)
    member = Membership(node, own_interface(node), client, StoreAddress("127.0.0.1", head.port, "oarlock"))
    with pytest.raises(StartupError, match="differ in the setting dtype"):
        member.agree({"setting": {"dtype": "bfloat16"}}, time.monotonic() + 60, silent)
    assert not heads
