"""Names of LoRA adapters while loads end, are replaced or are cancelled, and other calls act on the same names."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from oarlock.base import watched_reads
from oarlock.base.errors import StartupError
from oarlock.engine.errors import RequestError, StalledAdapterError
from oarlock.engine.types import AdapterInfo
from oarlock.server.config.settings import make_settings
from oarlock.server.hub import adapter_path
from oarlock.server.hub.adapter_path import AdapterPaths
from oarlock.server.llm import adapters as served_adapters
from oarlock.server.llm.adapters import ServedAdapter, ServedAdapters
from oarlock.server.llm.generation import Engine


class SlowEngine:
    """An engine that has a name from the moment of its addition, as real engines, and replies a few turns later."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # name -> directory
        self.digests: dict[str, str] = {}
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def add_adapter(self, name: str, directory: str) -> None:
        digest = (Path(directory) / "adapter_config.json").read_text()
        if name in self.names and self.digests[name] != digest:
            raise RequestError(f"The name {name!r} is taken by another adapter.", "lora_name", "adapter_exists")
        self.names[name], self.digests[name] = directory, digest
        await self.may_load.wait()

    async def remove_adapter(self, name: str) -> int:
        known = self.names.pop(name, None)
        for _ in range(3):
            await asyncio.sleep(0)
        if known is None:
            raise RequestError(f"There is no adapter {name!r}.", "model", "adapter_not_found")
        return 0

    async def list_adapters(self) -> list[AdapterInfo]:
        return [AdapterInfo(name, self.digests[name], path, "ready", 0, 0) for name, path in self.names.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(name)
    return tmp_path


def served(engine: SlowEngine, folder: Path) -> ServedAdapters:
    paths = AdapterPaths(make_settings({"enable_lora": True, "lora_dir": str(folder)}))
    return ServedAdapters(cast("Engine", engine), ("model",), paths, "model".__eq__)


async def begun(
    adapters: ServedAdapters, engine: SlowEngine, path: object, *, in_place: bool = False
) -> asyncio.Task[ServedAdapter]:
    """Begin a load of the adapter `own`, and wait until the engine has its name."""
    before = set(engine.names)
    task = asyncio.create_task(adapters.load("own", str(path), in_place=in_place))
    while set(engine.names) == before:
        await asyncio.sleep(0.001)
    return task


def test_an_unload_during_a_replacement_forgets_both_contents(folder):
    async def run() -> None:
        engine = SlowEngine()
        adapters = served(engine, folder)
        await adapters.load("own", str(folder / "one"))
        engine.may_load.clear()
        replacing = await begun(adapters, engine, folder / "two", in_place=True)
        await adapters.unload("own")
        assert engine.names == {} and adapters.list() == []
        with pytest.raises(RequestError, match="was unloaded by another request"):
            await replacing
        engine.may_load.set()
        await adapters.load("own", str(folder / "one"))
        await adapters.load("own", str(folder / "two"), in_place=True)
        assert engine.names == {"own": str(folder / "two")}
        (folder / "one" / "adapter_config.json").write_text("two")  # a copy, from which later loads read
        await adapters.load("own", str(folder / "one"), in_place=True)
        assert engine.names == {"own": str(folder / "one")}
        assert [(one.digest, one.directory) for one in adapters.list()] == [("two", str(folder / "one"))]

    asyncio.run(run())


def test_two_unloads_of_a_load_cancel_it_once(folder):
    async def run() -> None:
        engine = SlowEngine()
        adapters = served(engine, folder)
        engine.may_load.clear()
        loading = await begun(adapters, engine, folder / "one")
        waiting = asyncio.create_task(adapters.use("own"))
        first = asyncio.create_task(adapters.unload("own"))
        while "own" in engine.names:
            await asyncio.sleep(0)
        await asyncio.gather(first, adapters.unload("own"))
        for task in (loading, waiting):
            with pytest.raises(RequestError, match="was unloaded by another request"):
                await task
        assert engine.names == {} and adapters.list() == []

    asyncio.run(run())


def test_an_unload_forgets_an_adapter_whose_load_ends_at_that_moment(folder):
    async def run() -> None:
        engine = SlowEngine()
        adapters = served(engine, folder)
        engine.may_load.clear()
        loading = await begun(adapters, engine, folder / "one")
        engine.may_load.set()  # the load ends in the next turn of the loop
        await adapters.unload("own")
        assert engine.names == {} and adapters.list() == []
        await loading

    asyncio.run(run())


def test_a_use_in_the_turn_in_which_an_unload_ends_does_not_wait_forever(folder):
    async def used(adapters: ServedAdapters, turns: int) -> str:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await adapters.use("one")

    def too_long(*_: object) -> None:
        raise AssertionError("the event loop hangs")

    async def run() -> None:
        adapters = served(SlowEngine(), folder)
        await adapters.use("one")
        unloading = asyncio.create_task(adapters.unload("one"))
        uses = [asyncio.create_task(used(adapters, turns)) for turns in range(12)]
        await unloading
        assert {await task for task in uses} == {"one"}

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(10)
    try:
        asyncio.run(run())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_slow_disk_delays_only_requests_that_need_it(folder, monkeypatch):
    is_ready, num_calls, found = threading.Event(), 0, AdapterPaths.all

    def slow(self: AdapterPaths, *given: str) -> object:
        nonlocal num_calls
        num_calls += 1
        assert is_ready.wait(20)
        return str(folder / given[0]) if given else found(self)

    async def run() -> None:
        adapters = served(SlowEngine(), folder)
        await adapters.load("own", str(folder / "one"))
        with monkeypatch.context() as patch:
            patch.setattr(AdapterPaths, "find", slow)
            using = asyncio.create_task(adapters.use("two"))
            while not num_calls:
                await asyncio.sleep(0.001)
            assert [await adapters.find(name) for name in ("model", "a/b", " a", "a\n", "x" * 129)] == [None] * 5
            assert await adapters.use("own") == "own" and num_calls == 1 and not using.done()
            is_ready.set()
            assert await using == "two"
        is_ready.clear()
        monkeypatch.setattr(AdapterPaths, "all", slow)
        listings = [asyncio.create_task(adapters.available()) for _ in range(9)]
        await asyncio.sleep(0)
        is_ready.set()
        for listing in listings:
            assert [adapter.name for adapter in await listing] == ["own", "two", "one"]
        assert num_calls == 2

    asyncio.run(run())


def test_a_hung_directory_delays_only_names_that_may_be_there(folder, monkeypatch):
    clock = SimpleNamespace(now_s=1.0, monotonic=lambda: clock.now_s)
    begun, responds, found = threading.Semaphore(0), threading.Event(), AdapterPaths.find

    def blocked(self: AdapterPaths, name: str) -> str | None:
        begun.release()
        assert responds.wait(30)
        return found(self, name)

    monkeypatch.setattr(watched_reads, "time", clock)
    monkeypatch.setattr(watched_reads, "_POLL_S", 0.001)
    monkeypatch.setattr(served_adapters, "_LISTING_S", 0.001)

    async def run() -> ServedAdapters:
        adapters = served(SlowEngine(), folder)
        await adapters.load("own", str(folder / "one"))
        while len(await adapters.available()) < 3:  # within the time of this test, a list may come later
            await asyncio.sleep(0.001)
        monkeypatch.setattr(AdapterPaths, "find", blocked)
        finding = asyncio.create_task(adapters.use("two"))
        while not begun.acquire(blocking=False):
            await asyncio.sleep(0.001)
        assert [one.name for one in await adapters.available()] == ["own", "one", "two"]
        assert await adapters.use("own") == "own" and not finding.done()
        clock.now_s += watched_reads.STALL_S
        for use in (finding, adapters.use("two"), adapters.load("other", "one", is_trusted=False)):
            with pytest.raises(StalledAdapterError, match=f"from {folder} for 30 seconds. Check"):
                await use
        assert [one.name for one in await adapters.available()] == ["own", "one", "two"]
        return adapters

    asyncio.run(run())  # ends while a thread is blocked
    responds.set()


def test_a_hung_disk_ends_the_start(folder, monkeypatch):
    clock = SimpleNamespace(now_s=1.0, monotonic=lambda: clock.now_s)
    responds = threading.Event()

    def blocked(path: Path) -> None:
        clock.now_s += watched_reads.STALL_S
        assert responds.wait(30)

    monkeypatch.setattr(watched_reads, "time", clock)
    monkeypatch.setattr(adapter_path, "_trusted", blocked)
    settings = make_settings({"enable_lora": True, "lora_modules": [f"own={folder / 'one'}"]})
    with pytest.raises(StartupError, match=f"own: nothing could be read from {folder / 'one'} for 30 seconds"):
        asyncio.run(adapter_path.find_start_adapters(settings, lambda phase, fraction, detail: None))
    responds.set()
