"""The server below a replica, with small programs in its place: its start, its errors, its end and its actor's."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from oarlock_ray import server_process, with_parent
from oarlock_ray.arguments import ArgumentError
from oarlock_ray.server_process import ServerProcess

from tests.e2e.running import eventually
from tests.unit.server.launch.test_banner import INFO

READY = "print('Oarlock is ready.\\n  URL      http://127.0.0.1:1', flush=True); "
WAIT = "import time; time.sleep(600)"


def program(code):
    return ServerProcess([sys.executable, "-c", code], drain_timeout_s=60)


def test_the_url_is_read_from_the_banner():
    from oarlock.server.launch.banner import banner

    lines = banner("http://127.0.0.1:8123", ("demo",), INFO, 8192, True, {}, False).splitlines()
    assert [found[1] for line in lines if (found := server_process._URL.match(line))] == ["http://127.0.0.1:8123"]


def test_a_server_starts_and_ends():
    async def run():
        server = program(READY + WAIT)
        assert await server.start() == "http://127.0.0.1:1"
        words = psutil.Process(server.pid).cmdline()
        assert words[-4:] == ["--host", "127.0.0.1", "--port", "0"]
        await server.stop()
        assert await server.wait() == -signal.SIGTERM and server.stopping

    asyncio.run(run())


def test_a_server_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(server_process, "_AFTER_DRAIN_S", 0.1)

    async def run():
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + WAIT
        server = ServerProcess([sys.executable, "-c", code], drain_timeout_s=0)
        await server.start()
        await server.stop()
        assert await server.wait() == -signal.SIGKILL

    asyncio.run(run())


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ([sys.executable, "-c", "print('error: Bad.\\nfix: Mend.'); exit(3)"], "error: Bad.\nfix: Mend."),
        (
            [sys.executable, "-c", "print('one'); exit(7)"],
            "error: The server exited with status 7. Its last line: one\n"
            "fix: The log of the replica has all of its output.",
        ),
        (
            [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"],
            "error: The server was killed by signal 9.\nfix: The log of the replica has all of its output.",
        ),
        (
            ["/nowhere/oarlock"],
            "error: /nowhere/oarlock cannot be run: No such file or directory.\n"
            "fix: Name the program by its absolute path, which must be the same on every node.",
        ),
    ],
    ids=["as printed", "without a word", "killed", "not there"],
)
def test_a_start_that_fails_names_the_reason(command, error, capfd):
    async def run():
        await ServerProcess(command, 1).start()

    with pytest.raises(ArgumentError) as caught:
        asyncio.run(run())
    assert str(caught.value) == error


def test_a_server_ends_with_the_process_that_started_it():
    launcher = str(Path(with_parent.__file__))
    code = (
        "import os, subprocess, sys, time; "
        f"child = subprocess.Popen([sys.executable, {launcher!r}, str(os.getpid()), 'sleep', '600']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    eventually(lambda: child.name() == "sleep", 60, "the command runs")
    parent.kill()
    parent.wait()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 60, "it has ended")


def test_a_command_whose_parent_has_ended_already_does_not_start():
    done = subprocess.run([sys.executable, with_parent.__file__, "1", "sleep", "600"], timeout=120)
    assert done.returncode == 1
