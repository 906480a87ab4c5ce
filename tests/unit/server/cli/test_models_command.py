"""`oarlock models`: what lies in the cache, its sizes, and why something in it cannot be served."""

from __future__ import annotations

import json
import shutil

import pytest
from huggingface_hub import constants

from oarlock.server.cli import main as cli
from tests.house.rules import ROOT
from tests.unit.server.hub.fake_hub import etag

DEMO = ROOT / "models" / "oarlock-demo"
COMMIT = "c0ffee" + "0" * 34


class Cache:
    """A cache with models as downloads leave them."""

    def __init__(self, folder):
        self.folder = folder

    def add(self, model, files, *, commit=COMMIT, revisions=("main",)):
        folder = self.folder / f"models--{model.replace('/', '--')}"
        directory = folder / "snapshots" / commit
        directory.mkdir(parents=True)
        (folder / "blobs").mkdir(exist_ok=True)
        for name, content in files.items():
            blob = folder / "blobs" / etag(content, is_large=True)
            blob.write_bytes(content)
            (directory / name).symlink_to(blob)
        for revision in revisions:
            path = folder / "refs" / revision
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)
        return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return Cache(tmp_path)


@pytest.fixture(scope="module")
def demo():
    return {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}


def _listed(capsys):
    assert cli.main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    return {(model["name"], model["commit"][:6]): model for model in listed["models"]}, listed


def test_a_model_that_is_served(cache, demo, capsys):
    cache.add("owner/a-model", demo, revisions=("main", "refs/pr/1"))
    models, listed = _listed(capsys)
    (found,) = models.values()
    size = sum(map(len, demo.values()))
    assert (found["is_served"], found["why_not"], found["architecture"]) == (True, "", "Qwen2ForCausalLM")
    assert (found["name"], found["revisions"], found["size"]) == ("owner/a-model", ["main", "refs/pr/1"], size)
    assert listed["bytes"] == size and listed["cache"] == str(cache.folder)
    assert cli.main(["models"]) == 0
    row, total = capsys.readouterr().out.splitlines()
    assert row.startswith("owner/a-model  main, refs/pr/1") and row.endswith("MiB  served (Qwen2ForCausalLM)")
    assert total.endswith(f"MiB in {cache.folder}")


def test_why_the_others_are_not(cache, demo, capsys):
    config = json.loads(demo["config.json"])
    mamba = json.dumps(config | {"architectures": ["MambaForCausalLM"]}).encode()
    cache.add("owner/mamba", demo | {"config.json": mamba})
    cache.add("owner/words", {"tokenizer.json": demo["tokenizer.json"]})
    cache.add("owner/gguf", {"model.gguf": b"GGUF"})
    bare = {name: content for name, content in demo.items() if not name.startswith("tokenizer")}
    cache.add("owner/bare", bare)
    cut = demo | {"model.safetensors": demo["model.safetensors"][:-100]}
    cache.add("owner/cut", cut)
    begun = cache.add("owner/begun", {name: demo[name] for name in ("config.json", "tokenizer.json")})
    (begun / "blobs" / f"{'0' * 64}.incomplete").write_bytes(b"x" * 1000)
    nothing = cache.add("owner/nothing", {})
    shutil.rmtree(nothing / "snapshots")
    (nothing / "blobs" / f"{'0' * 64}.incomplete").write_bytes(b"x" * 1000)
    (cache.folder / "datasets--owner--data").mkdir()
    models, _ = _listed(capsys)
    reasons = {name: model["why_not"] for (name, _), model in models.items()}
    assert not any(model["is_served"] for model in models.values())
    for name, reason in (
        ("mamba", "MambaForCausalLM"),
        ("words", "It has no config.json."),
        ("gguf", "It holds GGUF files"),
        ("bare", "It has no tokenizer; --tokenizer names another."),
        ("cut", "model.safetensors"),
        ("begun", "Its download was interrupted."),
        ("nothing", "Its download was interrupted: nothing is whole."),
    ):
        assert reason in reasons.pop(f"owner/{name}")
    assert not reasons
    assert models["owner/nothing", ""]["size"] == 1000


def test_two_commits_of_one_model_share_files(cache, demo, capsys):
    cache.add("owner/model", demo)
    cache.add("owner/model", demo | {"NOTES.md": b"new"}, commit="f" * 40, revisions=("v2",))
    models, listed = _listed(capsys)
    assert [model["revisions"] for model in models.values()] == [["main"], ["v2"]]
    assert listed["bytes"] == sum(map(len, demo.values())) + 3
    assert sum(model["size"] for model in models.values()) == 2 * listed["bytes"] - 3


def test_an_empty_cache_and_one_elsewhere(cache, demo, tmp_path, capsys):
    assert cli.main(["models", "--download-dir", str(tmp_path / "none")]) == 0
    assert f"There are no models in {tmp_path / 'none'}." in capsys.readouterr().out
    Cache(tmp_path / "other").add("owner/model", demo)
    assert cli.main(["models", "--download-dir", str(tmp_path / "other")]) == 0
    assert "owner/model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["pull"], "There is no MODEL."),
        (["pull", str(DEMO)], "is not a model of the hub"),
        (["pull", "owner/model", "--revision", "../x"], "is not a valid revision"),
        (["pull", "owner/model", "--port", "1"], "Unknown flag: --port"),
        (["pull", "owner/model", "--offline"], "is neither a directory here nor in the cache"),
    ],
)
def test_what_cannot_be_pulled(cache, capsys, words, cause):
    assert cli.main([*words, "--download-dir", str(cache.folder)]) in (2, 3)
    error, fix = capsys.readouterr().err.splitlines()
    assert cause in error and fix.startswith("fix: ")
