"""Client and engine process over a real socket, with fake ranks: requests, aborts, refusals, every kind of end."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.client import EngineClient
from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import ContextLengthError, EngineDeadError, QueueFullError, RequestError
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import FinishReason, TokenEvent
from oarlock.workers.kernels.cpu import build
from tests.unit.engine.engine_fakes import expected_tokens, make_config, make_request, root_of
from tests.unit.engine.pooling_fakes import ROOT

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ENGINE = str(HERE / "fake_engine.py")


def scenario_config(config: EngineConfig | None = None, **scenario) -> EngineConfig:
    config = config or make_config()
    return replace(config, worker=config.worker.with_(model_path=json.dumps(scenario)))


@contextlib.asynccontextmanager
async def started(config: EngineConfig, on_progress=lambda *_: None) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(config, on_progress, command=[ENGINE])
    try:
        yield client
    finally:
        await client.close()
        assert client._process.poll() is not None


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scene(), 100)

    asyncio.run(bounded())


async def collect(client: EngineClient, request) -> list[TokenEvent]:
    return [event async for event in client.generate(request)]


async def until(client: EngineClient, condition: Callable[[EngineStats], object]) -> None:
    while not condition(await client.stats()):
        await asyncio.sleep(0.01)


async def until_idle(client: EngineClient) -> None:
    while (stats := await client.stats()).num_requests_running + stats.num_requests_waiting:
        await asyncio.sleep(0.01)
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
    assert client.num_open == 0 and not client._queries._open


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_many_requests_at_once_get_their_own_answers() -> None:
    async def scene() -> None:
        phases = []
        async with started(scenario_config(), lambda *seen: phases.append(seen)) as client:
            loading = [seen for seen in phases if seen[0] == "loading"]  # kernels may be compiled before
            assert loading == [("loading", 0.0, ""), ("loading", 0.5, ""), ("loading", 1.0, "")]
            assert client.info.block_size == 4 and client.info.vocab_size == 64 and client.info.rank_pids == ()
            assert client.info.max_num_seqs == 8 and client.info.enable_prefix_caching
            requests = [
                make_request(client.new_request_id(), [1, 2, number % 5], max_tokens=3 + number % 20)
                for number in range(40)
            ]
            answers = await asyncio.gather(*(collect(client, request) for request in requests))
            for request, events in zip(requests, answers, strict=True):
                assert [token for event in events for token in event.token_ids] == expected_tokens(request)
                assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
            await until_idle(client)
            stats = await client.stats()
            assert stats.num_accepted == stats.finished["length"] == 40
            assert client.is_alive and client.last_progress_age_s < 30
        assert client.exit_code == 0 and client.dead.is_set() and not client.is_alive

    run(scene)


def test_progress_begins_with_the_compilation_that_the_ranks_wait_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    level = build.chosen()
    if level is None:
        pytest.skip("there are no kernels for this processor")
    phases: list[tuple[str, float, str]] = []

    async def scene() -> None:
        async with started(scenario_config(load_s=0.5), lambda *seen: phases.append(seen)):
            pass

    run(scene)
    assert {phase for phase, *_ in phases} == {"loading"}, "nothing is compiled"
    phases.clear()
    dtype = scenario_config().worker.dtype
    with open(build.lock_file(build.of_one_type(level, dtype)), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"1 2 {time.time() - 14}\n")
        lock.flush()
        run(scene)
    assert phases[0] == ("compiling kernels", 0.5, "1 of 2 parts, 14 s; only a first start, 10 to 60 s")
    assert phases[-1] == ("loading", 1.0, "")
    assert len({phase for phase, *_ in phases[-3:]}) == 1, "what the engine reports is not overwritten"


def test_it_works_on_uvloop_too() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def scene() -> None:
        async with started(scenario_config()) as client:
            request = make_request(1, [1, 2], max_tokens=9)
            events = await collect(client, request)
            assert [token for event in events for token in event.token_ids] == expected_tokens(request)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scene(), 100))


def test_closing_the_iterator_is_the_abort() -> None:
    async def scene() -> None:
        async with started(scenario_config(step_s=0.01)) as client:
            for number, how in enumerate(("close", "cancel", "drop"), 1):
                iterator = client.generate(make_request(number, [1], max_tokens=60))
                first = await anext(iterator)
                assert first.finish_reason is None
                if how == "close":
                    await iterator.aclose()
                elif how == "drop":
                    del iterator
                else:
                    task = asyncio.create_task(anext(iterator))
                    await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                await until_idle(client)
                assert (await client.stats()).finished["abort"] == number, how

    run(scene)


def test_a_reset_of_the_cache_is_answered_and_ends_with_the_engine() -> None:
    async def scene() -> None:
        async with started(scenario_config()) as client:
            await collect(client, make_request(1, range(9)))
            assert await client.reset_prefix_cache() > 0
            assert await client.reset_prefix_cache() == 0
            os.kill(client.pid, signal.SIGSTOP)
            waiting = asyncio.create_task(client.reset_prefix_cache())
            await asyncio.sleep(0)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await waiting
            assert not client._queries._open
            with pytest.raises(EngineDeadError):
                await client.reset_prefix_cache()

    run(scene)


def test_an_iterator_that_was_never_started_sends_no_request() -> None:
    async def scene() -> None:
        async with started(scenario_config()) as client:
            iterator = client.generate(make_request(1, [1]))
            await iterator.aclose()
            assert (await client.stats()).num_accepted == 0

    run(scene)


def test_refusals_come_before_the_first_event() -> None:
    async def scene() -> None:
        config = make_config(max_num_seqs=1, max_waiting_requests=1)
        async with started(scenario_config(config, step_s=0.05)) as client:
            with pytest.raises(ContextLengthError):
                await collect(client, make_request(client.new_request_id(), [1] * 64))
            with pytest.raises(RequestError, match="vocabulary"):
                await collect(client, make_request(client.new_request_id(), [64]))
            with pytest.raises(RequestError, match="cannot be sent"):
                await collect(client, make_request(client.new_request_id(), [2**40]))
            ask = partial(make_request, max_tokens=30)
            long = [asyncio.create_task(collect(client, ask(client.new_request_id(), [1])))]
            await until(client, lambda stats: stats.num_requests_running)
            long.append(asyncio.create_task(collect(client, ask(client.new_request_id(), [1]))))
            await until(client, lambda stats: stats.num_requests_waiting)
            with pytest.raises(QueueFullError) as refused:
                await collect(client, make_request(client.new_request_id(), [1]))
            assert refused.value.retry_after_s >= 1
            for task in long:
                task.cancel()
            await asyncio.wait(long)
            assert client.num_open == 0

    run(scene)


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    async def scene() -> None:
        async with started(scenario_config(step_s=0.01)) as client:
            request = make_request(1, [1], max_tokens=20)
            task = asyncio.create_task(collect(client, request))
            while not client.num_open:
                await asyncio.sleep(0)
            with pytest.raises(RequestError, match="in use"):
                await collect(client, request)
            events = await task
            assert [token for event in events for token in event.token_ids] == expected_tokens(request)

    run(scene)


def test_stats_do_not_wait_for_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oarlock.engine.client._STATS_TIMEOUT_S", 0.1)

    async def scene() -> None:
        async with started(scenario_config(step_s=3.0)) as client:
            task = asyncio.create_task(collect(client, make_request(1, [1], max_tokens=1)))
            await asyncio.sleep(0.1)
            assert (await client.stats()).state == "ready"
            assert not task.done()
            await task

    run(scene)


def test_the_live_state_is_that_of_the_engine_and_none_when_it_is_dead() -> None:
    async def scene() -> None:
        async with started(scenario_config(step_s=0.05)) as client:
            task = asyncio.create_task(collect(client, make_request(1, [1, 2, 3], max_tokens=60)))
            while not (state := await client.state())["slowest"]:
                await asyncio.sleep(0.01)
            assert (state["running"], state["slowest"][0]["request_id"]) == (1, 1)
            task.cancel()
            os.kill(client.pid, signal.SIGKILL)
            await client.dead.wait()
            assert await client.state() is None

    run(scene)


# -- ends


@pytest.mark.parametrize(
    "scenario, code, cause",
    [
        ({"die_at_step": 3}, 5, "rank 1"),
        ({"hang_at_step": 3}, 6, "rank 1"),
        ({"killed_at_step": 3}, 5, "SIGKILL"),
    ],
)
def test_when_the_engine_dies_every_request_fails(scenario: dict, code: int, cause: str) -> None:
    async def scene() -> None:
        config = scenario_config(make_config(max_num_seqs=2, step_timeout_s=0.4), **scenario)
        async with started(config) as client:
            outcomes = await asyncio.gather(
                *(collect(client, make_request(number, [number], max_tokens=30)) for number in range(1, 6)),
                return_exceptions=True,
            )
            assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 5
            assert not client.is_alive and client.num_open == 0
            with pytest.raises(EngineDeadError):
                await collect(client, make_request(9, [1]))
            await client.dead.wait()
            assert client.exit_code == code and cause in (client.death_cause or "")
            assert (await client.stats()).state == "dead"

    run(scene)


def quick_watch(monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Limits after which a silent engine counts as hung: 1.3 s in all."""
    monkeypatch.setattr("oarlock.engine.client._WATCH_S", 0.05)
    monkeypatch.setattr("oarlock.engine.client._SILENCE_MARGIN_S", 0.2)
    return make_config(step_timeout_s=1.0, heartbeat_interval_s=0.1)


def test_a_stopped_engine_is_killed_and_every_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    config = quick_watch(monkeypatch)

    async def scene() -> None:
        async with started(scenario_config(config, step_s=0.05)) as client:
            tasks = [asyncio.create_task(collect(client, make_request(n, [n], max_tokens=60))) for n in (1, 2)]
            await until(client, lambda stats: stats.num_requests_running == 2)
            os.kill(client.pid, signal.SIGSTOP)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 2
            assert not client.is_alive and client.num_open == 0
            await client.dead.wait()
            assert client.exit_code == 6 and "has sent nothing" in (client.death_cause or "")

    run(scene)


def test_an_idle_engine_that_stops_is_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = quick_watch(monkeypatch)

    async def scene() -> None:
        async with started(scenario_config(config)) as client:
            await asyncio.sleep(2.0)  # heartbeats are enough
            assert client.is_alive
            os.kill(client.pid, signal.SIGSTOP)
            await client.dead.wait()
            assert client.exit_code == 6

    run(scene)


def test_time_in_which_the_frontend_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = quick_watch(monkeypatch)

    async def scene() -> None:
        async with started(scenario_config(config, step_s=0.01)) as client:
            request = make_request(1, [1], max_tokens=60)
            task = asyncio.create_task(collect(client, request))
            await asyncio.sleep(0.1)
            time.sleep(2.0)  # the event loop of this process stands still, as when the process is stopped
            assert [token for event in await task for token in event.token_ids] == expected_tokens(request)
            time.sleep(2.0)
            await asyncio.sleep(0.5)
            assert client.is_alive

    run(scene)


def test_tokens_computed_before_a_death_are_delivered_before_the_error() -> None:
    async def scene() -> None:
        async with started(scenario_config(die_at_step=4)) as client:
            request = make_request(1, [1, 2], max_tokens=30)
            tokens: list[int] = []
            with pytest.raises(EngineDeadError):
                async for event in client.generate(request):
                    tokens += event.token_ids
            assert tokens == expected_tokens(request)[:3]

    run(scene)


def test_an_orderly_close_ends_open_requests_with_one_event() -> None:
    async def scene() -> None:
        async with started(scenario_config(step_s=0.05)) as client:
            tasks = [asyncio.create_task(collect(client, make_request(n, [n], max_tokens=60))) for n in (1, 2)]
            await until(client, lambda stats: stats.num_requests_running == 2)
            await client.close()
            await client.close()
            for events in await asyncio.gather(*tasks):
                assert events[-1].finish_reason is FinishReason.ERROR and "shutting down" in (events[-1].error or "")
            assert client.exit_code == 0
            with pytest.raises(EngineDeadError, match="shutting down"):
                await collect(client, make_request(9, [1]))

    run(scene)


def test_close_is_bounded_when_the_engine_hangs() -> None:
    async def scene() -> None:
        async with started(scenario_config(stuck_at_step=2)) as client:
            task = asyncio.create_task(collect(client, make_request(1, [1], max_tokens=60)))
            with pytest.raises(TimeoutError):  # it hangs once it no longer answers
                while True:
                    await asyncio.wait_for(client.stats(), 1.0)
            await client.close(timeout_s=0.2)
            assert client.exit_code == 5
            with pytest.raises(EngineDeadError):
                await task

    run(scene)


def test_an_executor_that_does_not_close_cannot_hold_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with started(scenario_config(close_s=1000)) as client:
            await client.close(timeout_s=60)
            assert client.exit_code == 0  # ended by the deadline, not killed by the client

    run(scene)


def test_signals_are_left_to_the_frontend() -> None:
    async def scene() -> None:
        async with started(scenario_config(step_s=0.01)) as client:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.pid, number)
            request = make_request(1, [1], max_tokens=10)
            events = await collect(client, request)
            assert [token for event in events for token in event.token_ids] == expected_tokens(request)
            assert client.is_alive
        assert client.exit_code == 0 and not client.is_alive

    run(scene)


@pytest.mark.parametrize(
    "scenario, code, cause",
    [
        ({"fails": "startup"}, 3, "7 heads"),
        ({"fails": "bug"}, 1, "KeyError"),
        ({"fails": "killed"}, 4, "SIGKILL"),
    ],
)
def test_a_start_that_fails_names_the_cause(scenario: dict, code: int, cause: str) -> None:
    async def scene() -> None:
        with pytest.raises(StartupError, match=cause) as failure:
            await EngineClient.start(scenario_config(**scenario), lambda *_: None, command=[ENGINE])
        assert failure.value.exit_code == code and failure.value.fix

    run(scene)


def test_a_start_that_makes_no_progress_ends_and_names_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADING_TIMEOUT_S", "0.5")

    async def scene() -> None:
        with pytest.raises(StartupError, match=r"no progress for 0\.5 s while loading \(100%\)") as failure:
            await EngineClient.start(scenario_config(load_s=1000), lambda *_: None, command=[ENGINE])
        assert failure.value.exit_code == 6

    run(scene)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_cancelled_start_leaves_no_process(is_stopped: bool) -> None:
    async def scene() -> None:
        before = set(_children())
        loading = asyncio.Event()
        config = scenario_config(load_s=1000)
        start = EngineClient.start(config, lambda *progress: loading.set(), command=[ENGINE])
        task = asyncio.create_task(start)
        await loading.wait()
        children = set(_children()) - before
        assert children
        if is_stopped:
            for pid in children:
                os.kill(pid, signal.SIGSTOP)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(exists(pid) for pid in children)

    run(scene)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.mark.parametrize("mode, scenario", [("ready", {}), ("while_loading", {"load_s": 1000})])
def test_killing_the_frontend_ends_the_engine(mode: str, scenario: dict) -> None:
    words = [sys.executable, str(HERE / "fake_frontend.py"), json.dumps(scenario), mode]
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    frontend = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
    assert frontend.stdout is not None
    with frontend.stdout:
        pid = int(frontend.stdout.readline())
        assert exists(pid)
        frontend.kill()
        frontend.wait()
    deadline = time.monotonic() + 60
    while exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not exists(pid)


def test_an_idle_engine_uses_no_processor_time() -> None:
    async def scene() -> None:
        async with started(scenario_config()) as client:
            await collect(client, make_request(1, [1]))

            def ticks() -> int:
                fields = Path(f"/proc/{client.pid}/stat").read_text().rpartition(")")[2].split()
                return int(fields[11]) + int(fields[12])

            before = ticks()
            await asyncio.sleep(1.0)
            assert ticks() - before <= 2  # of a hundred

    run(scene)


def test_nothing_is_left_open_after_many_starts() -> None:
    async def scene() -> None:
        async def start_and_close() -> None:
            async with started(scenario_config()) as client:
                await collect(client, make_request(1, [1]))

        await start_and_close()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            await start_and_close()
        for _ in range(100):  # the last child may not be reaped yet; a leak stays
            if len(os.listdir("/proc/self/fd")) <= before:
                break
            await asyncio.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert len(asyncio.all_tasks()) <= 2  # this one and the watcher around it

    run(scene)


def test_the_real_command_imports_no_torch_and_ignores_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise RuntimeError('the wrong engine')")
    code = "import sys, engine.core.process, workers.executor; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, check=False).returncode == 0

    async def scene() -> None:
        with pytest.raises(StartupError) as failure:  # the real executor, and a model that does not exist
            await EngineClient.start(EngineConfig(make_config().worker), lambda *_: None)
        assert failure.value.exit_code == 3

    run(scene)


def make_adapter(folder: Path, name: str, content: bytes = b"weights") -> str:
    """Write files with the names of an adapter's, and return their directory."""
    directory = folder / name
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_bytes(b"{}")
    (directory / "adapter_model.safetensors").write_bytes(content)
    return str(directory)


def test_adapters_are_loaded_listed_and_unloaded(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(scenario_config(make_config(max_loras=2), step_s=0.002)) as client:
            assert client.info.max_loras == 2
            poems, prose = make_adapter(tmp_path, "poems"), make_adapter(tmp_path, "prose", b"other weights")
            await client.add_adapter("poems", poems)
            loading = asyncio.create_task(client.add_adapter("prose", prose))
            await asyncio.sleep(0.1)
            requests = [make_request(client.new_request_id(), [1, 2], adapter=one) for one in ("poems", "prose", None)]
            answers = await asyncio.gather(*(collect(client, request) for request in requests))
            await loading
            listed = await client.list_adapters()
            states = [(one.name, one.state, one.num_requests) for one in listed]
            assert states == [("poems", "ready", 0), ("prose", "ready", 0)]
            roots = [root_of(one.digest) for one in listed]
            for request, events, root in zip(requests, answers, [*roots, ROOT], strict=True):
                assert [token for event in events for token in event.token_ids] == expected_tokens(request, root=root)
            stats = await client.stats()
            assert stats.by_adapter == {"poems": [1, 2, 4], "prose": [1, 2, 4]} and stats.num_adapters_loaded == 2
            with pytest.raises(RequestError, match="is taken"):
                await client.add_adapter("poems", prose)
            with pytest.raises(RequestError, match="cannot be read"):
                await client.add_adapter("nothing", str(tmp_path / "nothing"))
            with pytest.raises(RequestError, match="it is broken"):
                await client.add_adapter("broken", make_adapter(tmp_path, "broken", b"3"))
            running = make_request(client.new_request_id(), [1], adapter="poems", max_tokens=60)
            events = client.generate(running)
            assert (await anext(events)).token_ids
            assert await client.remove_adapter("poems") == 1
            rest = [event async for event in events]
            assert rest[-1].error_code == "adapter_unloaded" and rest[-1].finish_reason is FinishReason.ERROR
            with pytest.raises(RequestError, match="There is no adapter"):
                await collect(client, make_request(client.new_request_id(), [1], adapter="poems"))
            await until_idle(client)

    run(scene)
