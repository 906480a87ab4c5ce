"""A verification does not wait for ever: a rank that stops making progress, or ends, ends it with a cause and a fix."""

import os
import time

import pytest

from workers.config import WorkerConfig
from workers.distributed.control_channel import Control
from workers.distributed.shm_layout import Flags, total_bytes
from workers.distributed.shm_ring import anonymous_memory
from workers.errors import StartupError
from workers.python_child import start_python
from workers.verify import launch
from workers.worker.spawn_ranks import SpawnedRanks

pytestmark = pytest.mark.slow

TWO_RANKS = WorkerConfig("nowhere", tensor_parallel_size=2)
# Stand-ins for rank processes: the first argument is the control socket's descriptor, the others are what to do.
RANK = """
import json, os, signal, socket, sys, time
control = socket.socket(fileno=int(sys.argv[1]))
for word in sys.argv[2:]:
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "sleep":
        time.sleep(0.5)
    elif word == "compute":
        end = time.process_time() + 5
        while time.process_time() < end:
            pass
    elif word == "wait":
        control.recv(1)
    elif word == "end":
        os._exit(7)
    else:
        message = {"kind": "done"} if word == "done" else {"kind": "progress", "text": word}
        control.sendall(json.dumps(message).encode() + b"\\n")
"""


@pytest.fixture
def started(monkeypatch):
    """Makes `run_ranks` start stand-ins that do as they are asked; returns all that was started."""
    all_started: list[SpawnedRanks] = []

    def prepare(*ranks: list[str]) -> list[SpawnedRanks]:
        def spawn(module, config, extras) -> SpawnedRanks:
            memory_fd = anonymous_memory(total_bytes(len(ranks), 64))
            spawned = SpawnedRanks([], [], Flags(memory_fd, len(ranks)))
            os.close(memory_fd)
            all_started.append(spawned)
            for words in ranks:
                ours, theirs = Control.pair()
                spawned.controls.append(ours)
                fd = theirs.fileno()
                spawned.processes.append(start_python(["-c", RANK, str(fd), *words], pass_fds=[fd]))
                theirs.close()
            return spawned

        monkeypatch.setattr(launch, "spawn_ranks", spawn)
        return all_started

    return prepare


def test_a_stopped_rank_ends_the_verification(started, tmp_path):
    ranks = started(["reading", "step 1", "wait"], ["reading", "stop"])
    lines: list[str] = []
    begun = time.monotonic()
    with pytest.raises(StartupError) as raised:
        launch.run_ranks(TWO_RANKS, tmp_path, lines.append, timeout_s=3.0)
    assert raised.value.cause == "rank 1 has made no progress for 3 s after this: reading."
    assert raised.value.fix and "\n" not in raised.value.fix
    assert raised.value.exit_code == 6
    assert 3.0 <= time.monotonic() - begun < 20.0
    assert [process.poll() for process in ranks[0].processes] == [-9, -9]
    assert lines == ["our 2 rank(s): reading", "our 2 rank(s): step 1"]


def test_progress_of_any_rank_is_waited_for(started, tmp_path):
    """Six times half a second, with a limit of two: the same line again is progress too."""
    started(["reading", "wait", "done"], ["reading", *["sleep", "reading"] * 6, "done"])
    with pytest.raises(StartupError, match=r"rank 0 has made no progress for 2 s after this: reading\."):
        launch.run_ranks(TWO_RANKS, tmp_path, lambda line: None, timeout_s=2.0)


def test_ranks_that_are_done_end_it(started, tmp_path):
    started(["reading", "done"], ["reading", "sleep", "done"])
    launch.run_ranks(TWO_RANKS, tmp_path, lambda line: None, timeout_s=10.0)


def test_a_rank_that_ends_early_is_named(started, tmp_path):
    started(["reading", "wait"], ["reading", "end"])
    with pytest.raises(StartupError, match=r"rank 1 ended before its work was done \(exit status 7\)"):
        launch.run_ranks(TWO_RANKS, tmp_path, lambda line: None, timeout_s=10.0)


@pytest.fixture
def reference(monkeypatch):
    """Makes `run_reference` start a stand-in that does as it is asked; returns all that was started."""
    processes = []

    def prepare(*words: str):
        def start(command, *, pass_fds):
            assert command[:2] == ["-m", "workers.verify.reference"] and int(command[-1]) == pass_fds[0]
            processes.append(start_python(["-c", RANK, command[-1], *words], pass_fds=pass_fds))
            return processes[-1]

        monkeypatch.setattr(launch, "start_python", start)
        return processes

    return prepare


@pytest.mark.parametrize("hang", ["stop", "wait"])
def test_a_reference_that_hangs_ends_the_verification(reference, tmp_path, hang):
    processes = reference("loading", hang)
    lines: list[str] = []
    with pytest.raises(StartupError) as raised:
        launch.run_reference(tmp_path, lines.append, timeout_s=3.0)
    assert raised.value.cause == "transformers has made no progress for 3 s after this: loading."
    assert raised.value.exit_code == 6 and lines == ["transformers: loading"]
    assert processes[0].poll() == -9


def test_a_reference_that_computes_without_a_word_is_waited_for(reference, tmp_path):
    """Longer than the limit, in which it uses the processor."""
    reference("loading", "compute", "writing", "sleep")
    lines: list[str] = []
    begun = time.monotonic()
    launch.run_reference(tmp_path, lines.append, timeout_s=3.0)
    assert lines == ["transformers: loading", "transformers: writing"]
    assert time.monotonic() - begun > 5.0


def test_a_reference_that_fails_is_an_error_with_its_exit_status(reference, tmp_path):
    reference("loading", "end")
    with pytest.raises(StartupError, match=r"transformers could not run this model \(exit status 7\)"):
        launch.run_reference(tmp_path, lambda line: None, timeout_s=10.0)
