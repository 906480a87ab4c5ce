"""The kernel of a mixture's router chooses what torch's operations choose, and weighs it with the same bits."""

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

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
        for added, corrects_logits in ((None, False), (correction, False), (correction, True)):
            spec = RouterSpec(
                5, scores, normalised, scale=2.5, groups=groups, top_groups=min(2, groups),
                best_of_group=1 if normalised else 2, corrects_logits=corrects_logits,
                added_to_sum=0.5 if scores == "sigmoid" and groups > 1 else 0.0,
            )  # fmt: skip
            with using(level):
                router = CppRouter(weight, torch.bfloat16, bias, added, spec)
            logits = router.logits(x)
            torch.testing.assert_close(logits.double(), x.double() @ weight.double().T + bias, rtol=1e-5, atol=1e-5)
            for rows in (1, 7, 13):
                assert torch.equal(router.logits(x[:rows]), logits[:rows])
            check_choices(router, logits, spec, added)


@pytest.mark.parametrize("level", PARAMETERS)
@pytest.mark.parametrize("tolerance", [0.02, 0.6])
def test_the_kernel_mixes_like_torch(level: ISALevel, tolerance: float) -> None:
    draw = torch.Generator().manual_seed(1)
    spec = RouterSpec(3, "sparsemixer", scale=2.5, tolerance=tolerance)
    with using(level):
        router = CppRouter(torch.randn((EXPERTS, HIDDEN), generator=draw), torch.float32, spec=spec)
    logits = torch.randn((ROWS, EXPERTS), generator=draw)
    check_choices(router, logits, spec, None)
    check_choices(router, logits - 4.0, spec, None)  # all negative


def check_choices(router: CppRouter, logits: torch.Tensor, spec: RouterSpec, correction: torch.Tensor | None) -> None:
    """Compare the kernel with torch on logits, and on logits of which some are equal, infinite or no numbers."""
    tied = (logits * 2).round() / 2
    tied[3, 5], tied[4], tied[5, 7] = float("nan"), float("inf"), float("inf")
    for given in (logits, tied):
        (ids, weights), (expected, expected_weights) = router.route(given), route(given, spec, correction)
        assert torch.equal(ids, expected)
        assert torch.equal(weights.nan_to_num(7.0), expected_weights.nan_to_num(7.0))


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_mixing_equals_sparsemixer_of_transformers(jitter: float) -> None:
    logits = torch.randn((500, 7), generator=torch.Generator().manual_seed(2))
    weights, ids = sparsemixer(logits.double(), jitter, training=False)
    ours, found = route(logits, RouterSpec(2, "sparsemixer", tolerance=2 * jitter), None)[::-1]
    assert (weights < 0.9).any() and (weights == 1.0).any()
    ascending = ids.sort(dim=1)
    assert torch.equal(found, ascending.values.int())
    torch.testing.assert_close(ours.double(), weights.gather(1, ascending.indices), rtol=1e-6, atol=0.0)
