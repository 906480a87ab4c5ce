"""The structures that Python declares and the compiled library has: the first difference is refused by name."""

import ctypes
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.structures import STRUCTURES, CBranch, CNorm, COperation, check_structures

pytestmark = pytest.mark.skipif(library.why_not(torch.float32) is not None, reason="the kernels are not available here")

Structure = type[ctypes.Structure]


def replaced(structure: Structure, fields: Sequence[tuple[str, Any]]) -> list[Structure]:
    """Return all structures, with other fields in `structure`."""
    other = type(structure.__name__, (ctypes.Structure,), {"_fields_": fields})
    return [other if each is structure else each for each in STRUCTURES]


def fields_of(structure: Structure, **types: Any) -> list[tuple[str, Any]]:
    """Return the fields of `structure`, some with other types."""
    return [(name, types.get(name, kind)) for name, kind, *_ in structure._fields_]


SWAPPED = [fields_of(CNorm)[1], fields_of(CNorm)[0], *fields_of(CNorm)[2:]]


@pytest.mark.parametrize(
    ("structures", "in_library", "in_python"),
    [
        pytest.param(replaced(CNorm, SWAPPED), "Norm.scale: offset 0,", "Norm.shift: offset 0,", id="order"),
        pytest.param(
            replaced(CNorm, fields_of(CNorm, eps=ctypes.c_int)), "Norm.eps: offset 24, 4 bytes of type f",
            "Norm.eps: offset 24, 4 bytes of type i", id="type of the same size",
        ),
        pytest.param(
            replaced(COperation, fields_of(COperation, source=ctypes.c_short)), "Operation.source: offset 4, 4 bytes",
            "Operation.source: offset 4, 2 bytes", id="size",
        ),
        pytest.param(
            replaced(CBranch, fields_of(CBranch, widths=ctypes.c_long * 5)), "Branch: 80 bytes", "Branch: 88 bytes",
            id="array",
        ),
        pytest.param(
            replaced(CNorm, [("added", ctypes.c_long), *fields_of(CNorm)]), "Norm: 32 bytes", "Norm: 40 bytes",
            id="more fields",
        ),
        pytest.param(STRUCTURES[:-1], "SamplingOutput: 56 bytes", "nothing", id="fewer structures"),
        pytest.param((*STRUCTURES, CNorm), "nothing", "Norm: 32 bytes", id="more structures"),
    ],
)  # fmt: skip
def test_a_different_structure_is_refused_by_name(
    structures: Sequence[Structure], in_library: str, in_python: str
) -> None:
    message = rf"kernels \({re.escape(in_library)}.*\) and Python \({re.escape(in_python)}.*\)"
    with pytest.raises(StartupError, match=message):
        check_structures(library.library(torch.float32), structures)


def test_structures_are_compared_when_a_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_outcomes", {})
    monkeypatch.setattr(library, "check_structures", partial(check_structures, structures=replaced(CNorm, SWAPPED)))
    with pytest.raises(StartupError, match=r"Norm\.shift"):
        library.load(library.isa_level(), torch.float32)
