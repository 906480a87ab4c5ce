"""The Makefile and the continuous-integration script keep their promises, tried in a separate folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml

from tests.house.rules import ROOT

INPUTS = ("Makefile", "Dockerfile", "requirements.txt", "requirements-dev.txt", "pyproject.toml", "setup.py")


def run(folder, *command, **changes):
    # An outer `make` hands its own flags and level down; this one is to start afresh.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | changes
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


def test_the_help_and_the_guide_name_the_same_durations():
    """Limits on 2 cores, in minutes, for everyone who waits for a run."""
    listed, guide = run(ROOT, "make", "help").stdout, (ROOT / "CONTRIBUTING.md").read_text()
    for name in ("check", "test", "test-long"):
        (in_help,) = re.findall(rf"^make {name} .*\((\d+) minutes at most on 2 cores\)$", listed, re.MULTILINE)
        (in_guide,) = re.findall(rf"`make {name}` takes (\d+) minutes at most", guide)
        assert in_help == in_guide


SERVING = ["install", "serve"]
TESTING = [
    "dev",
    "check",
    "test",
    "test-long",
    "lint",
    "soak",
    "verify-full",
    "accuracy",
    "clients",
    "ray",
    "fuzz",
    "mutants",
    "bench-peers",
    "bench-load",
    "gpu-check",
]


@pytest.mark.parametrize("target", SERVING + TESTING)
def test_a_fresh_checkout_is_installed_first(folder, target):
    plan = run(folder, "make", "-n", target, PYTHON=sys.executable).stdout  # looked for in the tests below
    assert "-m venv .venv" in plan and "-r requirements.txt" in plan and "--editable ." in plan
    assert ("-r requirements-dev.txt" in plan) == (target in TESTING)


# A Python whose `-m venv` makes one whose pip writes down how it was called. `pip config list` prints $CONFIG.
RECORDING = """#!/bin/sh
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"config list") echo "$CONFIG" ;;
    *" install "*) shift 3; echo "$*" >> calls; case "$*" in *torch.txt) cat .venv/torch.txt >> calls ;; esac ;;
esac
"""
CPU_INDEX = re.findall(r"^ARG TORCH_INDEX=(.+)$", (ROOT / "Dockerfile").read_text(), re.M)
TORCH = re.findall(r"^torch==.*$", (ROOT / "requirements.txt").read_text(), re.M)
ALL = "install -r requirements.txt"
FROM_MIRROR = "global.index-url='https://mirror.example/simple'"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the general index has torch for CPUs")
@pytest.mark.parametrize(
    ("words", "config", "index", "said"),
    [
        (["NVIDIA_DRIVER="], "", CPU_INDEX[0], "the build for CPUs (make TORCH_INDEX= install: for CUDA)"),
        (["NVIDIA_DRIVER=yes"], "", None, None),
        (["NVIDIA_DRIVER=", "TORCH_INDEX="], "", None, None),
        (["NVIDIA_DRIVER=", "TORCH_INDEX=https://index.example"], "", "https://index.example", None),
        (["NVIDIA_DRIVER=yes", "TORCH_INDEX=https://index.example"], "", "https://index.example", None),
        (["NVIDIA_DRIVER="], FROM_MIRROR, None, "from the index that pip is configured with"),
        (["NVIDIA_DRIVER="], ":env:.find-links='/wheels'", None, "from the index that pip is configured with"),
        (["NVIDIA_DRIVER=", "TORCH_INDEX=https://index.example"], FROM_MIRROR, "https://index.example", None),
        (["NVIDIA_DRIVER="], "global.timeout='60'", CPU_INDEX[0], "the build for CPUs"),
    ],
)
def test_torch_is_for_cpus_unless_there_is_a_driver_or_the_user_says_otherwise(folder, words, config, index, said):
    (python := folder / "python").write_text(RECORDING)
    python.chmod(0o755)
    done = run(folder, "make", f"PYTHON={python}", *words, "install", CONFIG=config)
    assert done.returncode == 0, done.stdout + done.stderr
    first = [] if index is None else [f"install --no-deps --index-url {index} -r .venv/torch.txt", *TORCH]
    calls = (folder / "calls").read_text().splitlines()
    assert calls == [*first, ALL, "install --no-deps --no-build-isolation --editable ."]
    lines = [line for line in done.stdout.splitlines() if re.search("torch (is the|comes)", line)]
    assert [said in line for line in lines] == ([True] if said else []), done.stdout


def test_a_driver_is_found_by_its_program(folder):
    path = programs(folder, **{"nvidia-smi": "exit 0"})
    plan = run(folder, "make", "-n", "install", PATH=f"{path}:{os.environ['PATH']}").stdout
    assert "--index-url ''" in plan  # in a branch that is not taken


def test_a_failed_installation_of_torch_fails(folder):
    (python := folder / "python").write_text(RECORDING.replace('echo "$*" >> calls', "exit 1"))
    python.chmod(0o755)
    done = run(folder, "make", f"PYTHON={python}", "NVIDIA_DRIVER=", "install", CONFIG="")
    assert done.returncode != 0 and not (folder / ".venv" / ".oarlock-installed").exists()


@pytest.mark.slow
def test_a_second_install_does_nothing(folder):
    install_by_hand(folder, ".oarlock-installed")
    assert run(folder, "make", "-n", "install").stdout.count("pip") == 0
    os.utime(folder / "requirements.txt", (2**32, 2**32))  # a new pin
    assert "-r requirements.txt" in run(folder, "make", "-n", "install").stdout


def test_serve_passes_its_arguments_on(folder):
    install_by_hand(folder, ".oarlock-installed")
    assert run(folder, "make", "-n", "serve", "ARGS=some/model -tp 2").stdout.strip() == (
        "exec .venv/bin/oarlock serve some/model -tp 2 </dev/null"
    )


@pytest.mark.parametrize("target", ["check", "test"])
def test_the_tests_are_linter_formatter_types_and_pytest(folder, target):
    install_by_hand(folder, ".oarlock-installed", ".oarlock-tools-installed")
    plan = run(folder, "make", "-n", target).stdout
    steps = ["ruff check .", "ruff format --check .", "ty check", "-m pytest"]
    places = [plan.index(f"{step}") for step in steps]
    assert places == sorted(places)


def test_without_a_python_there_is_one_line_of_error_and_one_of_fix(folder):
    result = run(folder, "make", "install", "PYTHON=")
    assert result.returncode != 0
    assert "error: no Python 3.11" in result.stdout and "fix: " in result.stdout


PASSED = "==== 7 passed, 1 skipped in 3.21s ===="
FAILED = "= 1 failed, 6 passed in 61.00s (0:01:01) ="
LONG_PASSED = "==== 2 passed in 250.00s ===="


TOOLS = ("bash", "sh", "echo", "dirname", "make", "mktemp", "rm", "tee", "grep", "tail", "cut", "head", "timeout")
PACKAGED = ("nginx", "caddy", "prometheus", "systemd-socket-activate", "chromium")
PACKAGED += ("firefox-esr", "zsh", "fish", "qemu-aarch64", "aarch64-linux-gnu-g++")


def programs(folder, **scripts):
    """A folder of programs: shell scripts by name."""
    (folder / "programs").mkdir()
    for name, script in scripts.items():
        path = folder / "programs" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return folder / "programs"


@pytest.mark.parametrize(
    ("recipe", "long_recipe", "status", "last"),
    [
        (f"echo '{PASSED}'", f"echo '{LONG_PASSED}'", 0, LONG_PASSED),
        (f"echo '{FAILED}'; exit 1", f"echo '{LONG_PASSED}'", 2, FAILED),
        (f"echo '{PASSED}'", f"echo '{FAILED}'; exit 1", 2, FAILED),
        (f"echo '{PASSED}'", "echo 'fuzz: 3 problems'; exit 1", 2, PASSED),
        ("echo 'ruff: found 1 error'; exit 1", f"echo '{LONG_PASSED}'", 2, None),
    ],
)
def test_continuous_integration_fails_if_a_target_fails(tmp_path, recipe, long_recipe, status, last):
    (tmp_path / "Makefile").write_text(f"test:\n\t@{recipe}\ntest-long:\n\t@{long_recipe}\n")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    path = programs(tmp_path, **dict.fromkeys(PACKAGED, "exit 0"))
    result = run(tmp_path, tmp_path / ".ci" / "run", PATH=f"{path}:{os.environ['PATH']}")
    assert result.returncode == status
    assert (result.stdout.splitlines()[-1] == last) == (last is not None)


ASKED = [
    "-qq update",
    "-qq -y --no-install-recommends install nginx-light prometheus systemd chromium"
    " firefox-esr zsh fish qemu-user g++-aarch64-linux-gnu",
]


@pytest.mark.parametrize(
    ("user", "apt", "asked", "said"),
    [
        (0, 'echo "$@" >> asked', ASKED, None),
        (0, 'echo "$@" >> asked; echo first; echo no network; exit 100', ASKED[:1], "are skipped: no network"),
        (1000, 'echo "$@" >> asked', [], "are skipped: that takes root and apt-get"),
    ],
)
def test_continuous_integration_installs_what_is_missing_and_goes_on_without(tmp_path, user, apt, asked, said):
    """On a machine that has caddy alone of the programs."""
    (tmp_path / "Makefile").write_text(f"test:\n\t@echo '{PASSED}'\ntest-long:\n\t@echo '{LONG_PASSED}'\n")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    path = programs(tmp_path, **{"id": f"echo {user}", "apt-get": apt, "caddy": "exit 0"})
    for name in TOOLS:
        (path / name).symlink_to(shutil.which(name))
    script = (tmp_path / ".ci" / "run").read_text()
    assert script.count(":/usr/sbin") == 1
    (tmp_path / ".ci" / "run").write_text(script.replace(":/usr/sbin", ""))  # where this machine may have nginx
    result = run(tmp_path, tmp_path / ".ci" / "run", PATH=str(path))
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, LONG_PASSED), result.stdout + result.stderr
    given = tmp_path / "asked"
    assert (given.read_text().splitlines() if given.exists() else []) == asked
    warnings = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    assert [line.endswith(said) for line in warnings] == ([True] if said else []), result.stdout


def test_continuous_integration_runs_the_readmes_test_command(folder):
    assert "for target in test test-long" in (ROOT / ".ci" / "run").read_text()
    assert "```bash\nmake test\n```" in (ROOT / "README.md").read_text()


def test_the_long_tests_are_soak_fuzz_clients_and_a_model_of_true_size(folder):
    install_by_hand(folder, ".oarlock-installed", ".oarlock-tools-installed")
    plan = run(folder, "make", "-n", "test-long").stdout
    steps = [
        "-m 'soak and not every' tests/multihost",
        "-m 'soak and not every' -k 'simd",
        "tests.fuzz.run",
        "tests.clients.run",
        "tests.golden.full_shape --print",
    ]
    places = [plan.index(step) for step in steps]
    assert places == sorted(places)


def hooks():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # no copies of the linters in other versions
    return repository["hooks"]


def test_git_runs_the_linters_of_make(folder):
    install_by_hand(folder, ".oarlock-installed", ".oarlock-tools-installed")
    planned = [line for line in run(folder, "make", "-n", "lint").stdout.splitlines() if line.startswith(".venv/")]
    linters = [hook["entry"] for hook in hooks() if hook.get("stages") != ["commit-msg"]]
    assert linters == [line.removesuffix(" .") for line in planned]
    assert all(hook["language"] == "system" for hook in hooks())


def test_public_continuous_integration_runs_the_same_script():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert workflow["permissions"] == {"contents": "read"}
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert oldest in job["strategy"]["matrix"]["python"]


def test_the_newest_changes_are_those_of_the_version():
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'VERSION = "{newest[1]}"' in (ROOT / "server" / "version.py").read_text()
