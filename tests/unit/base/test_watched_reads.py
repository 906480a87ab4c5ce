"""Reads of files that a disk delays or never ends: limits of silence, other reads meanwhile, and late ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from oarlock.base import watched_reads
from oarlock.base.watched_reads import STALL_S, OnRead, ReadStoppedError, StalledReadError, WatchedReads, run_watched


class Disk:
    """A disk that is silent until `responds` is set, and the clock of its reads."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.responds = threading.Event()
        self.begun = threading.Semaphore(0)  # released by each read that begins
        self.ended: list[BaseException | None] = []  # results of the notes of progress after the silence

    def monotonic(self) -> float:
        return self.now_s

    def read(self, on_read: OnRead) -> str:
        self.begun.release()
        assert self.responds.wait(30)
        try:
            on_read()
        except ReadStoppedError as error:
            self.ended.append(error)
            raise
        self.ended.append(None)
        return "content"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(watched_reads, "time", disk)
    monkeypatch.setattr(watched_reads, "_POLL_S", 0.001)
    return disk


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def begun(disk: Disk) -> Callable[[], bool]:
    return lambda: disk.begun.acquire(blocking=False)


def test_a_silent_read_ends_alone_and_its_thread_later(disk: Disk) -> None:
    async def run() -> None:
        reads = WatchedReads(at_once=2)
        waiting = asyncio.create_task(reads.run(disk.read, "/hung"))
        await until(begun(disk))
        disk.now_s += STALL_S - 1
        assert await reads.run(lambda on_read: "other", "/other") == "other" and not waiting.done()
        disk.now_s += 1
        with pytest.raises(StalledReadError, match="/hung for 30 seconds"):
            await waiting
        for _ in range(3):  # more than the permits, and no further thread
            with pytest.raises(StalledReadError):
                await reads.run(disk.read, "/hung")
        assert await reads.run(lambda on_read: "other", "/other") == "other" and not disk.begun.acquire(blocking=False)
        disk.responds.set()
        await until(lambda: disk.ended)
        assert isinstance(disk.ended[0], ReadStoppedError)
        await until(lambda: not any(thread.name == "files" for thread in threading.enumerate()))
        assert await reads.run(disk.read, "/hung") == "content"

    asyncio.run(run())


def test_a_slow_read_with_progress_may_take_any_time(disk: Disk) -> None:
    def slow(on_read: OnRead) -> int:
        for _ in range(5):
            disk.now_s += STALL_S - 1
            on_read()
        return 5

    assert asyncio.run(WatchedReads().run(slow, "/slow")) == run_watched(slow, "/slow") == 5
    with pytest.raises(ZeroDivisionError):
        run_watched(lambda on_read: 1 // 0, "/broken")


def test_a_cancelled_read_ends_at_its_next_piece_and_blocks_nobody(disk: Disk) -> None:
    """Neither the end of the event loop nor a further read of the same path."""

    async def run() -> None:
        reads = WatchedReads(at_once=1)
        waiting = asyncio.create_task(reads.run(disk.read, "/hung"))
        await until(begun(disk))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await reads.run(lambda on_read: "again", "/hung") == "again"

    asyncio.run(run())  # ends while the thread is blocked
    assert disk.ended == []
    disk.responds.set()
    asyncio.run(until(lambda: disk.ended))
    assert isinstance(disk.ended[0], ReadStoppedError)


def test_the_number_of_blocked_threads_is_limited(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_reads, "_MOST_BLOCKED", 2)

    async def run() -> None:
        reads = WatchedReads()
        for path in ("/a", "/b"):
            waiting = asyncio.create_task(reads.run(disk.read, path))
            await until(begun(disk))
            disk.now_s += STALL_S
            with pytest.raises(StalledReadError):
                await waiting
        with pytest.raises(StalledReadError):
            await reads.run(disk.read, "/c")
        assert not disk.begun.acquire(blocking=False)
        disk.responds.set()
        await until(lambda: len(disk.ended) == 2)
        await until(lambda: not any(thread.name == "files" for thread in threading.enumerate()))
        assert await reads.run(disk.read, "/c") == "content"

    asyncio.run(run())
