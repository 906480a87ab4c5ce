"""`oarlock models`: what lies in the cache, its sizes, and why something in it cannot be served."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shutil
import threading
from pathlib import Path

import pytest

from oarlock.server.cli import main as cli
from oarlock.server.cli import serve
from oarlock.server.config.settings import make_settings
from oarlock.server.hub.model_path import resolve
from oarlock.workers.catalogue import CATALOGUE, classes_of_transformers
from tests.golden.gguf_writer import all_of, write_gguf
from tests.golden.tiny_encoders import make_encoder
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
    folder = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama.cpp"))
    return Cache(folder)


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


@pytest.mark.slow
def test_why_the_others_are_not(cache, demo, capsys):
    config = json.loads(demo["config.json"])
    mamba = json.dumps(config | {"architectures": ["MambaForCausalLM"]}).encode()
    cache.add("owner/mamba", demo | {"config.json": mamba})
    cache.add("owner/words", {"tokenizer.json": demo["tokenizer.json"]})
    cache.add("owner/gguf", {"model.gguf": b"GGUF", "mmproj-model.gguf": b"GGUF"})
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
        ("mamba", "config.json: architecture 'MambaForCausalLM' is not supported."),
        ("words", "It has no config.json."),
        ("gguf/model.gguf", "model.gguf has only 4 bytes."),
        ("bare", "It has no tokenizer; --tokenizer names another one."),
        ("cut", "model.safetensors"),
        ("begun", "Its download was interrupted."),
        ("nothing", "Its download was interrupted, and no file is complete."),
    ):
        assert reason in reasons.pop(f"owner/{name}")
    assert not reasons
    assert models["owner/nothing", ""]["size"] == 1000


def _is_resolved(name):
    """Whether `serve`, `verify`, `plan` and all others that take a MODEL find the model of this name."""
    directory = asyncio.run(resolve(make_settings({"model": name}), lambda *progress: None))
    return (Path(directory) / "config.json").is_file()


@pytest.mark.slow
def test_models_of_ollama_and_llama_cpp_are_listed(cache, tmp_path, capsys):
    models, own = tmp_path / "ollama", tmp_path / "llama.cpp"
    (models / "blobs").mkdir(parents=True)
    own.mkdir()
    write_gguf(DEMO, own / "demo.gguf", all_of("F16"), part_bytes=4_000_000)
    size = sum(path.stat().st_size for path in own.glob("*.gguf"))
    assert len(list(own.glob("demo-0*"))) > 1
    blob = models / "blobs" / "sha256-1"
    write_gguf(DEMO, tmp_path / "one.gguf", all_of("Q8_0")).rename(blob)
    for place, digest in (
        ("registry.ollama.ai/library/demo/latest", "sha256:1"),
        ("registry.ollama.ai/somebody/demo/q8", "sha256:1"),
        ("hf.co/owner/demo/q8", "sha256:1"),
        ("registry.ollama.ai/library/gone/latest", "sha256:2"),
        ("registry.ollama.ai/library/wrong/latest", None),
    ):
        path = models / "manifests" / place
        path.parent.mkdir(parents=True)
        layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}]
        path.write_text("{}" if digest is None else json.dumps({"layers": layers}))
    found, _ = _listed(capsys)
    shown = {name: (model["source"], model["size"], model["argument"]) for (name, _), model in found.items()}
    of_ollama = ("ollama", blob.stat().st_size)
    (first,) = own.glob("demo-00001*")
    assert shown == {
        **{name: (*of_ollama, name) for name in ("demo:latest", "somebody/demo:q8", "hf.co/owner/demo:q8")},
        first.name: ("llama.cpp", size, str(first)),
    }  # fmt: skip
    assert all(model["is_served"] for model in found.values())
    assert cli.main(["models"]) == 0
    assert f"oarlock serve {first}  # {first.name}\n" in capsys.readouterr().out
    for name in shown:
        assert _is_resolved(name), name


def test_an_encoder_is_served(cache, tmp_path, capsys):
    directory = make_encoder(tmp_path, "bert", tokenizer=True)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    cache.add("owner/bert", files)
    cache.add("owner/empty", {name: content for name, content in files.items() if "safetensors" not in name})
    models, _ = _listed(capsys)
    verdicts = {name: (model["is_served"], model["why_not"]) for (name, _), model in models.items()}
    assert verdicts["owner/bert"] == (True, "")
    assert "weights" in verdicts["owner/empty"][1]


@pytest.mark.parametrize(("typed", "chosen"), [("2", "owner/b"), ("3", None), ("\n", None), ("", None)])
def test_a_model_is_offered_only_where_somebody_can_answer(cache, demo, monkeypatch, typed, chosen):
    terminal, stream = pty.openpty()
    monkeypatch.setattr("sys.stdin", open(os.dup(stream)))  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", open(os.dup(stream), "w"))  # noqa: SIM115
    monkeypatch.setattr("os.tcgetpgrp", lambda number: os.getpgrp())
    monkeypatch.setattr(serve, "_ANSWER_S", 5.0 if typed else 0.2)
    assert serve._offered(make_settings({"port": 0})).model is None, "nothing is found, so nothing is asked"
    for name in ("owner/a", "owner/b"):
        cache.add(name, demo)
    shown = b""

    def type_the_answer():
        nonlocal shown
        while b"Press a digit" not in shown:
            shown += os.read(terminal, 1000)
        os.write(terminal, typed.encode())

    typist = threading.Thread(target=type_the_answer)
    typist.start()
    assert serve._offered(make_settings({"port": 0})).model == chosen
    monkeypatch.setattr("os.tcgetpgrp", lambda number: os.getpgrp() + 1)
    assert serve._offered(make_settings({"port": 0})).model is None, "a job in the background"
    typist.join()
    os.write(stream, b"end")
    shown += os.read(terminal, 10_000)
    assert shown.count(b"1  owner/a") == shown.count(b"Press a digit") == 1
    assert (b"oarlock serve owner/b" in shown) == (chosen is not None)


def test_all_classes_that_are_served_are_listed_by_families(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # the models on this machine do not matter
    assert cli.main(["models", "--supported"]) == 0
    lines = capsys.readouterr().out.splitlines()
    llama = lines.index("Llama")
    assert lines[llama + 1].split() == [
        *("LlamaForCausalLM", "meta-llama/Llama-3.1-8B-Instruct", "GGUF", "llama", "gated", "download")
    ]
    begin = lines.index("computed by transformers' code, slower (docs/models.md)")
    listed = {line.split()[0]: line.split()[1] for line in lines[:begin] if line.startswith("  ")}
    assert listed == {name: entry.checkpoint for name, entry in CATALOGUE.items()}
    others = [line.strip() for line in lines[begin + 1 : -1]]
    assert others == classes_of_transformers() and "JetMoeForCausalLM" in others and not listed.keys() & others
    assert lines[-1].startswith(f"{len(CATALOGUE)} + {len(others)} classes. `oarlock doctor MODEL` shows")
    assert any(line.endswith("  scores") for line in lines)
    assert cli.main(["models", "--supported", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["supported"]
    assert [one["architecture"] for one in found] == list(CATALOGUE)
    assert found[0].keys() == {"architecture", "family", "checkpoint", "task", "gguf", "notes"}


def test_two_commits_of_one_model_share_files(cache, demo, capsys):
    cache.add("owner/model", demo)
    cache.add("owner/model", demo | {"NOTES.md": b"new"}, commit="f" * 40, revisions=("v2",))
    models, listed = _listed(capsys)
    assert [model["revisions"] for model in models.values()] == [["main"], ["v2"]]
    assert listed["bytes"] == sum(map(len, demo.values())) + 3
    assert sum(model["size"] for model in models.values()) == 2 * listed["bytes"] - 3


def test_an_empty_cache_and_one_elsewhere(cache, demo, tmp_path, capsys):
    assert cli.main(["models", "--download-dir", str(tmp_path / "none")]) == 0
    assert f"There are no models in {tmp_path / 'none'}, nor of Ollama" in capsys.readouterr().out
    Cache(tmp_path / "other").add("owner/model", demo)
    assert cli.main(["models", "--download-dir", str(tmp_path / "other")]) == 0
    assert "owner/model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["pull"], "MODEL is missing."),
        (["pull", str(DEMO)], "and not a model of the hub"),
        (["pull", "owner/model", "--revision", "../x"], "is not a valid revision"),
        (["pull", "owner/model", "--port", "1"], "Unknown flag: --port"),
        (["pull", "owner/model", "--offline"], "is neither a directory on this machine nor in the cache"),
    ],
)
def test_invalid_pulls_are_refused(cache, capsys, words, cause):
    assert cli.main([*words, "--download-dir", str(cache.folder)]) in (2, 3)
    error, fix = capsys.readouterr().err.splitlines()
    assert cause in error and fix.startswith("fix: ")
