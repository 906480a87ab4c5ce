"""A model fetched from a hub by a real server: Ctrl-C in the middle, a killed server, a second start."""

import hashlib
import signal

import pytest

from tests.e2e.running import DEMO, RunningServer, eventually
from tests.unit.server.hub.fake_hub import FakeHub

PARTIAL = hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest() + ".incomplete"


@pytest.fixture
def hub():
    with FakeHub({path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}) as found:
        found.bytes_per_second = 500_000  # of 18 MB: it takes half a minute
        yield found


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_in_the_middle_of_a_download_ends_the_server_and_keeps_partial_files(hub, tmp_path, number):
    server = RunningServer(hub.model, env=hub.environment(tmp_path))
    try:
        eventually(lambda: sum(path.stat().st_size for path in tmp_path.rglob(PARTIAL)), 60, "weights arrive")
        if number is signal.SIGINT:
            eventually(
                lambda: "KiB/s" in server.client.get("/health").json().get("detail", ""), 60, "a speed is reported"
            )
            assert server.client.get("/health").json()["step"] == f"fetching {hub.model}"
        server.processes()
        server.send(number)
        status = server.process.wait(60)
        assert status == (-signal.SIGKILL if number is signal.SIGKILL else 0)
        eventually(lambda: not server.left_behind(), 60, "no process is left")
        assert "Traceback" not in server.log
    finally:
        server.kill_all()
    have = sum(path.stat().st_size for path in tmp_path.rglob(PARTIAL))
    assert 0 < have < (DEMO / "model.safetensors").stat().st_size, "it waited for the rest"
    if number is signal.SIGKILL:
        hub.bytes_per_second = None
        hub.asked.clear()
        with RunningServer(hub.model, env=hub.environment(tmp_path)) as second:
            assert second.text("import os", max_tokens=4, temperature=0)
        assert hub.asked == [("model.safetensors", have)]
