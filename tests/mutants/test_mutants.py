"""The table of planted faults fits the code: every text stands there once, and every test that it names exists."""

import os
from pathlib import Path

import pytest

from tests.house.rules import ROOT
from tests.mutants import __main__ as mutants
from tests.mutants.__main__ import file_of, found_in, run_tests, try_fault
from tests.mutants.table import CONCERNS, FAULTS

# Runs while a fault is planted; `ctypes.string_at(0)` reads address 0.
CRASHES = """
import ctypes

import pytest


@pytest.mark.parametrize("name", ["one, two"])
def test_reads(name):
    ctypes.string_at({address})
"""


def test_every_fault_can_be_planted():
    stale = []
    for fault in FAULTS:
        try:
            file_of(fault)
        except LookupError as error:
            stale.append(str(error))
    assert stale == []
    assert [fault.name for fault in FAULTS if fault.before == fault.after] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_every_concern_has_faults_and_tests():
    assert {fault.concern for fault in FAULTS} == CONCERNS.keys()
    tests = {word for arguments in CONCERNS.values() for word in arguments if word.startswith("tests/")}
    assert [word for word in sorted(tests) if not (ROOT / word).exists()] == []


def test_a_fault_whose_text_is_gone_is_named():
    fault = FAULTS[0].__class__("scheduler", "gone", "nothing", "no such text in the code, nor anywhere", "")
    with pytest.raises(LookupError, match="gone: its text must stand in the code once, and stands in no file"):
        file_of(fault)


def test_a_crash_of_the_interpreter_names_the_test_that_ran(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(CRASHES.format(address="0"))
    status, output = run_tests(tmp_path, ("tests/test_one.py",), None)
    test = "tests/test_one.py::test_reads[one, two]"
    assert found_in(status, output) == (test, f"the interpreter crashed in {test}")
    assert found_in(-9, "no test began") == (None, "the interpreter crashed")
    assert found_in(1, f"FAILED {test} - AssertionError: no") == (test, test)
    assert found_in(2, "usage: pytest") == (None, None)


@pytest.mark.parametrize("before, found", [("b'x'", True), ("0", False)])
def test_a_crash_counts_if_the_tests_pass_without_the_fault(tmp_path, monkeypatch, before, found):
    source = Path("tests/test_one.py")
    (tmp_path / "tests").mkdir()
    (tmp_path / source).write_text(CRASHES.format(address=before))
    fault = FAULTS[0].__class__("crash", "address", "nothing", f"string_at({before})", "string_at(0 + 0)")
    monkeypatch.setattr(mutants, "file_of", lambda fault: source)
    monkeypatch.setitem(CONCERNS, "crash", (os.fspath(source),))
    outcome = try_fault(fault, tmp_path)
    assert (outcome.found_by is not None) == found and "crashed in tests/test_one.py" in (
        outcome.found_by or outcome.note
    )
