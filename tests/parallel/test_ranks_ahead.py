"""Rank processes that run before anything is configured: none of them stays, however the start ends."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from oarlock.base.errors import StartupError
from oarlock.base.errors import StartupError as RankStartupError
from oarlock.engine.client import EngineClient
from oarlock.engine.config import EngineConfig
from oarlock.engine.engine_process import EngineProcess
from oarlock.workers.executor import start_executor
from oarlock.workers.rank_processes import end_ranks, start_ranks, start_ranks_ahead
from oarlock.workers.ranks.host_ranks import HostRanks
from oarlock.workers.ranks.multiproc_executor import MultiprocExecutor
from tests.e2e.running import alive, eventually
from tests.golden.tiny_models import make_tiny
from tests.parallel.test_multiproc_executor import config_for, generate

TWO = min(2, os.cpu_count() or 1)  # one rank ahead for each processor


def ranks_of(engine: EngineProcess) -> tuple[psutil.Process, list[psutil.Process]]:
    """The engine's process and those of its ranks, which run before it has a configuration."""
    assert engine._started is not None
    process = psutil.Process(engine._started[0].pid)
    eventually(lambda: len(process.children()) == TWO, 60, "the ranks run")
    return process, process.children()


def none_left(*processes: psutil.Process) -> None:
    eventually(lambda: not any(map(alive, processes)), 60, "all have ended")


@pytest.mark.parametrize("how", ["discarded", "killed", "its socket is closed"])
def test_an_engine_that_ends_before_it_is_configured_takes_its_ranks_along(how: str) -> None:
    engine = EngineProcess(2)
    process, ranks = ranks_of(engine)
    if how == "killed":
        process.kill()
    elif how != "discarded":
        assert engine._started is not None
        engine._started[1].close()
    if how != "its socket is closed":
        engine.discard()
    none_left(*ranks)
    engine.discard()


def test_a_configuration_that_is_refused_leaves_no_rank(tmp_path: Path) -> None:
    engine = EngineProcess(2)
    process, ranks = ranks_of(engine)
    config = EngineConfig(config_for(tmp_path, tensor_parallel_size=2))  # there is no model
    with pytest.raises(StartupError) as failure:
        asyncio.run(EngineClient.start(config, lambda *_: None, process=engine))
    assert failure.value.exit_code == 3
    none_left(process, *ranks)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2")


def test_some_ranks_ahead_and_one_later_serve_together_and_end_with_their_parent(checkpoint: Path) -> None:
    config = config_for(checkpoint, tensor_parallel_size=2)
    executor = start_executor(config, lambda *_: None, ahead=start_ranks(1))
    try:
        assert len(executor.rank_pids) == 2
        generate(executor, [1, 2, 3], 3)
        assert isinstance(executor, MultiprocExecutor)
        ranks = executor._ranks
        assert isinstance(ranks, HostRanks)
        ranks.steps.close()  # what the kernel does to the pipes of a killed parent
        eventually(lambda: all(rank.poll() is not None for rank in ranks._processes), 60, "the ranks end")
        assert [rank.poll() for rank in ranks._processes] == [0, 0], ranks.pids
    finally:
        executor.close()


def test_a_rank_that_ends_before_its_arguments_is_named(checkpoint: Path) -> None:
    ahead = start_ranks(2)
    ahead[1].process.send_signal(signal.SIGKILL)
    ahead[1].process.wait()
    with pytest.raises(RankStartupError, match=r"rank 1 ended while loading \(killed by signal 9\)") as failure:
        start_executor(config_for(checkpoint, tensor_parallel_size=2), lambda *_: None, ahead=ahead)
    assert failure.value.exit_code == 4
    assert all(rank.process.poll() is not None for rank in ahead)


@pytest.mark.parametrize(
    ("of_user", "spins"), [({}, "40000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None), ({"GOMP_SPINCOUNT": "5"}, "5")]
)
def test_threads_of_a_rank_let_go_of_their_cores_soon_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, of_user: dict[str, str], spins: str | None
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in of_user.items():
        monkeypatch.setenv(name, value)
    ranks = start_ranks(1)
    environ = Path(f"/proc/{ranks[0].process.pid}/environ")  # empty until the kernel has set up the new program
    variables = eventually(environ.read_bytes, 10, "the program has variables").decode().split("\0")
    end_ranks(ranks)
    assert dict(line.split("=", 1) for line in variables if line).get("GOMP_SPINCOUNT") == spins


def test_a_wrong_number_starts_no_more_than_there_are_processors() -> None:
    ranks = start_ranks_ahead(10**6)
    for process, control in ranks:
        process.kill()
        process.wait()
        control.close()
    assert len(ranks) == os.cpu_count()
