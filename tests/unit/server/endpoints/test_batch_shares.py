"""Shares of API keys in batches: the next turn, limits that leave something to each, and how the disk names keys."""

from __future__ import annotations

import asyncio
import hashlib
import random

import pytest

from oarlock.server.endpoints.batches.key_shares import MAX_BYTES, BatchLimiter, FairLimiter, KeyNames, KeyQuota
from oarlock.server.http.api_keys import ApiKeys
from oarlock.server.http.server_state import ServerState


class Asking:
    """Tasks that hold a turn until they are told to give it back; `order`: who got one, in this order."""

    def __init__(self, limiter):
        self.limiter, self.order, self.tasks, self.ends = limiter, [], {}, {}

    def ask(self, owner, name, num_bytes=0):
        async def hold():
            await self.limiter.acquire(owner, num_bytes)
            self.order.append(name)
            await self.ends[name].wait()
            self.limiter.release(owner, num_bytes)

        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(hold())

    async def end(self, name):
        self.ends[name].set()
        await self.tasks[name]
        await settle()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_next_turn_goes_to_the_key_that_holds_the_fewest():
    async def scene():
        asking = Asking(FairLimiter(3))
        for number in range(9):
            asking.ask("a", f"a{number}")
        await settle()
        for number in range(3):
            asking.ask("b", f"b{number}")
        asking.ask("c", "c0")
        await settle()
        assert asking.order == ["a0", "a1", "a2"], "one key alone has all turns"
        for name in ("a0", "a1"):
            await asking.end(name)
        assert sorted(asking.order[3:]) == ["b0", "c0"]
        await asking.end("c0")
        await asking.end("a2")
        await asking.end("b0")
        assert asking.order[5] in ("a3", "b1") and sorted(asking.order[5:]) == ["a3", "a4", "b1"]
        for task in asking.tasks.values():
            task.cancel()
        await asyncio.gather(*asking.tasks.values(), return_exceptions=True)

    asyncio.run(scene())


def test_turns_that_are_given_up_go_to_others():
    async def scene():
        asking = Asking(FairLimiter(1))
        for name in ("first", "given up", "last"):
            asking.ask("a", name)
        await settle()
        asking.tasks["given up"].cancel()
        await settle()
        await asking.end("first")
        assert asking.order == ["first", "last"]
        await asking.end("last")
        assert asking.limiter.num_held == 0

    asyncio.run(scene())


def test_the_lines_of_requests_that_run_are_bounded_in_bytes():
    async def scene():
        asking = Asking(BatchLimiter(8, ServerState()))
        asking.ask("a", "huge", 2 * MAX_BYTES)
        asking.ask("a", "next", 1)
        asking.ask("b", "other", MAX_BYTES)
        await settle()
        assert asking.order == ["huge"], "one that is larger than the limit runs alone"
        await asking.end("huge")
        assert len(asking.order) == 2
        await asking.end(asking.order[1])
        assert sorted(asking.order) == ["huge", "next", "other"]
        await asking.end(asking.order[2])

    asyncio.run(scene())


@pytest.mark.parametrize("num_bytes", [0, MAX_BYTES // 8], ids=["rows", "bytes"])
@pytest.mark.parametrize("is_busy", [False, True], ids=["alone", "beside others"])
def test_the_first_request_of_a_key_waits_for_none_of_another(num_bytes, is_busy):
    async def scene():
        state = ServerState()
        asking = Asking(BatchLimiter(8, state, is_shared=True))
        if is_busy:
            state.enter()
        for number in range(20):
            asking.ask("a", f"a{number}", num_bytes)
        await settle()
        num_first = 4 if is_busy or num_bytes else 8
        assert len(asking.order) == num_first
        for name in ("b0", "b1", "c0"):
            asking.ask(name[0], name, num_bytes // 8)
        await settle()
        assert {"b0", "c0"} <= {*asking.order[num_first:]}, "the engine's rows are divided by the engine"
        await asking.end("b0")
        await asking.end("a0")
        assert "b1" in asking.order and f"a{num_first}" not in asking.order, "its turn comes before those of others"
        for task in asking.tasks.values():
            task.cancel()
        await asyncio.gather(*asking.tasks.values(), return_exceptions=True)

    asyncio.run(scene())


def test_beside_other_requests_half_of_the_rows_are_left():
    async def scene():
        state = ServerState()
        asking = Asking(BatchLimiter(8, state))
        state.enter()
        for number in range(10):
            asking.ask("a", number)
        await settle()
        assert len(asking.order) == 4
        state.leave()
        await settle()
        assert len(asking.order) == 8
        for task in asking.tasks.values():
            task.cancel()
        await asyncio.gather(*asking.tasks.values(), return_exceptions=True)

    asyncio.run(scene())


def test_a_key_leaves_as_much_as_it_takes():
    for seed in range(50):
        rng = random.Random(seed)
        quota = KeyQuota(1000, is_shared=True)
        for _ in range(200):
            owner, amount = rng.choice("abcde"), rng.randrange(1, 60)
            if rng.random() < 0.3:
                quota.add(owner, -min(amount, quota.held(owner)))
            elif quota.fits(owner, amount):
                quota.add(owner, amount)
                assert quota.held(owner) <= quota.limit - quota.total
        assert quota.fits("new", (quota.limit - quota.total) // 2), "something is left for the next key"
    alone = KeyQuota(1000, is_shared=False)
    assert alone.fits(None, 1000) and not alone.fits(None, 1001)


@pytest.mark.parametrize("order", [("one", "two"), ("two", "new", "one")])
def test_a_key_has_the_same_name_after_a_restart_which_tells_nothing_of_it(order):
    keys = ApiKeys([(f"key-{number}", key) for number, key in enumerate(order)])
    names = KeyNames(keys, b"salt of a directory")
    one = keys.find(b"Bearer one")
    assert names.of(one) == hashlib.scrypt(one.digest, salt=b"salt of a directory", n=4096, r=8, p=1, dklen=16).hex()
    assert names.of(one) != KeyNames(keys, b"another").of(one) and names.of(one)[:8] not in one.digest.hex()
    assert names.key_of(names.of(one)) is one and names.key_of("gone") is names.of(None) is None
