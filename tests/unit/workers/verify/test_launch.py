"""A verification does not wait for ever: a rank that stops making progress, or ends, ends it with a cause and a fix.

Time is a clock of the test's: while a stand-in still has something to say, it is waited for, however slow the machine.
"""

import os
import select
import time

import pytest

from oarlock.base.errors import StartupError
from oarlock.base.python_child import start_python
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_layout import Flags, total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.ranks.spawn_ranks import SpawnedRanks
from oarlock.workers.verify import launch

pytestmark = pytest.mark.slow

TWO_RANKS = WorkerConfig("nowhere", tensor_parallel_size=2)
# Stand-ins for rank processes: the first argument is the control socket's descriptor, the others are what to do.
RANK = """
import json, os, signal, socket, sys, time
control = socket.socket(fileno=int(sys.argv[1]))
for word in sys.argv[2:]:
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word.startswith("/"):
        while not os.path.exists(word):
            time.sleep(0.01)
    elif word == "wait":
        control.recv(1)
    elif word == "end":
        os._exit(7)
    else:
        message = {"kind": "done"} if word == "done" else {"kind": "progress", "text": word}
        control.sendall(json.dumps(message).encode() + b"\\n")
"""


class Clock:
    """Stands in for `select` and `time`. Each message takes `each_s`; when `silent_after` messages have come, nobody
    says anything for `silent_looks` looks, or ever again."""

    def __init__(self, silent_after: int, each_s: float = 0.0, silent_looks: int = 1 << 30) -> None:
        self.now = 0.0
        self.silent_looks = silent_looks
        self._left, self._each_s = silent_after, each_s

    def monotonic(self) -> float:
        return self.now

    def select(self, reading, writing, failing, timeout_s):
        if self._left == 0 and self.silent_looks:
            self.silent_looks -= 1
            self.now += timeout_s
            return [], [], []
        found = select.select(reading, writing, failing, 60)
        assert found[0], "a stand-in has said nothing"
        return found

    def heard(self) -> None:
        self.now += self._each_s
        self._left -= self._left > 0


@pytest.fixture
def clock(monkeypatch):
    """Function that makes the clock that `launch` reads."""

    def prepare(*args, **kwargs) -> Clock:
        made = Clock(*args, **kwargs)
        receive = Control.recv

        def counted(control: Control):
            message = receive(control)
            made.heard()
            return message

        monkeypatch.setattr(Control, "recv", counted)
        monkeypatch.setattr(launch, "select", made)
        monkeypatch.setattr(launch, "time", made)
        return made

    return prepare


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


def test_a_stopped_rank_ends_the_verification(started, clock, tmp_path):
    ranks = started(["reading", "step 1", "wait"], ["reading", "stop"])
    watch = clock(3)
    lines: list[str] = []
    with pytest.raises(StartupError) as raised:
        launch.run_ranks(TWO_RANKS, tmp_path, lines.append, timeout_s=3.0)
    assert raised.value.cause == "rank 1 has made no progress for 3 s after this: reading."
    assert raised.value.fix and "\n" not in raised.value.fix
    assert raised.value.exit_code == 6
    assert watch.now == 3.0
    assert [process.poll() for process in ranks[0].processes] == [-9, -9]
    assert lines == ["our 2 rank(s): reading", "our 2 rank(s): step 1"]


def test_progress_of_any_rank_is_waited_for(started, clock, tmp_path):
    """Longer than the limit in all: the same line again is progress too."""
    started(["reading", "wait", "done"], [*["reading"] * 7, "done"])
    watch = clock(9, each_s=0.5)
    with pytest.raises(StartupError, match=r"rank 0 has made no progress for 2 s after this: reading\."):
        launch.run_ranks(TWO_RANKS, tmp_path, lambda line: None, timeout_s=2.0)
    assert watch.now > 4.0


def test_ranks_that_are_done_end_it(started, tmp_path):
    started(["reading", "done"], ["reading", "done"])
    launch.run_ranks(TWO_RANKS, tmp_path, lambda line: None, timeout_s=60.0)


def test_a_rank_that_ends_early_is_named(started, tmp_path):
    started(["reading", "wait"], ["reading", "end"])
    with pytest.raises(StartupError, match=r"rank 1 ended before its work was done \(exit status 7\)"):
        launch.run_ranks(TWO_RANKS, tmp_path, lambda line: None, timeout_s=60.0)


@pytest.fixture
def reference(monkeypatch):
    """Makes `run_reference` start a stand-in that does as it is asked; returns all that was started."""
    processes = []

    def prepare(*words: str):
        def start(command, *, pass_fds):
            assert command[:2] == ["-m", "oarlock.workers.verify.reference"] and int(command[-1]) == pass_fds[0]
            processes.append(start_python(["-c", RANK, command[-1], *words], pass_fds=pass_fds))
            return processes[-1]

        monkeypatch.setattr(launch, "start_python", start)
        return processes

    return prepare


@pytest.mark.parametrize("hang", ["stop", "wait"])
def test_a_reference_that_hangs_ends_the_verification(reference, clock, tmp_path, hang):
    processes = reference("loading", hang)
    clock(1)
    lines: list[str] = []
    with pytest.raises(StartupError) as raised:
        launch.run_reference(tmp_path, lines.append, timeout_s=3.0)
    assert raised.value.cause == "transformers has made no progress for 3 s after this: loading."
    assert raised.value.exit_code == 6 and lines == ["transformers: loading"]
    assert processes[0].poll() == -9


def test_a_reference_that_computes_without_a_word_is_waited_for(reference, clock, tmp_path, monkeypatch):
    """Longer than the limit, in which it uses the processor."""
    computed = tmp_path / "computed"
    reference("loading", str(computed), "writing")
    watch = clock(1, silent_looks=100)

    def used_s(pid: int) -> float:
        if watch.silent_looks == 1:
            computed.touch()
        return watch.now

    monkeypatch.setattr(launch, "_processor_time_s", used_s)
    lines: list[str] = []
    launch.run_reference(tmp_path, lines.append, timeout_s=60.0)
    assert lines == ["transformers: loading", "transformers: writing"]
    assert watch.now == 100.0


def test_the_processor_time_of_a_process_is_what_it_has_used(tmp_path):
    there = tmp_path / "there"
    code = f"import time, pathlib\nwhile time.process_time() < 0.3: pass\npathlib.Path({str(there)!r}).touch()\ninput()"
    process = start_python(["-c", code])
    while not there.exists():
        time.sleep(0.01)
    assert launch._processor_time_s(process.pid) >= 0.28  # it is counted in ticks
    process.kill()
    process.wait()


def test_a_reference_that_fails_is_an_error_with_its_exit_status(reference, tmp_path):
    reference("loading", "end")
    with pytest.raises(StartupError, match=r"transformers could not run this model \(exit status 7\)"):
        launch.run_reference(tmp_path, lambda line: None, timeout_s=60.0)
