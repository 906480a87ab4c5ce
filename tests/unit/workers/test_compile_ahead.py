"""The kernels are compiled by a process of their own, at most once, and in silence where that is not possible."""

import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from oarlock.base.python_child import start_python
from oarlock.workers import compile_ahead
from oarlock.workers.kernels.cpu import build

# Stands in for a compiler: makes the file that follows "-o" on its command line.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
touch "$2"
"""
# Never finishes; says in a file of its own that it, and a process that it has started, run.
SLOW_COMPILER = """#!/bin/sh
sleep 300 &
echo $! > "$XDG_CACHE_HOME/running.$$"
wait
"""
LEVEL = build.chosen({})


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.ENVIRONMENT, raising=False)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "nothing")
    return tmp_path


def wait_for_compiler() -> bool:
    """Wait for the compiler; return whether there was one to wait for."""
    waiting = [thread for thread in threading.enumerate() if thread.name == "compiling"]
    for thread in waiting:
        thread.join(timeout=60)
    return bool(waiting)


@pytest.mark.skipif(LEVEL is None, reason="there are no kernels for this processor")
def test_only_missing_kernels_are_compiled(empty_cache: Path) -> None:
    assert LEVEL is not None
    float16 = build.of_one_type(LEVEL, "float16")
    assert build.existing(float16) is None
    assert compile_ahead.begin_compiling(None, "float16")
    assert wait_for_compiler()
    made = build.existing(float16)
    assert made is not None and build.compiled(float16) == made
    assert list(made.parent.glob("*.o")) == [], "objects are cleaned up"
    assert not compile_ahead.begin_compiling(None, "float16")
    assert not wait_for_compiler()
    assert build.existing(LEVEL) is None and build.existing(build.of_one_type(LEVEL, "bfloat16")) is None


@pytest.mark.skipif(LEVEL is None, reason="there are no kernels for this processor")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ending_the_process_ends_its_compilers_and_their_children(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    (empty_cache / "compiler").write_text(SLOW_COMPILER)
    process = start_python(["-m", "oarlock.workers.compile_ahead", "float16"], output=subprocess.DEVNULL)
    until(lambda: sum(bool(path.read_text()) for path in empty_cache.glob("running.*")) == len(build.UNITS))
    children = [int(text) for path in empty_cache.glob("running.*") for text in (path.suffix[1:], path.read_text())]
    assert len(children) == 2 * len(build.UNITS) and all(is_running(child) for child in children)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    until(lambda: not any(is_running(child) for child in children))
    assert [path.name for path in (empty_cache / "oarlock" / "kernels").iterdir() if path.suffix != ".lock"] == []


def test_a_signal_waits_until_a_compiler_that_starts_can_be_ended(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = subprocess.Popen, []

    def interrupted(*arguments, **options):
        started.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    (empty_cache / "compiler").write_text(SLOW_COMPILER)
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    level = build.LEVELS[0]
    with pytest.raises(KeyboardInterrupt):
        build.compile_to(empty_cache / "made.so", level, str(empty_cache / "compiler"))
    assert len(started) == 1 and not is_running(started[0].pid)


def until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("text", "dtype", "found"),
    [
        ({"dtype": "float16"}, "auto", "float16"),
        ({"torch_dtype": "float32"}, "auto", "float32"),
        ({"dtype": "float16"}, "float32", "float32"),
        ({"dtype": "int4"}, "auto", "bfloat16"),
        ([], "auto", "bfloat16"),
        (None, "auto", "bfloat16"),
    ],
)
def test_the_element_type_is_that_of_the_option_or_of_the_model(
    tmp_path: Path, text: object, dtype: str, found: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(json.dumps(text))
    assert compile_ahead.likely_element_type(str(tmp_path), dtype) == found


@pytest.mark.parametrize(("variable", "value"), [("CXX", "no-such-compiler"), (build.ENVIRONMENT, "no-such-level")])
def test_nothing_begins_where_nothing_can_be_compiled(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert not compile_ahead.begin_compiling(None, "auto")
    assert not wait_for_compiler()
