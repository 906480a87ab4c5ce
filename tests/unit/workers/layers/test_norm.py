"""Norms are at least as exact as transformers', and a row's norm does not depend on the batch."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from oarlock.workers.layers.norm import HeadNorm, RMSNorm
from tests.unit.workers.weights_in_memory import MemoryWeights, placement

pytestmark = pytest.mark.usefixtures("form")


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return (y.double() - truth).pow(2).mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_norm_is_at_least_as_exact_as_transformers(dtype: torch.dtype, eps: float) -> None:
    torch.manual_seed(0)
    weight, x = (1 + 0.2 * torch.randn(896)).to(dtype), (0.3 * torch.randn(64, 896)).to(dtype)
    norm = RMSNorm("n", 896, eps, placement(dtype=dtype))
    norm.load(MemoryWeights({"n.weight": weight}))
    theirs = Qwen3RMSNorm(896, eps).to(dtype)
    theirs.weight.data.copy_(weight)
    truth = exact(x, weight, eps)
    assert norm(x).dtype == dtype
    assert error(norm(x), truth) <= 1.02 * error(theirs(x), truth)
    for rows in (1, 2, 5, 33):
        assert torch.equal(norm(x[:rows]), norm(x)[:rows])


def test_head_norm_gives_queries_and_keys_their_own_weight_in_float32() -> None:
    q_weight, k_weight = torch.randn(16).bfloat16(), torch.randn(16).bfloat16()
    norm = HeadNorm("a", 6, 2, 16, 1e-6, placement(dtype=torch.bfloat16))
    norm.load(MemoryWeights({"a.q_norm.weight": q_weight, "a.k_norm.weight": k_weight}))
    x = torch.randn(5, 8, 16).bfloat16()
    out = norm(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out[:, :6].double(), exact(x[:, :6], q_weight, 1e-6), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out[:, 6:].double(), exact(x[:, 6:], k_weight, 1e-6), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_offset_is_added_in_float32_as_gemma_does(dtype: torch.dtype) -> None:
    """A weight near zero would vanish beside 1 in 16 bits."""
    torch.manual_seed(0)
    weight, x = (0.01 * torch.randn(96)).to(dtype), torch.randn(33, 96).to(dtype)
    norm = RMSNorm("n", 96, 1e-6, placement(dtype=dtype), offset=1.0)
    norm.load(MemoryWeights({"n.weight": weight}))
    theirs = Gemma3RMSNorm(96, 1e-6).to(dtype)
    theirs.weight.data.copy_(weight)
    truth = exact(x, 1.0 + weight.double(), 1e-6)
    assert norm(x).dtype == dtype and norm.weight_bytes == norm.weight.numel() * norm.weight.element_size()
    assert error(norm(x), truth) <= 1.02 * error(theirs(x), truth)
    heads = HeadNorm("a", 1, 1, 96, 1e-6, placement(dtype=dtype), offset=1.0)
    heads.load(MemoryWeights({"a.q_norm.weight": weight, "a.k_norm.weight": -weight}))
    both = heads(torch.stack((x, x), 1))
    torch.testing.assert_close(both[:, 0].double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(both[:, 1].double(), exact(x, 1.0 - weight.double(), 1e-6), rtol=1e-6, atol=1e-6)
