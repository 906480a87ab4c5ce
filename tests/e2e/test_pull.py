"""`oarlock pull` from a hub on loopback: stopped and gone on with, damaged and mended, listed and served."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.embedding_demo import embedding_demo
from tests.e2e.running import DEMO, ROOT, RunningServer, command, environment, eventually
from tests.unit.server.hub.fake_hub import FakeHub

pytestmark = pytest.mark.soak
FILES = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}


def _run(hub, home, *words):
    env = environment(**hub.environment(home))
    return subprocess.run(command(*words), cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_a_model_is_pulled_in_pieces_then_checked_listed_and_served(tmp_path):
    with FakeHub(FILES) as hub:
        hub.bytes_per_second = 4_000_000
        env = environment(**hub.environment(tmp_path))
        begun = subprocess.Popen(
            command("pull", hub.model), cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        blobs = tmp_path / "hub" / "models--owner--model" / "blobs"

        def arrived():
            assert begun.poll() is None
            return sum(path.stat().st_size for path in blobs.glob("*.incomplete"))

        eventually(lambda: arrived() > 2_000_000, 60, "two megabytes of the weights")
        os.killpg(begun.pid, signal.SIGINT)
        _, shown = begun.communicate(timeout=60)
        assert begun.returncode == 130 and "the data is saved" in shown
        kept = sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
        assert kept > 2_000_000
        hub.bytes_per_second = None
        hub.asked.clear()
        result = _run(hub, tmp_path, "pull", hub.model)
        assert result.returncode == 0, result.stderr
        begins = dict(hub.asked)
        assert begins["model.safetensors"] is not None and begins["model.safetensors"] > 1_000_000
        assert "MiB in" in result.stdout and "digests checked" in result.stdout
        directory = result.stdout.splitlines()[1]
        weights = os.path.join(directory, "model.safetensors")
        with open(weights, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        hub.asked.clear()
        assert "is damaged" in _run(hub, tmp_path, "pull", hub.model, "--offline").stderr
        assert _run(hub, tmp_path, "pull", hub.model).returncode == 0
        assert hub.names_asked == {"model.safetensors"}
        with open(weights, "rb") as file:
            assert file.read() == FILES["model.safetensors"]
        (listed,) = json.loads(_run(hub, tmp_path, "models", "--json").stdout)["models"]
        assert listed["name"] == hub.model and listed["is_served"] and listed["directory"] == directory
    offline = {"HF_HOME": str(tmp_path)}
    with RunningServer("owner/model", "--offline", env=offline) as server:
        assert server.client.post("/v1/completions", json={"prompt": "import "}).status_code == 200


def test_folders_of_modules_come_along_and_are_checked_before_weights(tmp_path):
    checkpoint = embedding_demo(tmp_path / "checkpoint", dense=16)
    files = {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    described = "2_Dense/config.json"
    wrong = json.loads(files[described]) | {"activation_function": "my.own.Function"}
    with FakeHub(files | {described: json.dumps(wrong).encode()}) as hub:
        result = _run(hub, tmp_path / "home", "pull", hub.model)
        assert result.returncode == 3 and "my.own.Function" in result.stderr
        assert not any(name.endswith(".safetensors") for name in hub.names_asked)
    with FakeHub(files) as hub:
        result = _run(hub, tmp_path / "other", "pull", hub.model)
        assert result.returncode == 0, result.stderr
    directory = Path(result.stdout.splitlines()[1])
    found = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert found == {name: content for name, content in files.items() if name in found}
    assert {"1_Pooling/config.json", described, "2_Dense/model.safetensors", "model.safetensors"} <= found.keys()
