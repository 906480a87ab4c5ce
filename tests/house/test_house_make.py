"""The Makefile and the continuous-integration script keep their word, tried in a folder of their own."""

import os
import re
import shutil
import subprocess

import pytest

from tests.house.rules import ROOT

INPUTS = ("Makefile", "requirements.txt", "requirements-dev.txt", "pyproject.toml")


def run(folder, *command):
    # An outer `make` hands its own flags and level down; this one is to start afresh.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path):
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def install_by_hand(folder, *stamps):
    (folder / ".venv").mkdir()
    for stamp in stamps:
        (folder / ".venv" / stamp).touch()


def test_help_names_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    listed = run(ROOT, "make", "help").stdout
    assert [name for name in targets[1].split() if name != "help" and f"make {name} " not in listed] == []


@pytest.mark.parametrize(
    "target", ["install", "serve", "test", "lint", "soak", "verify-full", "accuracy", "clients", "fuzz", "bench-load"]
)
def test_a_fresh_checkout_is_installed_first(folder, target):
    plan = run(folder, "make", "-n", target).stdout
    assert "-m venv .venv" in plan and "-r requirements.txt" in plan and "--editable ." in plan
    assert ("-r requirements-dev.txt" in plan) == (target not in ("install", "serve"))


def test_a_second_install_does_nothing(folder):
    install_by_hand(folder, ".oarlock-installed")
    assert run(folder, "make", "-n", "install").stdout.count("pip") == 0
    os.utime(folder / "requirements.txt", (2**32, 2**32))  # a new pin
    assert "-r requirements.txt" in run(folder, "make", "-n", "install").stdout


def test_serve_passes_its_arguments_on(folder):
    install_by_hand(folder, ".oarlock-installed")
    assert run(folder, "make", "-n", "serve", "ARGS=some/model -tp 2").stdout.strip() == (
        "exec .venv/bin/oarlock serve some/model -tp 2"
    )


def test_the_tests_are_linter_formatter_types_and_pytest(folder):
    install_by_hand(folder, ".oarlock-installed", ".oarlock-tools-installed")
    plan = run(folder, "make", "-n", "test").stdout
    steps = ["ruff check .", "ruff format --check .", "ty check", "-m pytest"]
    places = [plan.index(f"{step}") for step in steps]
    assert places == sorted(places)


def test_without_a_python_one_line_says_so_and_one_what_to_do(folder):
    result = run(folder, "make", "install", "PYTHON=")
    assert result.returncode != 0
    assert "error: no Python 3.11" in result.stdout and "fix: " in result.stdout


@pytest.mark.parametrize(
    ("recipe", "status", "last"),
    [
        ("echo '==== 7 passed, 1 skipped in 3.21s ===='", 0, "==== 7 passed, 1 skipped in 3.21s ===="),
        ("echo '= 1 failed, 6 passed in 61.00s (0:01:01) ='; exit 1", 2, "= 1 failed, 6 passed in 61.00s (0:01:01) ="),
        ("echo 'ruff: found 1 error'; exit 1", 2, None),
    ],
)
def test_continuous_integration_is_honest(tmp_path, recipe, status, last):
    (tmp_path / "Makefile").write_text(f"test:\n\t@{recipe}\n")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    result = run(tmp_path, tmp_path / ".ci" / "run")
    assert result.returncode == status
    assert (result.stdout.splitlines()[-1] == last) == (last is not None)


def test_continuous_integration_runs_the_readmes_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "```bash\nmake test\n```" in (ROOT / "README.md").read_text()
