"""Several engine processes with fake ranks behind one interface: choices, ends, restarts, and what is given up."""

import asyncio
import contextlib
import json
import os
import random
import signal
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine import replicas
from oarlock.engine.client import EngineClient
from oarlock.engine.config import EngineConfig
from oarlock.engine.engine_process import EngineProcess
from oarlock.engine.errors import EngineDeadError, RequestError, UnavailableError
from oarlock.engine.kv_cache.block_events import salt_with_adapter
from oarlock.engine.lora.registry import FAILED, IN_USE, UNKNOWN
from oarlock.engine.replicas import PrefixIndex, Replicas, start_engine
from oarlock.engine.types import KINDS, AdapterInfo, FinishReason, TokenEvent
from oarlock.workers.adapter_digest import adapter_digest
from tests.unit.engine.engine_fakes import expected_tokens, make_config, make_request, root_of
from tests.unit.engine.pooling_fakes import expected_vectors, make_pooling_request

pytestmark = pytest.mark.slow

ENGINE = str(Path(__file__).parent / "fake_engine.py")


def config(replicas: int = 2, config: EngineConfig | None = None, **scenario) -> EngineConfig:
    config = config or make_config()
    worker = config.worker.with_(model_path=json.dumps(scenario), data_parallel_size=replicas)
    return replace(config, worker=worker)


@contextlib.asynccontextmanager
async def started(asked: EngineConfig, on_progress=lambda *_: None) -> AsyncIterator[Replicas]:
    running = await start_engine(asked, on_progress, start_process=lambda: EngineProcess(1, command=[ENGINE]))
    assert isinstance(running, Replicas)
    try:
        yield running
    finally:
        await running.close()
        assert all(one.client._process.poll() is not None for one in running.replicas)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scene(), 100)

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def collect(running: Replicas, request) -> list[TokenEvent]:
    return [event async for event in running.choose(request).generate(request)]


def test_vectors_come_from_any_replica_and_an_abort_reaches_it() -> None:
    async def scene() -> None:
        async with started(config(2, make_config(max_num_batched_tokens=4), step_s=0.004)) as running:
            requests = [
                make_pooling_request(running.new_request_id(), [number % 7, *range(number)], KINDS[number % 5])
                for number in range(1, 25)
            ]
            answers = await asyncio.gather(*(collect(running, request) for request in requests))
            for request, events in zip(requests, answers, strict=True):
                vectors = array("f", [number for event in events for number in event.pooled])
                assert vectors.tobytes() == array("f", expected_vectors(request)).tobytes()
                assert [event.finish_reason for event in events[-1:]] == [FinishReason.STOP]
                assert not any(event.finish_reason or event.token_ids for event in events[:-1])
            finished = [(await one.stats()).finished["stop"] for one in running.replicas]
            assert sum(finished) == 24 and min(finished) > 0
            left = make_pooling_request(running.new_request_id(), range(60), "token")
            events = running.choose(left).generate(left)
            assert (await anext(events)).pooled
            await events.aclose()
            while sum([(await one.stats()).finished["abort"] for one in running.replicas]) == 0:
                await asyncio.sleep(0.01)
            assert [(await one.stats()).num_blocks_held for one in running.replicas] == [0, 0]

    run(scene)


def kill(running: Replicas, number: int) -> None:
    os.kill(running.replicas[number].client.pid, signal.SIGKILL)


def test_requests_are_dealt_to_all_and_text_does_not_depend_on_where_they_went() -> None:
    async def scene() -> None:
        phases = []
        async with started(config(2), lambda *seen: phases.append(seen)) as running:
            assert phases[-1] == ("loading", 1.0, "") and phases == sorted(phases)
            assert running.info.data_parallel_size == 2 and running.is_alive and running.exit_code is None
            requests = [make_request(running.new_request_id(), [1, 2, at % 5], max_tokens=12) for at in range(30)]
            assert len({request.request_id for request in requests}) == 30
            answers = await asyncio.gather(*(collect(running, request) for request in requests))
            for request, events in zip(requests, answers, strict=True):
                assert [token for event in events for token in event.token_ids] == expected_tokens(request)
            assert [one.load.num_chosen for one in running.replicas] == [15, 15]
            assert all(one.load.weight == 0 for one in running.replicas) and running.num_open == 0
            stats = [await one.stats() for one in running.replicas]
            assert [one.num_accepted for one in stats] == [15, 15]
            assert await running.reset_prefix_cache() > 0

    run(scene)


def test_one_replica_is_a_plain_engine() -> None:
    async def scene() -> None:
        asked = config(1)
        one = await start_engine(asked, lambda *_: None, start_process=lambda: EngineProcess(1, command=[ENGINE]))
        assert isinstance(one, EngineClient) and one.choose(make_request(1, [1])) is one and one.replicas == (one,)
        await one.close()

    run(scene)


def test_a_prompt_goes_where_its_beginning_is_cached_and_finds_as_much_there_as_was_expected() -> None:
    async def scene() -> None:
        async with started(config(2)) as running:
            draw = random.Random(3)
            beginnings = [[draw.randrange(60) for _ in range(24)] for _ in range(4)]
            went: dict[int, int] = {}
            for at in range(40):
                group = draw.randrange(4)
                rest = [draw.randrange(60) for _ in range(draw.randrange(6))]
                request = make_request(running.new_request_id(), beginnings[group] + rest, max_tokens=9)
                expected = running.prefixes.num_cached(request.prompt_token_ids, request.cache_salt)
                handle = running.choose(request)
                assert handle.number == went.setdefault(group, handle.number), "where the group began"
                events = [event async for event in handle.generate(request)]
                assert events[0].num_cached_tokens == expected[handle.number] >= (20 if at > 20 else 0)
                assert expected[1 - handle.number] == 0
                salted = replace(request, cache_salt=b"of another")
                assert running.prefixes.num_cached(salted.prompt_token_ids, salted.cache_salt) == [0, 0]
            assert sorted(went.values()) == [0, 0, 1, 1]
            cached = [(await one.stats()).num_blocks_cached for one in running.replicas]  # what was told came before
            held = [running.prefixes.held(number) for number in (0, 1)]
            assert [len(hashes) for hashes in held] == cached and min(cached) > 0, "exactly what the pools have"
            assert await running.reset_prefix_cache() == len(held[0]) + len(held[1])
            await until(lambda: not running.prefixes.held(0) and not running.prefixes.held(1))

    run(scene)


def test_the_load_of_a_replica_follows_from_its_requests() -> None:
    """Requests of one prompt stay together; it counts once, until a first event; a full replica is skipped."""

    async def scene() -> None:
        async with started(config(2, make_config(max_waiting_requests=8), step_s=0.05)) as running:
            requests = [make_request(running.new_request_id(), [3] * 20, max_tokens=8) for _ in range(4)]
            handle = running.choose(requests[0])
            streams = [handle.generate(request) for request in requests]
            firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.sleep(0)  # they are sent, and nothing was read since
            first, second = running.replicas
            assert (first.load.num_open, first.load.num_waiting_tokens, second.load.num_open) == (4, 20, 0)
            await asyncio.gather(*firsts)
            assert first.load.num_waiting_tokens == 0
            other = running.choose(make_request(running.new_request_id(), [4]))
            assert (handle.number, other.number) == (0, 1)
            for stream in streams:
                await stream.aclose()
            assert first.load.num_open == 0
            second.load.num_open = second.client.info.max_num_seqs + 8
            first.load.num_waiting_tokens = 10**6 - 1  # far beyond the bound on loads
            assert running.choose(make_request(1, [1])).number == 0
            first.load.num_waiting_tokens = 10**6
            assert running.choose(make_request(1, [1])).number == 1, "where all are full, one of them says so"
            assert running.choose(make_request(1, [1]), 0).number == 0, "as the caller says, whatever it has to do"

    run(scene)


def test_an_engine_without_a_prefix_cache_is_not_asked_what_is_in_it() -> None:
    assert make_config().of_replica(1, 0).reports_blocks
    assert not make_config(enable_prefix_caching=False).of_replica(1, 0).reports_blocks


def test_a_replica_that_dies_is_started_again_and_no_other_notices() -> None:
    async def scene() -> None:
        async with started(config(2, step_s=0.02)) as running:
            requests = [make_request(running.new_request_id(), [at], max_tokens=40) for at in range(2)]
            streams = [running.choose(request).generate(request) for request in requests]
            begun = [await anext(stream) for stream in streams]
            pid = running.replicas[0].client.pid
            await until(lambda: bool(running.prefixes.held(0)))
            kill(running, 0)
            with pytest.raises(UnavailableError, match="send the request again") as lost:
                async for _ in streams[0]:
                    pass
            assert lost.value.code == "replica_lost"
            assert running.is_alive and [one.is_alive for one in running.replicas] == [False, True]
            assert (await running.replicas[0].stats()).state == "dead"
            late = make_request(running.new_request_id(), [9], max_tokens=4)
            assert running.choose(late).number == 1, "requests go where they are served"
            with pytest.raises(UnavailableError, match="Replica 0, which the request selects, is not running now"):
                running.choose(late, 0)
            assert running.choose(late, 1).number == 1
            rest = [event async for event in streams[1]]
            tokens = [token for event in [begun[1], *rest] for token in event.token_ids]
            assert tokens == expected_tokens(requests[1])
            await until(lambda: running.replicas[0].is_alive)
            assert not running.prefixes.held(0), "what it held is forgotten"
            assert running.replicas[0].client.pid != pid and running.exit_code is None and not running.lost.is_set()
            again = make_request(running.new_request_id(), [0], max_tokens=40)
            handle = running.choose(again)
            assert handle.number == 0, "the least busy one"
            assert [token for e in [event async for event in handle.generate(again)] for token in e.token_ids] == (
                expected_tokens(again)
            )
            assert running.replicas[0].load.weight == 0

    run(scene)


def test_a_replica_that_dies_too_often_is_given_up_and_the_others_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "MAX_DEATHS", 2)

    async def scene() -> None:
        async with started(config(2)) as running:
            for _ in range(2):
                await until(lambda: running.replicas[1].is_alive)
                kill(running, 1)
                await until(lambda: not running.replicas[1].is_alive)
            await running.lost.wait()
            assert running.is_alive and not running.dead.is_set() and running.exit_code == 5
            assert "died too often" in (running.death_cause or "")
            request = make_request(running.new_request_id(), [1], max_tokens=4)
            assert (await collect(running, request))[-1].finish_reason is FinishReason.LENGTH

    run(scene)


GARBAGE = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(b'no frame' * 99)"
HALF = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(b'\\0\\0')"


def raises(error: BaseException) -> Callable[[], list[str]]:
    def start() -> list[str]:
        raise error

    return start


@pytest.mark.parametrize(
    ("second", "cause"),
    [
        (lambda: ["-c", "raise SystemExit(3)"], "could not be started again: "),
        pytest.param(lambda: ["-c", GARBAGE], "could not be started again: ", marks=pytest.mark.product),
        (lambda: ["-c", HALF], "could not be started again: "),
        (raises(BlockingIOError(11, "Resource temporarily unavailable")), "could not be started again: "),
        (raises(StartupError("No memory.", "Buy some.")), "could not be started again: No memory."),
        (raises(KeyError("a mistake of ours")), "could not be supervised: KeyError: 'a mistake of ours'"),
    ],
    ids=["ends", "sends no frame", "sends half a frame", "no process", "no memory", "a bug"],
)
def test_a_replica_that_does_not_start_again_is_given_up(second: Callable[[], list[str]], cause: str) -> None:
    async def scene() -> None:
        commands = iter([lambda: [ENGINE], lambda: [ENGINE], second])
        running = await start_engine(
            config(2), lambda *_: None, start_process=lambda: EngineProcess(1, command=next(commands)())
        )
        assert isinstance(running, Replicas)
        try:
            kill(running, 1)
            await running.lost.wait()
            assert running.is_alive and running.exit_code == 5, "the code of the death: a new start may mend it"
            assert cause in (running.death_cause or ""), running.death_cause
            assert [one.is_alive for one in running.replicas] == [True, False] and not running.dead.is_set()
            kill(running, 0)
            await running.dead.wait()
        finally:
            await running.close()

    run(scene)


def test_a_replica_whose_end_we_fail_to_handle_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with started(config(2)) as running:
            monkeypatch.setattr(running.prefixes, "clear", None)
            kill(running, 1)
            await running.lost.wait()
            assert "could not be supervised: TypeError" in (running.death_cause or "")
            assert running.is_alive and not running.dead.is_set() and running.exit_code == 5

    run(scene)


def test_without_any_replica_all_is_dead() -> None:
    async def scene() -> None:
        async with started(config(2)) as running:
            for number in (0, 1):
                os.kill(running.replicas[number].client.pid, signal.SIGSTOP)
            for number in (0, 1):
                kill(running, number)
            await running.dead.wait()
            assert not running.is_alive and running.exit_code == 5 and "SIGKILL" in (running.death_cause or "")
            with pytest.raises(EngineDeadError):
                running.choose(make_request(1, [1]))

    run(scene)


def test_a_start_that_fails_on_one_replica_fails_and_leaves_none() -> None:
    async def scene() -> None:
        processes: list[EngineProcess] = []

        def make() -> EngineProcess:
            processes.append(EngineProcess(1, command=[ENGINE]))
            return processes[-1]

        pids = []
        original = EngineProcess.take

        def take(self: EngineProcess):
            taken = original(self)
            pids.append(taken[0])
            return taken

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineProcess, "take", take)
            with pytest.raises(StartupError, match="7 heads"):
                await start_engine(config(2, fails="startup"), lambda *_: None, start_process=make)
        assert len(pids) == 2 and all(process.wait(30) is not None for process in pids)

    run(scene)


def test_each_replica_records_into_its_own_file_and_so_does_each_start(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "run.rec"
        async with started(config(2, make_config(record_path=str(path)))) as running:
            kill(running, 0)
            await until(lambda: not running.replicas[0].is_alive)
            await until(lambda: running.replicas[0].is_alive)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["run.rec.0", "run.rec.0.1", "run.rec.1"]

    run(scene)


def test_replicas_have_the_same_adapters_also_after_a_death(tmp_path: Path) -> None:
    for name in ("poems", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_bytes(b"{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())

    async def scene() -> None:
        async with started(config(2, make_config(max_loras=2))) as running:
            await running.add_adapter("poems", str(tmp_path / "poems"))
            with pytest.raises(RequestError, match="it is broken"):
                await running.add_adapter("broken", str(tmp_path / "broken"))
            (listed,) = await running.list_adapters()
            prompt = list(range(1, 10))

            async def check() -> None:
                for rank in (0, 1):
                    request = make_request(running.new_request_id(), prompt, adapter="poems")
                    events = [event async for event in running.choose(request, rank).generate(request)]
                    tokens = [token for event in events for token in event.token_ids]
                    assert tokens == expected_tokens(request, root=root_of(listed.digest))

            await check()
            request = make_request(running.new_request_id(), prompt, adapter="poems")
            salt = salt_with_adapter(b"", listed.digest)
            assert running.prefixes.num_cached(prompt, salt) == [8, 8] != running.prefixes.num_cached(prompt, b"")
            assert running.choose(request)._num_new_tokens == 1
            old = running.replicas[1].client
            kill(running, 1)
            await until(lambda: running.replicas[1].client is not old and running.replicas[1].is_alive)
            await check()
            assert await running.remove_adapter("poems") == 0 and await running.list_adapters() == []
            with pytest.raises(RequestError, match="There is no adapter"):
                await running.remove_adapter("poems")

    run(scene)


class FakeClient:
    """An engine that knows names of adapters. `during_load` runs before the first load ends."""

    number = 1

    def __init__(self, during_load: Callable[[], Awaitable[object]] | None = None) -> None:
        self.info = SimpleNamespace(max_loras=1)
        self.digests: dict[str, str] = {}
        self._during_load = during_load

    async def list_adapters(self) -> list[AdapterInfo]:
        return [AdapterInfo(name, digest, "", "ready", 0, 0) for name, digest in self.digests.items()]

    async def add_known_adapter(self, name: str, digest: str, directory: str) -> None:
        if self.digests.setdefault(name, digest) != digest:
            raise RequestError("The name is taken.", "lora_name", IN_USE)
        during_load, self._during_load = self._during_load, None
        if during_load is not None:
            await during_load()
        if self.digests.get(name) != digest:
            raise RequestError("It was unloaded before it was loaded.", "lora_path", FAILED)

    async def remove_adapter(self, name: str) -> int:
        if self.digests.pop(name, None) is None:
            raise RequestError("There is no adapter.", "lora_name", UNKNOWN)
        return 0


def replicas_of(client: FakeClient) -> Replicas:
    replica = SimpleNamespace(number=0, client=client, is_alive=True, died=asyncio.Event().wait)
    return Replicas([cast("replicas.Replica", replica)], PrefixIndex(1, 4))


def adapter_directory(path: Path, content: bytes) -> str:
    path.mkdir()
    (path / "adapter_config.json").write_bytes(b"{}")
    (path / "adapter_model.safetensors").write_bytes(content)
    return str(path)


def test_a_replica_that_starts_gets_adapters_that_were_replaced_meanwhile(tmp_path: Path) -> None:
    """While it loads the first adapter, another one gets new content under its old name, and one is removed."""
    directories = [adapter_directory(tmp_path / str(number), bytes([number])) for number in range(3)]

    async def scene() -> None:
        served = FakeClient()
        running = replicas_of(served)
        for name in "abc":
            await running.add_adapter(name, directories[0])

        async def change() -> None:
            for name in "ab":
                await running.remove_adapter(name)
            await running.add_adapter("a", directories[1])

        started = FakeClient(change)
        await running._equip(cast(EngineClient, started))
        assert started.digests == served.digests and list(served.digests) == ["c", "a"]
        assert started.digests["a"] != started.digests["c"]
        await running.add_adapter("c", copy := adapter_directory(tmp_path / "copy", bytes([0])))
        assert running._adapters["c"].directory == copy, "the old directory may be gone at the next start"

    run(scene)


def test_a_failed_load_leaves_a_later_one_of_the_same_name(tmp_path: Path) -> None:
    """The first load is unloaded while it lasts, and then another content is loaded as the same name."""
    directories = [adapter_directory(tmp_path / str(number), bytes([number])) for number in range(2)]

    async def scene() -> None:
        async def change() -> None:
            await running.remove_adapter("a")
            await running.add_adapter("a", directories[1])

        served = FakeClient(change)
        running = replicas_of(served)
        with pytest.raises(RequestError, match="unloaded before"):
            await running.add_adapter("a", directories[0])
        assert served.digests == {"a": adapter_digest(directories[1])}

    run(scene)
