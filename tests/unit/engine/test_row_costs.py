"""What rows add to steps is learnt from steps, whatever was measured at start and however busy the machine is."""

import random

import pytest

from engine.spec_decode.row_costs import RowCosts
from workers.step_cost import StepCost

MEASURED = StepCost(fixed_s=0.03, token_s=0.0008, context_s=1.0, logits_s=0.0002)


def test_before_any_step_the_measured_cost_decides():
    step_s, row_s = RowCosts(MEASURED).step_and_row_s(4)
    assert (step_s, row_s) == pytest.approx((0.034, 0.001))


def test_a_cost_that_was_measured_too_high_is_not_believed():
    """On a busy machine a step of 16 tokens may take as long as 16 steps."""
    step_s, row_s = RowCosts(StepCost(fixed_s=0.0, token_s=0.026, context_s=0.0, logits_s=0.0)).step_and_row_s(1)
    assert row_s <= step_s / 8


@pytest.mark.parametrize("measured", [None, MEASURED])
@pytest.mark.parametrize("true_row_s", [0.0001, 0.001, 0.01])
def test_steps_that_ran_decide(measured: StepCost | None, true_row_s: float):
    costs, draw = RowCosts(measured), random.Random(3)
    for number in range(40):
        rows = 2 + draw.choice([0, 0, 3, 5])
        slow = 3.0 if number % 9 == 0 else 1.0  # something else ran on the machine
        costs.observe(rows, slow * (0.02 + rows * true_row_s))
    step_s, row_s = costs.step_and_row_s(2)
    assert step_s == pytest.approx(0.02 + 2 * true_row_s, rel=0.15)
    assert row_s == pytest.approx(max(true_row_s, step_s / 128), rel=0.15)


def test_what_was_learnt_holds_for_long_without_other_steps_but_not_for_ever():
    costs = RowCosts(None)
    for rows in [1, 6] * 10:
        costs.observe(rows, rows * 0.01)
    for _ in range(400):
        costs.observe(1, 0.01)
    assert costs.step_and_row_s(1)[1] == pytest.approx(0.01)
    for _ in range(400):
        costs.observe(1, 0.01)
    assert costs.step_and_row_s(1)[1] < 0.002


def test_the_first_steps_tell_how_long_a_step_is():
    costs = RowCosts(MEASURED)
    costs.observe(4, 0.34)
    assert costs.step_and_row_s(4) == pytest.approx((0.34, 0.01))
