"""Every command written in the README and in the documents runs, and prints the output that is shown there.

Servers started by a page are started, asked something and stopped; `docker` lines are checked against the files they
name, since no engine need be there; commands that would run these very tests are looked at with `make -n`.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import DEMO, ROOT, RunningServer, environment, eventually, free_port
from tests.house import recipes
from tests.unit.server.hub.fake_hub import FakeHub

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("tests/load", "benchmarks")),
]
FENCE = re.compile(r"^ {0,3}```(\w+)\n(.*?)^ {0,3}```$", re.MULTILINE | re.DOTALL)
HUB_ID = re.compile(r"\bQwen/[\w.-]+")
# Commands that take minutes or would call this test again: `make -n` prints what it would run.
ONLY_PLANNED = (
    "make test",
    "make soak",
    "make bench-load",
    "make bench-peers",
    "make verify-full",
    "make accuracy",
    "make model-classes",
    "make clients",
    "make ray",
    "make fuzz",
    "make gpu-check",
    "make screenshots",
    "make clean",
    "make lint",
    "make format",
    "make check",
    "make dev",
)


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return FENCE.findall(page.read_text())


def commands(page: Path) -> list[str]:
    """Every command of every bash block, continued lines joined."""
    blocks = [text.replace("\\\n", " ") for language, text in fences(page) if language == "bash"]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


# Ways to start a server that differ in little, and what other tests run in earnest: the longer run tries these as well.
VARIANTS = (
    'Instruct"',
    "--tensor-parallel-size 2",
    "--max-model-len",
    "--quantization int8",
    "serve --config",
    "serve --speculative-config",
    "serve --enable-lora",
)
LONGER = (
    " batch ",
    " pull ",
    " verify ",
    " replay ",
    "serve --record",
    "bench latency",
    "bench throughput",
    "--workload",
    "--backend vllm",
    "make serve",
)


def is_longer(command: str) -> bool:
    return any(words in command for words in LONGER) or (
        " serve " in command and any(words in command for words in VARIANTS)
    )


def once_each() -> dict[str, tuple[Path, str]]:
    """(page, command) of each command; of those that differ in the model of the hub alone, which is not there, one."""
    found: dict[str, tuple[Path, str]] = {}
    for page in PAGES:
        for command in commands(page):
            found.setdefault(" ".join(HUB_ID.sub("", command).split()), (page, command))
    return found


ALL = [
    pytest.param(page.relative_to(ROOT).as_posix(), command, marks=pytest.mark.soak if is_longer(command) else ())
    for page, command in once_each().values()
]
SCRATCH = tempfile.TemporaryDirectory()
SHOWN = dict(fences(ROOT / "README.md"))  # by language: the last block of each; `json` and `text` occur once


def here(command: str, port: int) -> str:
    """The command for this machine: its interpreter, a free port, the demo model for any hub id, and few requests."""
    command = command.replace("/tmp/", f"{SCRATCH.name}/")  # an existing recording is not written over
    command = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    command = re.sub(r"--port \d+", f"--port {port}", command)
    command = re.sub(r"--num-requests \d+", "--num-requests 4", command)
    command = command.replace("--request-rate 2 ", "--request-rate 20 ").replace("--duration 5 ", "--duration 1 ")
    return HUB_ID.sub(str(DEMO), command).replace("127.0.0.1:8000", f"127.0.0.1:{port}")


def clean_environment(**changes: str) -> dict[str, str]:
    """Environment without the variables that an outer `make test` has left there."""
    return {name: value for name, value in environment(**changes).items() if not name.startswith("MAKE")}


def run(command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=clean_environment(**changes), capture_output=True, text=True, timeout=240
    )


@functools.cache
def help_of(module: str, *subcommand: str) -> str:
    """Output of `python -m MODULE SUBCOMMAND --help`, run in this process, which has imported most of it."""
    shown, words = io.StringIO(), sys.argv
    sys.argv = [module, *subcommand, "--help"]
    try:
        with contextlib.redirect_stdout(shown), warnings.catch_warnings(), pytest.raises(SystemExit) as left:
            warnings.simplefilter("ignore")  # some of them other tests have imported
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = words
    assert left.value.code in (0, None)
    return shown.getvalue()


@functools.cache
def run_once(command: str) -> subprocess.CompletedProcess[str]:
    """A command that several pages show, and that leaves nothing behind."""
    return run(command)


@pytest.fixture(scope="module")
def demo():
    """Server that `make serve` starts: no model named, every default but the pages' batches and adapter."""
    adapter = {"OARLOCK_ENABLE_LORA": "1", "OARLOCK_LORA_MODULES": "in-short=models/oarlock-demo-lora"}
    with RunningServer(None, env={"OARLOCK_BATCH_DIR": f"{SCRATCH.name}/batches", **adapter}) as server:
        yield server


def serves(command: str) -> None:
    """Start a server by `command`, wait until it is ready, ask it something, and stop it as Ctrl-C would."""
    port = free_port()
    process = subprocess.Popen(
        ["bash", "-c", here(command, port)],
        cwd=ROOT,
        env=clean_environment(OARLOCK_PORT=str(port)),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, f"{command} left with {process.returncode}"
        try:
            return httpx.get(f"{url}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(ready, 120, f"{command} is ready")
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "import "}, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
    finally:
        os.killpg(process.pid, signal.SIGINT)
        status = process.wait(40)
    assert status == 0 or command.startswith("make "), status  # make says that it was interrupted


def docker_faults(words: list[str]) -> list[str]:
    """Names in a `docker` line that the files lack."""
    services, stages = recipes.compose()["services"], recipes.stages()
    if words[1] == "build":
        target = words[words.index("--target") + 1]
        return [] if target in stages else [f"no stage {target}"]
    assert words[1] == "compose", words
    profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
    wanted = {words[at + 1] for at, word in enumerate(words) if word == "--profile"}
    named = set(words[words.index("up") + 1 :]) - {"-d", "--build"}
    return sorted((wanted - profiles) | (named - services.keys()))


@pytest.mark.parametrize(("page", "command"), ALL)
def test_the_command_runs(page, command, demo):
    words = shlex.split(command)
    program, arguments = words[0], words[1:]
    if program == "docker":
        assert docker_faults(words) == []
    elif command.startswith(ONLY_PLANNED):
        assert run(f"make -n {shlex.join(arguments)}").returncode == 0
    elif arguments[:2] == ["-m", "pytest"]:
        assert [word for word in arguments[2:] if "/" in word and not (ROOT / word).is_file()] == []
    elif arguments[:1] == ["pull"]:
        files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
        with FakeHub(files, arguments[1]) as hub:
            result = run(command, **hub.environment(SCRATCH.name))
        assert result.returncode == 0, result.stdout + result.stderr
    elif arguments[:1] == ["serve"]:
        serves(command)
    elif program == "make" and arguments == ["install"]:
        assert run(command).returncode == 0
    elif program == "curl":
        result = run(f"{here(command, demo.port)} --fail-with-body")
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.strip()
    elif arguments[:1] == ["explain"]:  # its own test asks a server
        assert len(arguments) == 3 and "[URL]" in run_once(".venv/bin/oarlock explain --help").stdout
    elif arguments[:1] == ["-m"] and arguments[1].startswith(("tests.load.", "benchmarks.")):
        subcommand = itertools.takewhile(str.isalpha, arguments[2:])
        shown = help_of(arguments[1], *subcommand)  # their own tests run them in earnest
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the rest is not ours
        flags = [word for word in own if word.startswith("--")]
        assert all(flag in shown for flag in flags)
    elif command in (".venv/bin/oarlock doctor", ".venv/bin/oarlock config show --config configs/cpu.toml"):
        result = run_once(here(command, 0))
        assert result.returncode == 0, result.stdout + result.stderr
    elif ".venv/bin/oarlock" in words and program in (".venv/bin/oarlock", "echo"):  # a pipe is one, too
        result = run(here(command, demo.port), OARLOCK_PORT=str(free_port()))
        assert result.returncode == 0, result.stdout + result.stderr
    else:
        pytest.fail(f"{page}: this test does not know how to run {command!r}")


def test_a_docker_line_can_be_wrong():
    assert docker_faults(shlex.split("docker build --target tpu .")) != []
    assert docker_faults(shlex.split("docker compose --profile tpu up")) != []
    assert docker_faults(shlex.split("docker compose up oarlock-tpu")) != []


def readme_curls() -> list[str]:
    return [command for command in commands(ROOT / "README.md") if command.startswith("curl")]


def test_the_readmes_answer_is_the_answer(demo):
    whole, streamed, adapted = (run(here(command, demo.port)).stdout for command in readme_curls())
    shown, real = json.loads(SHOWN["json"]), json.loads(whole)
    assert shown.keys() == real.keys()
    differs = {"id", "created", "system_fingerprint"}
    cached = {"prompt_tokens_details"}  # depends on what was asked before
    assert {key: value for key, value in shown.items() if key not in differs | {"usage"}} == {
        key: value for key, value in real.items() if key not in differs | {"usage"}
    }
    assert {key: value for key, value in shown["usage"].items() if key not in cached} == {
        key: value for key, value in real["usage"].items() if key not in cached
    }
    assert "oin" in real["choices"][0]["text"] and "path" in real["choices"][0]["text"]
    lines = [line for line in streamed.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text == real["choices"][0]["text"]
    answer = json.loads(adapted)
    assert answer["model"] == "in-short"
    assert f'"{answer["choices"][0]["text"].strip()}"' in (ROOT / "README.md").read_text()


def test_the_readmes_python_prints_the_shown_output(demo):
    code = SHOWN["python"].replace("127.0.0.1:8000", f"127.0.0.1:{demo.port}")
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == SHOWN["text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_demo_model.py", "train_demo_adapter.py"])
def test_the_demo_models_training_starts(monkeypatch, capsys, name):
    script = ROOT / "models" / "oarlock-demo" / "training" / name
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")  # in this process, which has imported most of it
    assert left.value.code == 0 and "--evaluate" in capsys.readouterr().out
