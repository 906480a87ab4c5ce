"""Weights rounded to 4 bits at load: how they are rounded, and every number of ranks has the same ones."""

import torch

from oarlock.workers.quantization.int4 import GROUP, dequantised, round_groups, rounded
from oarlock.workers.quantization.registry import QUANTIZATIONS
from tests.house.rules import ROOT

DEMO = ROOT / "models" / "oarlock-demo"


def test_rounding_is_to_the_nearest_of_16_numbers() -> None:
    """The largest of a group is -8; where another has nearly its size and the other sign, that is 7 in place of 8."""
    torch.manual_seed(0)
    x = torch.randn(50, 300) * torch.logspace(-20, 20, 50).unsqueeze(1)
    x[7] = 0
    values, scales = round_groups(x)
    assert values.min() == -8 and values.max() == 7 and scales.shape == (50, 10)
    assert not values[7].any() and not scales[7].any()
    scale = scales.double().repeat_interleave(GROUP, 1)[:, :300]
    error = (values.double() * scale - x.double()).abs() / scale.abs().clamp(min=1e-300)
    assert (error <= torch.where(values == 7, 1.05, 0.55)).all()  # a scale has 8 bits: 8 steps of it err by 0.03


def test_a_product_keeps_rounded_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 100) * torch.logspace(-3, 3, 300).unsqueeze(1)
    assert torch.equal(rounded(weight).weight.dequantised(), dequantised(*round_groups(weight)))


def test_groups_are_as_the_registry_counts_them() -> None:
    assert QUANTIZATIONS["int4"].group == GROUP
    assert QUANTIZATIONS["int4"].weight_bytes(10, 64, 2) == 10 * (2 * (16 + 2) + 4)
    assert QUANTIZATIONS["int4"].weight_bytes(10, 65, 2) == 10 * (3 * (16 + 2) + 4)
