"""The packed products against the plain one, and the promise that a row does not depend on its company."""

import pytest
import torch
import torch.nn.functional as F

from workers.layers.activation import ACTIVATIONS
from workers.layers.matmul import (
    FLOAT32_BLOCK,
    PackedGatedMatmul,
    PackedMatmul,
    PlainGatedMatmul,
    PlainMatmul,
    can_pack,
    gated_matmul,
    matmul,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PACKED = [dtype for dtype in DTYPES if can_pack(dtype, "cpu")]  # float16 is packed by few processors
SHAPES = [(48, 64), (33, 50), (200, FLOAT32_BLOCK), (96, FLOAT32_BLOCK + 1), (70, 3 * FLOAT32_BLOCK + 40)]
COUNTS = (1, 2, 3, 5, 8, 17, 64, 300)


def tolerance(dtype: torch.dtype, size: float) -> float:
    return {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype] * size


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_plus", [False, True])
def test_packed_equals_plain(dtype: torch.dtype, outputs: int, inputs: int, with_bias: bool, with_plus: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    packed, plain = PackedMatmul(weight.clone(), bias), PlainMatmul(weight, bias)
    for rows in COUNTS:
        x, plus = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype) if with_plus else None
        kept = None if plus is None else plus.clone()
        ours = packed(x, plus)
        truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        truth = truth if plus is None else truth + plus.double()
        limit = tolerance(dtype, truth.abs().max().item())
        assert (ours.double() - truth).abs().max() <= limit
        assert (plain(x, plus).double() - truth).abs().max() <= 2 * limit  # rounds before it adds as well
        if plus is not None and kept is not None:
            assert torch.equal(plus, kept), "the residual must not be written to"


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inputs", [64, 2 * FLOAT32_BLOCK + 8])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_gate_equals_plain(dtype: torch.dtype, activation: str, inputs: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(2 * 40, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(2 * 40).to(dtype) if with_bias else None
    packed = PackedGatedMatmul(weight.clone(), bias, activation)
    plain = PlainGatedMatmul(weight, bias, activation)
    act = F.silu if activation == "silu" else lambda y: F.gelu(y, approximate="tanh")
    for rows in COUNTS:
        x = torch.randn(rows, inputs).to(dtype)
        gate, up = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).chunk(2, 1)
        truth = act(gate) * up
        limit = 3 * tolerance(dtype, max(1.0, truth.abs().max().item()))
        for product in (packed, plain):
            assert (product(x).double() - truth).abs().max() <= limit


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_their_company(dtype: torch.dtype, threads: int) -> None:
    """From two rows on, bit by bit: a token's numbers are its own."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for outputs, inputs in ((896, 1216), (64, 3200)):
            weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
            x, plus = torch.randn(300, inputs).to(dtype), torch.randn(300, outputs).to(dtype)
            linear, gated = PackedMatmul(weight, None), PackedGatedMatmul(weight, None, "silu")
            whole, added, gate = linear(x), linear(x, plus), gated(x)
            for rows in (2, 7, 16, 33, 128, 257):
                for start in (0, 300 - rows):
                    part = slice(start, start + rows)
                    assert torch.equal(linear(x[part]), whole[part])
                    assert torch.equal(linear(x[part], plus[part]), added[part])
                    assert torch.equal(gated(x[part]), gate[part])
    finally:
        torch.set_num_threads(before)


def test_float32_blocks_keep_the_error_near_the_plain_products() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(256, 4864) * 0.02, torch.randn(64, 4864)
    truth = x.double() @ weight.double().T

    def error(y: torch.Tensor) -> float:
        return (y.double() - truth).pow(2).mean().sqrt().item()

    assert error(PackedMatmul(weight, None)(x)) <= 1.35 * error(F.linear(x, weight))


def test_the_choice_follows_what_the_processor_can_pack() -> None:
    for dtype in DTYPES:
        weight = torch.zeros(32, 16, dtype=dtype)
        assert isinstance(matmul(weight), PackedMatmul if can_pack(dtype, "cpu") else PlainMatmul)
        wanted = PackedGatedMatmul if can_pack(dtype, "cpu") else PlainGatedMatmul
        assert isinstance(gated_matmul(weight, None, "silu"), wanted)
    assert not can_pack(torch.float32, "cuda")
    assert not can_pack(torch.int64, "cpu")
