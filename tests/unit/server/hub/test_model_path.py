"""From MODEL to a directory: the demo model, a directory, a hub id, and names that are none of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.config.settings import make_settings
from oarlock.server.hub import model_path

ROOT = Path(__file__).resolve().parents[4]


def _resolve(**values):
    return asyncio.run(model_path.resolve(make_settings(values), lambda phase, fraction, detail: None))


def test_the_demo_model_is_found_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Path(_resolve()) == ROOT / "models" / "oarlock-demo"
    assert model_path.display_name(None) == "oarlock-demo"


def test_a_directory_is_served_under_its_name(monkeypatch, tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert _resolve(model="./my-model") == str(folder)
    assert model_path.display_name("./my-model") == "my-model"
    assert model_path.display_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(StartupError, match="--revision"):
        _resolve(model="./my-model", revision="v1")


@pytest.mark.parametrize(
    "values",
    [
        *({"model": model} for model in ("../up", "a/b/c", "/no/such", "a b", "no such/dir/at/all", "-x")),
        {"model": "a/b", "revision": "../../x"},
    ],
    ids=str,
)
def test_invalid_hub_ids_never_reach_the_network(monkeypatch, values):
    async def forbidden(*args):
        raise AssertionError("asked the network")

    monkeypatch.setattr(model_path, "download", forbidden)
    monkeypatch.chdir("/")
    with pytest.raises(StartupError):
        _resolve(**values)
