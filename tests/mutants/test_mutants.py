"""The table of planted faults fits the code: each text occurs once, and each test that stands for a concern exists."""

from tests.house.rules import ROOT
from tests.mutants.__main__ import file_of
from tests.mutants.table import CONCERNS, FAULTS


def test_every_fault_can_be_planted_and_has_tests():
    stale = []
    for fault in FAULTS:
        try:
            file_of(fault)
        except LookupError as error:
            stale.append(str(error))
    assert stale == []
    assert [fault.name for fault in FAULTS if fault.before == fault.after] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
    assert {fault.concern for fault in FAULTS} == CONCERNS.keys()
    tests = {word for arguments in CONCERNS.values() for word in arguments if word.startswith("tests/")}
    assert [word for word in sorted(tests) if not (ROOT / word).exists()] == []
