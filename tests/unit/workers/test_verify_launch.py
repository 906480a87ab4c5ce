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
