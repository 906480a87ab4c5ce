"""Verification rounds inputs where the ranks' products do: on CUDA those of linear modules, and never of experts."""

import pytest
import torch
from torch import Tensor, nn

from oarlock.workers.quantization import block_float8, int8, scaled_float8
from oarlock.workers.quantization.formats.weight_format import Arithmetic
from oarlock.workers.verify.dequantised_reference import DequantisedModel

EXPERTS, HIDDEN, INNER, ROWS = 2, 128, 256, 3
ROUND_BY = {
    ("cpu", Arithmetic.ROUNDED_INPUTS): int8.round_rows,
    ("cuda", Arithmetic.FLOAT8_INPUTS): scaled_float8.round_rows,
    ("cuda", Arithmetic.FLOAT8_BLOCKS): block_float8.round_blocks,
}
QUANTISED = [arithmetic for arithmetic in Arithmetic if arithmetic is not Arithmetic.DENSE]


class TinyExperts(nn.Module):
    """Experts as transformers has them, without an activation that could hide what inputs were."""

    is_concatenated, is_transposed, has_bias = True, False, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, HIDDEN), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER), requires_grad=False)

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return gate + up


class Weights:
    """Random dequantised weights, all of one kind of arithmetic."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic

    def has(self, module: str) -> bool:
        return True

    def weight(self, module: str) -> Tensor:
        shape = (HIDDEN, INNER) if "down_proj" in module else (INNER, HIDDEN)
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(module.encode())))

    def arithmetic(self, module: str) -> Arithmetic:
        return self._arithmetic

    def other(self, name: str) -> Tensor:
        raise KeyError(name)


def as_taken(rows: Tensor, device: str, arithmetic: Arithmetic) -> Tensor:
    """Inputs of a product, rounded if that arithmetic on that device rounds."""
    if (device, arithmetic) not in ROUND_BY:
        return rows
    values, scales = ROUND_BY[device, arithmetic](rows)
    scales = scales.reshape(len(rows), -1)
    return values.float() * scales.repeat_interleave(rows.shape[1] // scales.shape[1], 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("arithmetic", QUANTISED)
def test_inputs_are_rounded_where_the_kernels_round(device: str, arithmetic: Arithmetic) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(HIDDEN, INNER, bias=False), "experts": TinyExperts()})
    weights = Weights(arithmetic)
    of_experts = arithmetic if device == "cpu" else Arithmetic.EXACT_INPUTS
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(5))
    ids, shares = torch.ones(ROWS, 1, dtype=torch.int64), torch.ones(ROWS, 1)
    linear, experts = model["linear"], model["experts"]
    reference = DequantisedModel(model, weights, torch.float32, was_dense=False, device=device)
    with torch.no_grad(), reference.as_served():
        of_linear, of_mixture = linear(x), experts(x, ids, shares)
    assert torch.equal(of_linear, as_taken(x, device, arithmetic) @ weights.weight("linear").T)
    gate, up, down = (weights.weight(f"experts.1.{name}_proj") for name in ("gate", "up", "down"))
    both = as_taken(x, device, of_experts) @ torch.cat([gate, up]).T
    inner = both[:, :INNER] + both[:, INNER:]
    torch.testing.assert_close(of_mixture, as_taken(inner, device, of_experts) @ down.T)
    if (device, arithmetic) in ROUND_BY:  # rounding must be seen, or the above shows nothing
        assert not torch.allclose(of_linear, x @ weights.weight("linear").T)
