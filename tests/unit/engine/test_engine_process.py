"""An engine process that was started ahead belongs to one client, or ends."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oarlock.engine.engine_process import EngineProcess

_SLEEPER = ("-c", "import sys, time; print(sys.argv[1:], flush=True); time.sleep(60)")


def test_a_process_that_nobody_took_is_ended() -> None:
    started = EngineProcess(1, command=_SLEEPER)
    assert started._started is not None
    process, sock = started._started
    started.discard()
    started.discard()
    assert process.returncode == -signal.SIGKILL and sock.fileno() == -1


def test_a_process_that_was_taken_lives_on() -> None:
    started = EngineProcess(1, command=_SLEEPER)
    process, sock = started.take()
    started.discard()
    assert process.poll() is None
    with pytest.raises(AssertionError):
        started.take()
    process.kill()
    process.wait()
    sock.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_ignores_the_terminals_interrupt_from_its_first_moment() -> None:
    before = signal.getsignal(signal.SIGINT)
    started = EngineProcess(1, command=_SLEEPER)
    assert signal.getsignal(signal.SIGINT) is before
    process, sock = started.take()
    ignored = next(
        int(line.split()[1], 16)
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("SigIgn")
    )
    os.kill(process.pid, signal.SIGINT)
    process.kill()
    process.wait()
    sock.close()
    assert ignored & (1 << (signal.SIGINT - 1)) and process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_frontend_whose_own_start_failed_leaves_no_error_of_the_engine() -> None:
    ours, its = socket.socketpair()
    code = "import sys; from oarlock.engine.core.process import run; sys.exit(run(int(sys.argv[1]), None))"
    words = [sys.executable, "-c", code, str(its.fileno())]
    process = subprocess.Popen(words, pass_fds=[its.fileno()], stderr=subprocess.PIPE, text=True)
    its.close()
    ours.close()
    log = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and "level=ERROR" not in log
    assert "event=frontend_gone" in log, log
