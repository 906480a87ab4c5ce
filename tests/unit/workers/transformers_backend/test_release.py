"""The version of transformers whose classes were tested is the one that is required and installed."""

import json
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from oarlock.base.errors import StartupError
from oarlock.workers.transformers_backend import private_parts, tested
from tests.house.rules import ROOT


def test_the_tested_release_is_required_and_installed() -> None:
    needs = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    (needed,) = [need for need in needs if need.name == "transformers"]
    major, minor = map(int, tested.RELEASE.split("."))
    assert set(str(needed.specifier).split(",")) == {f">={tested.RELEASE}", f"<{major}.{minor + 1}"}
    table = json.loads(Path(tested.__file__).with_name("tested_classes.json").read_text())
    assert table["transformers"].split(".")[:2] == tested.RELEASE.split("."), "run `make model-classes` again"
    assert needed.specifier.contains(version("transformers"))
    tested.check_release()
    assert all(getattr(private_parts, name) is not None for name in private_parts.__all__)
    assert [name for name in private_parts.MODEL_ATTRIBUTES if not hasattr(private_parts.PreTrainedModel, name)] == []


@pytest.mark.parametrize("installed", ["5.22.1", "5.24.0", "5.2.3", "6.0.0"])
def test_classes_are_refused_with_another_release(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(tested, "version", lambda name: installed)
    with pytest.raises(StartupError, match=f"transformers {installed} is installed"):
        tested.check_release()
