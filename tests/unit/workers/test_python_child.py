"""Processes of ours import what we import, and nothing from the folder in which they were started."""

import subprocess
from pathlib import Path

import pytest

from oarlock.workers.python_child import import_path, start_python

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_of_the_caller_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "of_the_user.py").write_text("")
    for name in ("json", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('foreign code')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":{own}:")  # whose empty entries mean the current directory
    with start_python(["-c", "import json, logging, of_the_user, workers"], stdin=subprocess.DEVNULL) as process:
        assert process.wait(60) == 0


def test_the_users_own_path_comes_after_ours() -> None:
    assert import_path("") == str(ROOT)
    assert import_path("/one::/two:") == f"{ROOT}:/one:/two"
