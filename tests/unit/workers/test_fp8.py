"""Weights of 8 bits in floating point with scales for groups of inputs."""

import pytest
import torch
from torch import Tensor

from workers.layers.quantization.fp8 import Fp8Weight

EVERY = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = EVERY[EVERY.float().isfinite()]  # each number that a weight can be, subnormals as well


def made(outputs: int, inputs: int, group: int) -> tuple[Tensor, Tensor]:
    values = FINITE[torch.randint(0, len(FINITE), (outputs, inputs))]
    return values, torch.rand(outputs, -(-inputs // group)) * 1e-3


def dense(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """In float64."""
    return values.double() * scales.double()[:, torch.arange(values.shape[1]) // group]


@pytest.mark.parametrize(("inputs", "group", "slices"), [(256, 128, 1), (300, 128, 1), (320, 320, 4), (512, 128, 8)])
def test_products_are_those_of_the_dequantised_weight(inputs: int, group: int, slices: int) -> None:
    torch.manual_seed(0)
    values, scales = made(24, inputs, group)
    truth = dense(values, scales, group)
    weight = Fp8Weight(values, scales, group, torch.float32)
    x, bias, residual = torch.randn(5, inputs), torch.randn(24), torch.randn(5, 24)
    limit = 1e-6 * (x.double().abs() @ truth.T.abs()).max()
    expected = x.double() @ truth.T + bias + residual
    assert (weight.matmul(bias, slices=slices)(x, residual) - expected).abs().max() < limit
    gate, up = (x.double() @ truth.T).chunk(2, 1)
    gated = weight.gated_matmul(None, "silu")(x)
    assert (gated - torch.nn.functional.silu(gate) * up).abs().max() < 1e-5 * (gate * up).abs().max()
    torch.testing.assert_close(weight.embed(torch.tensor([3, 0])).double(), truth[[3, 0]])
