"""The Makefile, the hooks of git and the continuous-integration script keep their promises, tried in another folder."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.house.rules import ROOT, place, python_files

MAKEFILE = (ROOT / "Makefile").read_text()
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
INPUTS = ("Makefile", "Dockerfile", "requirements.txt", "requirements-dev.txt", "pyproject.toml", "setup.py")


def run(folder, *command, **changes):
    # An outer `make` passes its own flags and level on; this call starts afresh.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | changes
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path):
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def program(folder, name, script):
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.mark.parametrize("target", ["install", "serve", "dev", "docs", "lint", "check", "test", "test-long", "mutants"])
def test_a_fresh_checkout_is_installed_first(folder, target):
    plan = run(folder, "make", "-n", target, PYTHON=sys.executable).stdout
    assert "-m venv .venv" in plan and "-r requirements.txt" in plan and "--editable ." in plan
    assert ("-r requirements-dev.txt" in plan) == (target not in ("install", "serve"))


# A Python whose `-m venv` makes an interpreter whose pip records its arguments. `pip config list` prints $CONFIG.
RECORDING = """
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"config list") echo "$CONFIG" ;;
    *" install "*) shift 3; echo "$*" >> calls; case "$*" in *torch.txt) cat .venv/torch.txt >> calls ;; esac ;;
esac
"""
CPU_INDEX = re.findall(r"^ARG TORCH_INDEX=(.+)$", (ROOT / "Dockerfile").read_text(), re.M)[0]
TORCH = re.findall(r"^torch==.*$", (ROOT / "requirements.txt").read_text(), re.M)[0]
MIRROR = "global.index-url='https://mirror.example/simple'"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the general index has torch for CPUs")
@pytest.mark.parametrize(
    ("words", "config", "index"),
    [
        (["NVIDIA_DRIVER="], "global.timeout='60'", CPU_INDEX),
        (["NVIDIA_DRIVER=yes"], "", None),
        (["NVIDIA_DRIVER=", "TORCH_INDEX="], "", None),
        (["NVIDIA_DRIVER=yes", "TORCH_INDEX=https://index.example"], "", "https://index.example"),
        (["NVIDIA_DRIVER="], MIRROR, None),
        (["NVIDIA_DRIVER="], ":env:.find-links='/wheels'", None),
        (["NVIDIA_DRIVER=", "TORCH_INDEX=https://index.example"], MIRROR, "https://index.example"),
    ],
)
def test_torch_is_for_cpus_unless_there_is_a_driver_or_the_user_asks_otherwise(folder, words, config, index):
    done = run(folder, "make", f"PYTHON={program(folder, 'python', RECORDING)}", *words, "install", CONFIG=config)
    assert done.returncode == 0, done.stdout + done.stderr
    first = [] if index is None else [f"install --no-deps --index-url {index} -r .venv/torch.txt", TORCH]
    rest = ["install -r requirements.txt", "install --no-deps --no-build-isolation --editable ."]
    assert (folder / "calls").read_text().splitlines() == [*first, *rest]


def test_an_installation_that_fails_is_not_taken_for_done(folder):
    python = program(folder, "python", RECORDING.replace('echo "$*" >> calls', "exit 1"))
    done = run(folder, "make", f"PYTHON={python}", "NVIDIA_DRIVER=", "install", CONFIG="")
    assert done.returncode != 0 and not (folder / ".venv" / ".oarlock-installed").exists()
    result = run(folder, "make", "install", "PYTHON=")
    assert result.returncode != 0 and "error: no Python 3.11" in result.stdout and "fix: " in result.stdout


def test_git_and_make_run_the_same_linters():
    (lint,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    linters = [command.removesuffix(" .") for command in re.findall(r"\$\(BIN\)/(.*)", lint)]
    assert [hook["entry"] for hook in HOOKS if hook["language"] == "system"] == [f".venv/bin/{one}" for one in linters]
    assert re.search(r"^check: lint$", MAKEFILE, re.MULTILINE) and re.search(r"^test: lint$", MAKEFILE, re.MULTILINE)


def test_longer_forms_of_tests_have_a_target():
    """Of kernels, `make test-long` selects tests in their folders by name."""
    plan = run(ROOT, "make", "-n", "test-long").stdout
    run_there = {word for line in plan.splitlines() if "soak" in line for word in line.split() if "tests/" in word}
    marked = [place(file) for file in python_files("tests") if re.search(r"mark\.soak\b", file.read_text())]
    tests = [file for file in marked if "/test_" in file]
    assert len(tests) > 90
    assert [one for one in tests if not any(f"{one}/".startswith(f"{path}/") for path in run_there)] == []


WHY = "\n\nDrafts take rows that prompts need.\n"


@pytest.mark.parametrize(
    ("message", "is_good"),
    [
        (f"scheduler: cap drafts while prompts wait{WHY}", True),
        (f"docs, tests: `multiply` takes strides{WHY}# a comment of git\n", True),
        ("Merge branch 'main'\n", True),
        (f"Cap drafts while prompts wait{WHY}", False),
        (f"scheduler: Cap drafts{WHY}", False),
        (f"scheduler: cap {'drafts ' * 10}now{WHY}", False),
        (f"scheduler: cap drafts.{WHY}", False),
        ("scheduler: cap drafts\n\n# a comment of git\n", False),
        (f"scheduler: cap drafts\nDrafts take rows.{WHY}", False),
    ],
)
def test_the_hook_checks_commit_messages(tmp_path, message, is_good):
    (hook,) = [hook for hook in HOOKS if hook["language"] == "pygrep" and hook["stages"] == ["commit-msg"]]
    (tmp_path / "message").write_text(message)
    command = [sys.executable, "-m", "pre_commit.languages.pygrep", *hook["args"], hook["entry"], "message"]
    assert (run(tmp_path, *command).returncode == 0) == is_good


PASSED = "==== 7 passed, 1 skipped in 3.21s ===="
FAILED = "= 1 failed, 6 passed in 61.00s (0:01:01) ="
LONG_PASSED = "==== 2 passed in 250.00s ===="


@pytest.mark.parametrize(
    ("recipe", "long_recipe", "status", "last"),
    [
        (f"echo '{PASSED}'", f"echo '{LONG_PASSED}'", 0, LONG_PASSED),
        (f"echo '{FAILED}'; exit 1", f"echo '{LONG_PASSED}'", 2, FAILED),
        (f"echo '{PASSED}'", "echo 'fuzz: 3 problems'; exit 1", 2, PASSED),
    ],
)
def test_continuous_integration_fails_if_a_target_fails(tmp_path, recipe, long_recipe, status, last):
    """Without root it installs no programs, and goes on with a warning."""
    (tmp_path / "Makefile").write_text(f"test:\n\t@{recipe}\ntest-long:\n\t@{long_recipe}\n")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    program(tmp_path, "id", "echo 1000")
    script = (tmp_path / ".ci" / "run").read_text().replace("nginx:nginx-light", "no-such-program:nginx-light")
    (tmp_path / ".ci" / "run").write_text(script)
    result = run(tmp_path, tmp_path / ".ci" / "run", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (status, last)
    assert re.match("warning: nginx-light.* are skipped: that takes root and apt-get\n", result.stdout)


def test_public_continuous_integration_runs_the_same_script():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert "for target in test test-long" in (ROOT / ".ci" / "run").read_text()


def test_the_newest_changes_match_the_version():
    (version,) = re.findall(r'^ *VERSION = "([\d.]+)"', (ROOT / "server" / "version.py").read_text(), re.MULTILINE)
    assert re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
