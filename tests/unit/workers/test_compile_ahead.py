"""The kernels are compiled by a process of their own, at most once, and in silence where that is not possible."""

import threading
from pathlib import Path

import pytest

from workers import compile_ahead
from workers.kernels.cpu import build, levels

# Stands in for a compiler: makes the file that follows "-o" on its command line.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
touch "$2"
"""
LEVEL = levels.chosen({})


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(levels.ENVIRONMENT, raising=False)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "nothing")
    return tmp_path


def wait_for_compiler() -> bool:
    """Whether there was one to wait for."""
    waiting = [thread for thread in threading.enumerate() if thread.name == "compiling"]
    for thread in waiting:
        thread.join(timeout=60)
    return bool(waiting)


@pytest.mark.skipif(LEVEL is None, reason="there are no kernels for this processor")
def test_what_is_not_there_is_compiled_and_what_is_there_is_not(empty_cache: Path) -> None:
    assert LEVEL is not None and build.existing(LEVEL) is None
    compile_ahead.begin_compiling()
    assert wait_for_compiler()
    made = build.existing(LEVEL)
    assert made is not None and build.compiled(LEVEL) == made
    assert list(made.parent.glob("*.o")) == [], "objects are cleaned up"
    compile_ahead.begin_compiling()
    assert not wait_for_compiler()


@pytest.mark.parametrize(("variable", "value"), [("CXX", "no-such-compiler"), (levels.ENVIRONMENT, "no-such-level")])
def test_nothing_begins_where_nothing_can_be_compiled(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    compile_ahead.begin_compiling()
    assert not wait_for_compiler()
