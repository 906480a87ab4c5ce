"""Real rank processes: two ranks give the results of one, and every way of losing a rank is noticed and named."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oarlock.base.errors import StartupError
from oarlock.base.python_child import start_python
from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import WorkerError
from oarlock.workers.executor import Executor, start_executor
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.ranks.host_ranks import HostRanks
from oarlock.workers.ranks.multiproc_executor import MultiprocExecutor
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from tests.golden.tiny_models import make_tiny
from tests.parallel.rank_threads import ThreadExecutor

BLOCK = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2")


def config_for(checkpoint: Path, **changes: object) -> WorkerConfig:
    base = WorkerConfig(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        kv_cache_bytes=1 << 20,
        num_threads=1,
    )
    return base.with_(**changes)


def start(checkpoint: Path, size: int, **changes: object) -> Executor:
    config = config_for(checkpoint, tensor_parallel_size=size, **changes)
    return start_executor(config, lambda phase, fraction: None)


def step_of(step_id: int, tokens: list[int], start: int, num_logprobs: int = 5) -> StepMetadata:
    """One sequence in blocks 1, 2, …: `tokens` at positions `start` on; the last one samples greedily."""
    step = greedy_step([SequenceChunk(tokens, start, range(1, 5))], BLOCK, [len(tokens) - 1], step_id=step_id)
    return replace(step, num_logprobs=np.array([num_logprobs], np.int32))


def generate(executor: Executor, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    tokens, known, logprobs = list(prompt), 0, []
    for step_id in range(1, count + 1):
        executor.submit(step_of(step_id, tokens[known:], known))
        output = executor.collect()
        known = len(tokens)
        tokens.append(int(output.token_ids[0]))
        assert output.logprobs is not None
        logprobs.append(output.logprobs[0])
    return tokens[len(prompt) :], np.array(logprobs)


def test_ranks_answer_like_one_on_their_cpus_and_leave_nothing_behind(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first of two gets the second CPU, which no automatic choice would give it."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    prompt = [5, 9, 17, 3, 8, 21, 2]
    config = config_for(checkpoint)
    one = ThreadExecutor(config)
    expected, expected_logprobs = generate(one, prompt, 20)
    one.close()
    descriptors, segments = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    executor = start(checkpoint, 2, cpu_affinity=f"{last}|{first}")
    assert isinstance(executor, MultiprocExecutor)
    try:
        executor.ping()
        tokens, logprobs = generate(executor, prompt, 20)
        executor.ping()
        for pid, cpu in zip(executor.rank_pids, (last, first), strict=True):
            status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
            assert f"Cpus_allowed_list:\t{cpu}\n" in status
    finally:
        executor.close()
    assert tokens == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-6)
    logged = [line for line in capfd.readouterr().err.splitlines() if "event=cpu_affinity" in line]
    assert sorted(line[line.index("rank=") :].split()[0] for line in logged) == ["rank=0", "rank=1"]
    executor.close()  # a second time
    assert len(os.listdir("/proc/self/fd")) == descriptors and set(os.listdir("/dev/shm")) == segments
    assert not any(Path(f"/proc/{pid}").exists() for pid in executor.rank_pids)
    assert os.sched_getaffinity(0) >= {first, last}  # this process is not pinned


@pytest.mark.soak
def test_a_rank_that_is_killed_in_a_step_is_named(checkpoint: Path) -> None:
    executor = start(checkpoint, 2, step_timeout_s=20.0)
    try:
        generate(executor, [1, 2, 3], 2)
        os.kill(executor.rank_pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"rank 0 failed at step .*killed by signal 9") as caught:
            for step_id in range(3, 100):
                executor.submit(step_of(step_id, [1], 3))
                executor.collect()
        assert not caught.value.hung
    finally:
        executor.close()


def test_a_rank_that_dies_idle_wakes_the_waiter(checkpoint: Path) -> None:
    import select

    executor = start(checkpoint, 2)
    try:
        threading.Timer(0.1, os.kill, (executor.rank_pids[1], signal.SIGKILL)).start()
        assert select.select(executor.fileno_for_death(), [], [], 60)[0]
        with pytest.raises(WorkerError, match="rank 1"):
            executor.ping()
    finally:
        executor.close()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_stops_in_a_step_is_named(checkpoint: Path, victim: int) -> None:
    """The other waits for it in a collective, and has not answered either."""
    executor = start(checkpoint, 2)
    try:
        generate(executor, [1, 2, 3], 2)
        # Long enough for the other rank to come to the collective on a busy machine.
        executor.config = replace(executor.config, step_timeout_s=8.0)
        with pytest.raises(WorkerError, match=r"no output within 8 s$") as caught:
            for step_id in range(3, 10):  # rank 0 may still answer the step in which rank 1 was stopped
                executor.submit(step_of(step_id, list(range(1, 33)), 0))
                os.kill(executor.rank_pids[victim], signal.SIGSTOP)
                executor.collect()
        assert caught.value.rank == victim and caught.value.hung
    finally:
        executor.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in executor.rank_pids)


def test_a_rank_that_sends_nothing_while_loading_is_named_with_its_phase(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that does not answer."""
    phases = iter([("joining", "loading", "allocating"), ("joining", "loading")])

    def silent(command: Sequence[str], **rest: object) -> subprocess.Popen[bytes]:
        sent = b"".join(json.dumps({"kind": "phase", "name": name}).encode() + b"\n" for name in next(phases))
        code = f"import os, time; os.write({command[-1]}, {sent!r}); time.sleep(1000)"
        return start_python(["-c", code], **rest)  # ty: ignore[invalid-argument-type]

    monkeypatch.setattr("oarlock.workers.rank_processes.start_python", silent)
    config = preflight(config_for(checkpoint, tensor_parallel_size=2))
    with pytest.raises(StartupError, match=r"rank 1 has made no progress for 5 s while reading the weights") as caught:
        MultiprocExecutor(config, HostRanks(config), lambda phase, fraction: None, loading_timeout_s=5)
    assert caught.value.exit_code == 6


def test_a_rank_that_cannot_load_fails_the_start(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here because its allocator has no such memory to give, which the checks of a start would have noticed."""
    monkeypatch.setattr("oarlock.workers.runner.memory_needs.check_given_sizes_fit_host", lambda config, weights: None)
    with pytest.raises(StartupError, match=r"Out of memory while allocating KV memory: each rank of 2 needs") as caught:
        start(checkpoint, 2, kv_cache_bytes=1 << 50)
    assert caught.value.exit_code == 4
