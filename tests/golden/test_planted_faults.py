"""A test of the tests: each planted fault makes the golden comparison fail at the tensor where it was made."""

from collections.abc import Callable

import pytest

from tests.golden.cases import RUNS
from tests.golden.exact_reference import ExactReference
from tests.golden.faults import FAULTS, Fault
from tests.golden.layer_compare import findings


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.requirement}-{fault.what}")
def test_a_planted_fault_is_named(
    reference_of: Callable[..., ExactReference], monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    assert (fault.case, fault.size) in RUNS, "the test that should catch it does not exist"
    reference = reference_of(fault.case)
    assert reference.layers  # transformers runs on code of ours as well: before anything is planted
    fault.plant(monkeypatch)
    found = findings(reference, fault.size)
    assert found, "the fault was not found"
    assert found[0].tensor == fault.tensor, f"named {found[0]}"


def test_every_requirement_has_its_fault() -> None:
    assert {fault.requirement for fault in FAULTS} >= {"S3", "S5", "S6", "S8", "S9", "S10"}
