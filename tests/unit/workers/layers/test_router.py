"""The kernel of a mixture's router chooses what torch's operations choose, and weighs it with the same bits."""

import pytest
import torch

from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.experts import CppRouter
from oarlock.workers.layers.experts import route
from oarlock.workers.layers.experts_spec import RouterSpec
from tests.unit.workers.kernel_levels import PARAMETERS, using

EXPERTS, HIDDEN, ROWS = 24, 300, 40


@pytest.mark.parametrize("level", PARAMETERS)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_kernel_equals_the_torch_router(level: ISALevel, scores: str, groups: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn((EXPERTS, HIDDEN), generator=draw) / HIDDEN**0.5
    bias, correction = torch.randn((2, EXPERTS), generator=draw)
    x = torch.randn((ROWS, HIDDEN), generator=draw).to(torch.bfloat16)
    for normalised in (False, True):
        for added in (None, correction):
            spec = RouterSpec(5, scores, normalised, scale=2.5, groups=groups, top_groups=min(2, groups))
            with using(level):
                router = CppRouter(weight, torch.bfloat16, bias, added, spec)
            logits = router.logits(x)
            torch.testing.assert_close(logits.double(), x.double() @ weight.double().T + bias, rtol=1e-5, atol=1e-5)
            for rows in (1, 7, 13):
                assert torch.equal(router.logits(x[:rows]), logits[:rows])
            tied = (logits * 2).round() / 2
            tied[3, 5], tied[4] = float("nan"), float("inf")
            for given in (logits, tied):
                (ids, weights), (expected, expected_weights) = router.route(given), route(given, spec, added)
                assert torch.equal(ids, expected)
                assert torch.equal(weights.nan_to_num(7.0), expected_weights.nan_to_num(7.0))
