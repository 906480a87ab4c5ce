"""Hostile adapter files are read or refused in one line, in memory that their size limits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.lora.adapter_file import Adapter
from tests.fuzz.adapter_files import Source, fuzz
from tests.fuzz.adapter_source import make_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_source(tmp_path_factory.mktemp("good"))


@pytest.mark.slow
@pytest.mark.parametrize(("files", "seed"), [(200, 7), pytest.param(3000, 8, marks=pytest.mark.soak)])
def test_damaged_adapters_are_read_or_refused(source: Source, tmp_path: Path, files: int, seed: int) -> None:
    problems, outcomes = fuzz(source, files, seed, tmp_path)
    assert problems == []
    assert set(outcomes) >= {"read", "refused"}, "the damage is too large or too small to test anything"


def crash(*arguments: Any) -> Adapter:
    raise KeyError("shape")


def allocate(*arguments: Any) -> Adapter:
    raise StartupError(f"{arguments[0]} is wrong. {len(bytes(1 << 25))}", "Fix it.")


def several_lines(*arguments: Any) -> Adapter:
    raise StartupError(f"{arguments[0]} is\nwrong.", "Fix it.")


def unnamed(*arguments: Any) -> Adapter:
    raise StartupError("The adapter is wrong.", "Fix it.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "problem"),
    [
        (crash, "KeyError"),
        (allocate, "bytes of memory for files"),
        (several_lines, "no plain line"),
        (unnamed, "no file"),
    ],
)
def test_a_bad_reader_is_found(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[..., Adapter], problem: str
) -> None:
    monkeypatch.setattr(Adapter, "open", staticmethod(reader))
    problems, _ = fuzz(source, 2, 0, tmp_path)
    assert len(problems) == 2 and all(problem in one for one in problems)
