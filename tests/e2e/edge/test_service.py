"""A server under a service manager: systemd's own check of the unit, its socket, its notices, and a restart."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.e2e.long_context import long_context_demo
from tests.e2e.open_stream import OpenStream
from tests.e2e.running import DEMO, ROOT, command, environment, eventually, free_port

UNITS = ROOT / "configs" / "systemd"
# What a server takes over of a manager's descriptor 3: here the manager is this test.
_HANDED_OVER = 'exec 3<&"$1"; shift; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'


def needs(program):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} (Debian: apt-get install systemd)")


def _verified(folder, change=lambda text: text):
    for unit in UNITS.iterdir():
        shutil.copy(unit, folder)
    text = (UNITS / "oarlock.service").read_text()
    assert "/opt/oarlock/.venv/bin/oarlock" in text
    program = Path(sys.executable).with_name("oarlock")
    program = program if program.exists() else Path("/bin/true")  # it must be a program, no more
    (folder / "oarlock.service").write_text(change(text.replace("/opt/oarlock/.venv/bin/oarlock", str(program))))
    units = [folder / unit.name for unit in UNITS.iterdir()]
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, units)], capture_output=True, text=True, timeout=60
    )


@needs("systemd-analyze")
def test_systemd_accepts_the_units(tmp_path):
    done = _verified(tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs("systemd-analyze")
@pytest.mark.parametrize(
    ("right", "wrong"), [("KillMode=mixed", "KillMode=some"), ("WatchdogSec=60s", "Watchdogs=60s")]
)
def test_systemd_names_a_mistake(tmp_path, right, wrong):
    assert right in (UNITS / "oarlock.service").read_text()
    done = _verified(tmp_path, lambda text: text.replace(right, wrong))
    assert set(wrong.split("=")) & set(re.findall(r"\w+", done.stderr)), done.stderr


def test_the_unit_and_the_documentation_agree_on_statuses_that_no_restart_helps():
    """And an end by a second signal, which somebody wanted."""
    rows = [
        line.split("|")
        for line in (ROOT / "docs" / "reliability.md").read_text().split("## Exit statuses")[1].splitlines()
        if line.startswith("| ") and line[2].isdigit()
    ]
    useless = {status for row in rows if row[3].strip() == "no" for status in row[1].replace(",", " ").split()} - {"0"}
    line = next(
        line for line in (UNITS / "oarlock.service").read_text().splitlines() if line.startswith("RestartPrevent")
    )
    assert set(line.partition("=")[2].split()) == useless and len(useless) > 4


class Notices:
    """The manager's side of NOTIFY_SOCKET."""

    def __init__(self, folder):
        self.path = str(folder / "notify")
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(self.path)
        self._channel.setblocking(False)
        self.lines = []

    def seen(self, line):
        while True:
            try:
                self.lines += self._channel.recv(4096).decode().splitlines()
            except BlockingIOError:
                return line in self.lines

    def close(self):
        self._channel.close()


@pytest.fixture
def notices(tmp_path):
    found = Notices(tmp_path)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.soak
@needs("systemd-socket-activate")
def test_a_first_connection_starts_the_server_which_tells_its_phases(tmp_path, notices):
    port, log = free_port(), tmp_path / "log"
    variables = environment(NOTIFY_SOCKET=notices.path, WATCHDOG_USEC="2000000", OARLOCK_DRAIN_TIMEOUT="7")
    passed = [f"--setenv={name}={value}" for name, value in variables.items()]
    program = ["systemd-socket-activate", f"--listen=127.0.0.1:{port}", *passed, *command("serve", DEMO)]
    with log.open("w") as file:
        process = subprocess.Popen(program, stdout=file, stderr=subprocess.STDOUT, env=variables)
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: "Listening on" in log.read_text(), 60, "systemd holds the socket")
        first = httpx.get(f"{url}/health", timeout=120, trust_env=False)  # waits in the socket until it is taken over
        assert first.status_code in (200, 503)
        eventually(lambda: notices.seen("READY=1"), 120, f"the server is ready\n{log.read_text()}")
        assert "WATCHDOG=1" in notices.lines or eventually(
            lambda: notices.seen("WATCHDOG=1"), 60, "the watchdog is fed"
        )
        assert any(line.startswith("STATUS=loading") for line in notices.lines)
        assert notices.lines.index("READY=1") > 0 and "EXTEND_TIMEOUT_USEC=330000000" in notices.lines
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60, trust_env=False)
        assert answer.status_code == 200
        assert f"URL      {url}\n" in log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert notices.seen("STOPPING=1") and "EXTEND_TIMEOUT_USEC=16000000" in notices.lines
    finally:
        process.kill()
        process.wait(60)


def _started(listener, model, log):
    script = ["bash", "-c", _HANDED_OVER, "bash", str(listener.fileno()), *command("serve", model)]
    with log.open("w") as file:
        return subprocess.Popen(
            script,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(OARLOCK_DRAIN_TIMEOUT="120"),
            pass_fds=[listener.fileno()],
        )


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_restart_loses_no_stream_and_refuses_no_connection(tmp_path):
    """Who connects while the old server finishes its streams waits for the new one."""
    (tmp_path / "model").mkdir()
    model = long_context_demo(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        class Address:
            pass

        Address.url = url
        logs = [tmp_path / "old.log", tmp_path / "new.log"]
        processes = [_started(listener, model, logs[0])]
        try:
            ready = lambda: httpx.get(f"{url}/health", timeout=120, trust_env=False).status_code == 200  # noqa: E731
            eventually(ready, 120, f"the old server is ready\n{logs[0].read_text()}")
            stream = OpenStream(Address, tokens=4_000)
            assert stream.flowing.wait(60)
            processes[0].send_signal(signal.SIGTERM)
            eventually(lambda: "event=draining" in logs[0].read_text(), 60, "it has begun to end")
            answers = []

            def ask():
                body = {"prompt": "import os\n", "max_tokens": 4}
                with httpx.Client(timeout=300, trust_env=False) as client:
                    while True:  # the new server says 503 while it loads
                        answer = client.post(f"{url}/v1/completions", json=body)
                        if answer.status_code != 503 or answer.json()["error"]["code"] != "server_loading":
                            answers.append(answer)
                            return

            asking = [threading.Thread(target=ask) for _ in range(8)]
            for thread in asking:
                thread.start()
            assert processes[0].wait(180) == 0, logs[0].read_text()
            stream.join(60)
            assert stream.done and stream.failure is None
            assert answers == []  # they wait
            processes.append(_started(listener, model, logs[1]))
            for thread in asking:
                thread.join(180)
            assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
            processes[1].send_signal(signal.SIGTERM)
            assert processes[1].wait(60) == 0
        finally:
            for process in processes:
                process.kill()
                process.wait(60)


def test_a_socket_at_another_address_than_the_settings_name_ends_the_start(tmp_path):
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = ["bash", "-c", _HANDED_OVER, "bash", str(listener.fileno()), *command("serve", DEMO, "--port", 9)]
        done = subprocess.run(
            script,
            env=environment(),
            pass_fds=[listener.fileno()],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 3, done.stderr
    assert "error: The service manager passes a socket" in done.stderr and "fix: Leave out --host" in done.stderr
    assert "Traceback" not in done.stderr and not log.exists()
