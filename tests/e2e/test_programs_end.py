"""`oarlock verify` and `oarlock replay` end as a whole: however they are stopped, none of their processes is left."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.running import DEMO, ROOT, RunningServer, alive, command, environment, eventually


class Program:
    """A command in a separate session, as on a terminal, and every process below it."""

    def __init__(self, scratch: Path, *words: str | int | Path) -> None:
        self.process = subprocess.Popen(
            command(*words), cwd=ROOT, env=environment(TMPDIR=str(scratch), OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.below: list[psutil.Process] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def wait_for(self, number: int) -> None:
        """Wait until `number` processes live below the command."""

        def enough() -> bool:
            assert self.process.poll() is None, self.lines
            self.below = psutil.Process(self.process.pid).children(recursive=True)
            return len(self.below) >= number

        eventually(enough, 60, f"{number} processes below the command")

    def end(self) -> tuple[int, str]:
        """Wait until nothing of the program is left; return its status and output."""
        status = self.process.wait(60)
        eventually(lambda: not any(map(alive, self.below)), 60, "every process below has ended")
        self._reader.join(60)
        assert not self._reader.is_alive(), "a process still holds its output"
        return status, "".join(self.lines)


@pytest.fixture
def started() -> Iterator[list[Program]]:
    """Programs that a test starts, ended even where it fails."""
    programs: list[Program] = []
    yield programs
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait(60)
        for process in filter(alive, program.below):
            process.kill()


STOPS = {"SIGTERM": (signal.SIGTERM, 143), "Ctrl-C": (signal.SIGINT, 130), "SIGKILL": (signal.SIGKILL, -9)}


def stop(program: Program, how: str) -> int:
    """Stop a program; return the expected exit status. Ctrl-C reaches every process of the terminal."""
    number, status = STOPS[how]
    (os.killpg if how == "Ctrl-C" else os.kill)(program.process.pid, number)
    return status


def seldom(*ways: str) -> list:
    """Every way to stop a program; of these the longer run alone tries all, since each takes seconds."""
    return [pytest.param(how, marks=pytest.mark.soak) if how in ways else how for how in STOPS]


@pytest.mark.parametrize("how", seldom("Ctrl-C", "SIGKILL"))
def test_verify_while_transformers_runs(started, tmp_path, how):
    started.append(program := Program(tmp_path, "verify", DEMO))
    program.wait_for(2)  # the program and transformers' own process
    eventually(lambda: list(tmp_path.glob("oarlock-verify-*")), 30, "the folder of tensors")
    expected = stop(program, how)
    status, text = program.end()
    assert status == expected, text
    assert "Traceback" not in text and "error:" not in text
    assert list(tmp_path.glob("oarlock-*")) == []


@pytest.mark.soak
def test_verify_while_ranks_run(started, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started.append(program := Program(scratch, "verify", DEMO, "-tp", 2, "--prompts", prompts))
    program.wait_for(3)  # the program and two ranks
    expected = stop(program, "Ctrl-C")
    status, text = program.end()
    assert status == expected, text
    assert "Traceback" not in text and "error:" not in text
    assert list(scratch.glob("oarlock-*")) == []


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("recording") / "steps.rec"
    with RunningServer(DEMO, "--record", file) as server:
        server.complete("import os\n", max_tokens=4)
    return file


@pytest.mark.soak
@pytest.mark.parametrize("how", STOPS)
def test_replay(started, tmp_path, recording, how):
    started.append(program := Program(tmp_path, "replay", recording, "-tp", 2))
    program.wait_for(3)  # the program and two ranks
    expected = stop(program, how)
    status, text = program.end()
    assert status == expected, text
    assert "Traceback" not in text and "error:" not in text
