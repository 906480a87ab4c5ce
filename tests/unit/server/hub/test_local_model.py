"""Names of models: each listed name means its file, and a name that means nothing is refused with the nearest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.hub.local_model import check_local, find_local, listed_files

LISTED = ("llama3.2:3b", "somebody/demo:q8", "hf.co/owner/demo:q8", "own-Q8_0.gguf", "owner/gguf/model-Q4_K_M.gguf")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with models of Ollama, of llama.cpp and in the hub's cache; the current directory has two."""
    ollama, llama_cpp, hub, here = (tmp_path / name for name in ("ollama", "llama.cpp", "hub", "here"))
    for place in (
        "registry.ollama.ai/library/llama3.2/3b",
        "registry.ollama.ai/somebody/demo/q8",
        "hf.co/owner/demo/q8",
    ):
        manifest = ollama / "manifests" / place
        manifest.parent.mkdir(parents=True)
        layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:1"}]
        manifest.write_text(json.dumps({"layers": layers}))
    directory = hub / "models--owner--gguf" / "snapshots" / "c0ffee"
    files = (ollama / "blobs" / "sha256-1", llama_cpp / "own-Q8_0.gguf", directory / "model-Q4_K_M.gguf")
    for path in (*files, here / "mine-Q4_K_M.gguf", here / "checkpoint" / "config.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
    monkeypatch.setenv("OLLAMA_MODELS", str(ollama))
    monkeypatch.setenv("LLAMA_CACHE", str(llama_cpp))
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(here)
    return tmp_path


def test_every_listed_name_means_its_file() -> None:
    listed = dict(listed_files())
    assert sorted(listed) == sorted(LISTED)
    for name, file in listed.items():
        assert find_local(name) == file and file.read_bytes() == b"GGUF"
        check_local(file)


def test_names_of_another_cache_of_the_hub(machine: Path) -> None:
    (machine / "hub").rename(machine / "elsewhere")
    with pytest.raises(StartupError):
        find_local(LISTED[-1])
    assert find_local(LISTED[-1], str(machine / "elsewhere")) is not None


def test_a_path_is_found_before_a_listed_name_of_the_same_letters(machine: Path) -> None:
    (machine / "here" / "own-Q8_0.gguf").write_bytes(b"GGUF")
    assert find_local("own-Q8_0.gguf") == Path("own-Q8_0.gguf")
    assert find_local("checkpoint") == Path("checkpoint")


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "llama3.2"])
def test_a_hub_id_is_not_on_this_machine(name: str) -> None:
    assert find_local(name) is None


@pytest.mark.parametrize(
    ("name", "cause", "fix"),
    [
        (
            "mine-Q4_K_N.gguf",
            "The GGUF file mine-Q4_K_N.gguf does not exist: the directory {here} has",
            "mine-Q4_K_M.gguf?",
        ),
        ("./mine-Q5_K_M.gguf", "The GGUF file ./mine-Q5_K_M.gguf", "Did you mean mine-Q4_K_M.gguf?"),
        ("own-Q8_1.gguf", "The GGUF file own-Q8_1.gguf", "Did you mean own-Q8_0.gguf?"),
        ("nowhere/x.gguf", "the directory {here}/nowhere does not exist", "Check the path"),
        ("owner/gguf/model-Q4_K_S.gguf", "The GGUF file", "Did you mean owner/gguf/model-Q4_K_M.gguf?"),
        ("llama3.2:1b", "llama3.2:1b is not an Ollama model", "Did you mean llama3.2:3b?"),
        ("zzz:1", "zzz:1 is not an Ollama model", "`oarlock models`"),
        ("./chekpoint", "./chekpoint is neither", "Did you mean checkpoint?"),
        ("/nowhere/at/all", "/nowhere/at/all is neither", "the directory /nowhere/at does not exist"),
        ("/nope", "/nope is neither", "`oarlock models` lists"),
        ("a b", "a b is neither a directory, nor a GGUF file, nor a hub id", "hub ids look like"),
        ("x" * 300 + "!", "is neither", "hub ids look like"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "is an address", "Give the hub id: Qwen/Qwen3-0.6B"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_the_nearest(machine: Path, name: str, cause: str, fix: str) -> None:
    with pytest.raises(StartupError) as caught:
        find_local(name)
    assert cause.format(here=machine / "here") in caught.value.cause
    assert fix in caught.value.fix


def test_the_option_is_named() -> None:
    with pytest.raises(StartupError, match=r"^--tokenizer /nope is neither"):
        find_local("/nope", what="--tokenizer")


@pytest.mark.parametrize(
    ("files", "name", "cause", "fix"),
    [
        (["notes.txt"], "notes.txt", "is a file, but not a GGUF file", "directory"),
        (["notes.txt"], "", "contains no config.json and no GGUF file", "Hugging Face layout"),
        (["model/config.json"], "", "contains no config.json", "model?"),
        (["a.gguf", "a.safetensors"], "", "contains no config.json", "Hugging Face layout"),
    ],
)
def test_a_path_without_a_model(tmp_path: Path, files: list[str], name: str, cause: str, fix: str) -> None:
    folder = tmp_path / "given"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("text")
    with pytest.raises(StartupError) as caught:
        check_local(folder / name)
    assert cause in caught.value.cause and fix in caught.value.fix
