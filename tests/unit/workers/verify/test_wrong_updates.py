"""Descriptions of wrong updates, also if the right update is zero, as in an adapter that was not trained."""

import pytest
import torch

from oarlock.workers.verify.adapter_diagnosis import _Linear, _wrong_updates, described
from oarlock.workers.verify.stored_adapter import StoredUpdate


def linear(scale: float = 2.0, b: float = 1.0) -> _Linear:
    """A module of 6 inputs and 8 outputs, on one rank, with an update of rank 2."""
    draw = torch.Generator().manual_seed(0)
    a, rows, x = (torch.randn(shape, generator=draw).double() for shape in ((2, 6), (8, 2), (9, 6)))
    return _Linear("m", x, StoredUpdate(scale, a, b * rows), slice(0, 8), {}, 1)


@pytest.mark.parametrize(("scale", "b"), [(2.0, 0.0), (0.0, 1.0)])
def test_nothing_explains_errors_of_an_update_that_is_zero(scale: float, b: float) -> None:
    one = linear(scale, b)
    assert described(torch.ones(9, 8).double(), one) is None
    assert list(_wrong_updates(one.update)) == [] or scale


@pytest.mark.parametrize(
    ("factor", "cause"),
    [(0.0, "is missing"), (-1.0, "of another slot"), (0.5, "alpha is forgotten"), (3.0, "is 3 times"), (1.0, None)],
)
def test_a_factor_of_an_update_is_described(factor: float, cause: str | None) -> None:
    one = linear()
    found = described(factor * one.of(one.update), one)
    assert found is None if cause is None else found is not None and cause in found
