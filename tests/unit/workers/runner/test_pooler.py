"""Pooled values join the output of a launched step, when the device has computed both."""

import numpy as np
import torch

from oarlock.workers.protocol import NOT_POOLED, StepOutput
from oarlock.workers.runner.pending_output import wait_for
from oarlock.workers.runner.pooler import Pooled, with_pooled


class Pending:
    """Output that a device still computes."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def wait(self) -> StepOutput:
        self._order.append("tokens")
        return output()


def output() -> StepOutput:
    return StepOutput(1, np.array([7], np.int32), np.ones(1, np.uint8))


def pooled(order: list[str]) -> Pooled:
    """Return values of three sequences, of which the second is not finite."""
    values = torch.tensor([1.0, 2.0, float("nan"), 4.0])
    return Pooled(values, [2, 1, 1], lambda: order.append("pooled"))


def check(found: object) -> None:
    assert isinstance(found, StepOutput) and found.token_ids.tolist() == [7]
    assert found.pooled_lens is not None and found.pooled_lens.tolist() == [2, NOT_POOLED, 1]
    assert found.pooled is not None and found.pooled.tolist() == [1.0, 2.0, 4.0]


def test_values_of_a_finished_step_are_there_at_once() -> None:
    check(with_pooled(output(), pooled([])))


def test_values_of_a_pending_step_wait_for_the_device() -> None:
    order: list[str] = []
    launched = with_pooled(Pending(order), pooled(order))
    assert order == []
    check(wait_for(launched))
    assert order == ["tokens", "pooled"]


def test_other_ranks_have_neither_output_nor_values() -> None:
    assert with_pooled(None, None) is None
