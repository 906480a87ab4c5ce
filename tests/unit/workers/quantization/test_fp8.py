"""Weights of 8 bits in floating point with scales for groups of inputs."""

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.gemm import CppPackedGatedMatmul, CppPackedMatmul
from oarlock.workers.quantization.fp8 import Fp8Matmul, Fp8Weight
from oarlock.workers.quantization.groups import fp8_bytes, group_in_slices
from oarlock.workers.quantization.matmul import ACTIVATIONS, ReferenceGatedMatmul
from tests.unit.workers.kernel_levels import NO_KERNELS, PARAMETERS, threads, using

EVERY = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = EVERY[EVERY.float().isfinite()]  # each number that a weight can be, subnormals as well


def made(outputs: int, inputs: int, group: int) -> tuple[Tensor, Tensor]:
    values = FINITE[torch.randint(0, len(FINITE), (outputs, inputs))]
    return values, torch.rand(outputs, -(-inputs // group)) * 1e-3


def dense(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """Weights by their definition, in float64."""
    return values.double() * scales.double()[:, torch.arange(values.shape[1]) // group]


@pytest.mark.parametrize(("inputs", "group", "slices"), [(256, 128, 1), (300, 128, 1), (320, 320, 4), (512, 128, 8)])
def test_products_match_the_dequantised_weight(inputs: int, group: int, slices: int) -> None:
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


# (outputs, inputs, group, slices): around panels, registers, pieces and groups.
SHAPES = [
    (48, 64, 128, 1), (33, 50, 50, 1), (200, 256, 128, 2), (70, 3000, 128, 1), (5, 21, 32, 1), (96, 1216, 1216, 2),
    (40, 288, 48, 8),
]  # fmt: skip
each_level = pytest.mark.parametrize("level", PARAMETERS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@each_level
@each_dtype
@pytest.mark.parametrize(("outputs", "inputs", "group", "slices"), SHAPES)
def test_the_kernel_agrees_with_the_reference(
    level: ISALevel, dtype: torch.dtype, outputs: int, inputs: int, group: int, slices: int
) -> None:
    """Within the rounding of float32; each row has the same bits in every batch and with any number of threads."""
    torch.manual_seed(0)
    values, scales = made(outputs, inputs, group)
    x, bias, residual = (torch.randn(*n).to(dtype) for n in ((300, inputs), (outputs,), (300, outputs)))
    wide = Fp8Matmul(values, scales, group, dtype, None, float32_output=True, slices=slices)(x)
    limit = 4e-7 * (x.double().abs() @ dense(values, scales, group).T.abs()).max()
    with using(level):
        packed = Fp8Weight(values, scales, group, dtype).packed(slices=slices)
    plain, rounded = (CppPackedMatmul(packed, dtype, bias, float32_output=wide) for wide in (True, False))
    whole, added = plain(x), rounded(x, residual)
    assert (whole - bias.float() - wide).abs().max() <= limit
    assert torch.equal(added, (whole + residual.float()).to(dtype))
    for count in (1, 2, 8):
        with threads(count):
            for rows in (1, 2, 12, 64, 300):
                assert torch.equal(plain(x[300 - rows :]), whole[300 - rows :])


def test_memory_is_as_it_is_counted() -> None:
    if NO_KERNELS is not None:
        pytest.skip(NO_KERNELS)
    for inputs, group in ((256, 128), (300, 128), (300, 300), (96, 32)):
        packed = Fp8Weight(*made(64, inputs, group), group, torch.float32).packed()
        assert len(packed.memory) - 64 == fp8_bytes(64, inputs, group)


@each_level
def test_every_number_is_widened_exactly(level: ISALevel) -> None:
    values = FINITE.repeat(40, 1)
    weight = Fp8Weight(values, torch.full((40, 2), 0.75), 128, torch.float32)
    x = torch.eye(len(FINITE))
    with using(level):
        product = CppPackedMatmul(weight.packed(), torch.float32, None)
    for rows in (1, len(FINITE)):
        assert torch.equal(product(x[:rows]), values.T.float()[:rows] * 0.75)
    assert torch.equal(product.rows(torch.tensor([7])), values[:1].float() * 0.75)


@each_level
@pytest.mark.parametrize(("inputs", "group", "slices"), [(1216, 128, 4), (512, 512, 8), (320, 64, 2)])
def test_a_rank_with_some_slices_adds_the_same_sums(level: ISALevel, inputs: int, group: int, slices: int) -> None:
    torch.manual_seed(0)
    values, scales = made(40, inputs, group)
    x = torch.randn(30, inputs)
    with using(level):
        whole = Fp8Weight(values, scales, group, torch.float32).matmul(slices=slices)(x)
        local, finer = inputs // 2, group_in_slices(inputs, group, 2)
        ranks = []
        for first in (0, local):
            here = scales[:, torch.arange(first, first + local, finer) // group].contiguous()
            weight = Fp8Weight(values[:, first : first + local], here, finer, torch.float32)
            ranks.append(weight.matmul(slices=slices // 2)(x[:, first : first + local]))
    assert torch.equal(tree_sum(ranks), whole)


@each_level
@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gate_agrees_with_the_reference(level: ISALevel, dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(0)
    values, scales = made(2 * 40, 1100, 128)
    scales = scales * 0.01
    x, bias = torch.randn(60, 1100).to(dtype), torch.randn(2 * 40).to(dtype)
    truth = ReferenceGatedMatmul(Fp8Matmul(values, scales, 128, dtype, bias), activation)(x)
    limit = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype] * truth.abs().max()
    with using(level):
        packed = Fp8Weight(values, scales, 128, dtype).packed(gated=True)
        product = CppPackedGatedMatmul(packed, dtype, bias, activation)
    whole = product(x)
    assert (whole - truth).abs().max() <= limit
    assert all(torch.equal(product(x[60 - rows :]), whole[60 - rows :]) for rows in (1, 12, 60))


@each_level
@each_dtype
def test_rows_come_back_out_of_the_packed_weight(level: ISALevel, dtype: torch.dtype) -> None:
    values, scales = made(77, 1030, 128)
    weight, ids = Fp8Weight(values, scales, 128, dtype), torch.randint(0, 77, (40,))
    with using(level):
        rows = CppPackedMatmul(weight.packed(), dtype, None).rows(ids)
    assert torch.equal(rows, weight.embed(ids))
