"""Adapters of `--lora-modules` and `--lora-dir` on this machine. Paths of clients are in tests/contract."""

import asyncio
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.config.settings import make_settings
from oarlock.server.hub.adapter_path import AdapterPaths, find_local_adapters, find_start_adapters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("peft", "gguf", "two", "none", ".hidden"):
        (tmp_path / name).mkdir()
    for file in ("peft/adapter_config.json", "gguf/a.gguf", "two/a.gguf", "two/b.gguf", ".hidden/a.gguf", "one.gguf"):
        (tmp_path / file).touch()
    (tmp_path / "link").symlink_to(tmp_path / "peft")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    return tmp_path


def start(*modules: str, **options: object) -> list[str]:
    settings = make_settings({"enable_lora": True, "lora_modules": modules, "offline": True, **options})
    found = asyncio.run(find_start_adapters(settings, lambda phase, fraction, detail: None))
    return [adapter.directory for adapter in found]


def test_an_adapter_is_a_directory_or_a_gguf_file(folder, monkeypatch):
    monkeypatch.chdir(folder)
    given = ["a=peft", f"b={folder}/gguf", "c=./one.gguf", "d=link"]
    assert start(*given) == [str(folder / name) for name in ("peft", "gguf", "one.gguf", "peft")]
    for name in ("x" * 129, "a\nb", "peft (replacement)"):  # no adapter can have these names
        (folder / name).symlink_to(folder / "peft")
    found = AdapterPaths(make_settings({"enable_lora": True, "lora_dir": str(folder)})).all()
    assert [*found] == ["gguf", "link", "one.gguf", "peft"]
    assert found["link"] == found["peft"] == str(folder / "peft")


@pytest.mark.parametrize(
    ("module", "options", "cause"),
    [
        ("a=/nowhere/at/all", {}, "a: The adapter /nowhere/at/all is neither a directory, nor a GGUF file, nor a hub"),
        ("a={}/two", {}, "a: The adapter {}/two cannot be read: the directory has several GGUF files."),
        ("a={}/none", {}, "{}/none cannot be read: the directory has neither adapter_config.json nor a GGUF file."),
        ("a={}/peft/adapter_config.json", {}, "is neither a directory nor a GGUF file."),
        ("a={}/lost", {}, "a: The adapter {}/lost cannot be read: No such file or directory."),
        ("a={}/nothing.gguf", {}, "is neither a directory, nor a GGUF file, nor a hub id."),
        ("oarlock-demo={}/peft", {}, "the name oarlock-demo, which is the name of the model."),
        ("b={}/peft", {"served_model_name": ("a", "b")}, "the name b, which is the name of the model."),
        ("B={}/peft", {"served_model_name": ("b",), "ignore_model_case": True}, "which is the name of the model."),
        ("a={}/peft", {"lora_dir": "/nowhere"}, "--lora-dir /nowhere is not a directory."),
    ],
)
def test_an_adapter_that_cannot_be_found_stops_the_start(folder, module, options, cause):
    with pytest.raises(StartupError) as caught:
        start(module.format(folder), **options)
    assert cause.format(folder) in caught.value.cause
    with pytest.raises(StartupError) as planned:
        settings = make_settings({"enable_lora": True, "lora_modules": (module.format(folder),), **options})
        asyncio.run(find_local_adapters(settings))
    assert planned.value.cause == caught.value.cause
