"""The commands of docs/scaling.md for two hosts, each typed on its host as it is written there."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import DEMO, ROOT, environment, eventually
from tests.multihost.group import Inside
from tests.multihost.hosts import hosts_for_test

PAGE = ROOT / "docs" / "scaling.md"
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
HEAD, NODE, TORCHRUN, PER_RANK = COMMANDS  # by what they are for
PAIRS = {
    "flags": (HEAD, NODE),
    "torchrun": (TORCHRUN, TORCHRUN.replace("--node-rank 0", "--node-rank 1")),
    "torchrun per rank": (PER_RANK, PER_RANK.replace("--node-rank 0", "--node-rank 1")),
}


def typed(command, host, folder, head_address):
    """A process of that command on a host: the head's address, the model and the programs are those of these tests."""
    command = command.replace("10.0.0.1", head_address).replace("Qwen/Qwen2.5-0.5B-Instruct", str(DEMO))
    command = re.sub(r"^oarlock ", f"{sys.executable} -P -m oarlock ", command)
    command = re.sub(r"^torchrun ", f"{Path(sys.executable).parent}/torchrun ", command)
    with host.inside():
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment(), start_new_session=True, stdout=2
        )


def ready(client, processes):
    assert [process.poll() for process in processes] == [None, None]
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_the_commands_differ_in_the_number_of_the_host_alone():
    assert HEAD.replace("--node-rank 0", "--node-rank 1") == NODE
    assert all(words.startswith("torchrun ") and "--node-rank 0" in words for words in (TORCHRUN, PER_RANK))


@pytest.mark.soak
@pytest.mark.parametrize("way", PAIRS)
def test_two_hosts_serve_as_the_page_says(way, tmp_path):
    with hosts_for_test("switch") as hosts:
        commands = zip(PAIRS[way], hosts.hosts, strict=True)
        processes = [typed(command, host, tmp_path, hosts.head.address) for command, host in commands]
        try:
            with httpx.Client(base_url="http://127.0.0.1:8000", transport=Inside(hosts.head), timeout=60) as client:
                eventually(lambda: ready(client, processes), 120, "the head's /health says 200")
                answer = client.post("/v1/completions", json={"prompt": "import ", "max_tokens": 4})
                assert answer.status_code == 200, answer.text
            os.killpg(processes[0].pid, signal.SIGINT)
            for process in processes:
                process.wait(60)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(60)
