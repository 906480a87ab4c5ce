"""The table of planted faults fits the code: every text stands there once, and every test that it names exists."""

import pytest

from tests.house.rules import ROOT
from tests.mutants.__main__ import file_of
from tests.mutants.table import CONCERNS, FAULTS


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
