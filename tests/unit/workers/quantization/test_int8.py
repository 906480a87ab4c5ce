"""Weights of 8 bits: the kernel equals the reference bit by bit, and every number of ranks has the same weights."""

import pytest
import torch
from torch import Tensor

from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.gemm import CppPackedGatedMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.quantized_gemm import INT8, INT8_DOT, MOST_INPUTS, PackedInt8, int8_kind
from oarlock.workers.quantization.int8 import Int8Matmul, Int8Weight, round_rows
from oarlock.workers.quantization.matmul import ACTIVATIONS, PLAIN_ACTIVATIONS, ReferenceGatedMatmul, activated
from tests.house.rules import ROOT
from tests.unit.workers.kernel_levels import PARAMETERS, is_here, threads, using

DEMO = ROOT / "models" / "oarlock-demo"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Around panels, registers, blocks of inputs and four inputs at a time.
SHAPES = [(48, 64), (33, 50), (200, 256), (70, 3000), (5, 21), (96, 1024)]
COUNTS = (1, 2, 5, 13, 64, 300)

each_level = pytest.mark.parametrize("level", PARAMETERS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def kinds(level: ISALevel) -> list[int]:
    """Kinds of packed weights that run here; the emulated processors have every instruction."""
    return [INT8, INT8_DOT] if not is_here(level) or int8_kind(level) == INT8_DOT else [INT8]


def rounded(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return round_rows((torch.randn(outputs, inputs) / inputs**0.5).to(dtype))


@each_level
@each_dtype
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_kernel_equals_the_reference_bit_by_bit(
    level: ISALevel, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    torch.manual_seed(0)
    values, scales = rounded(outputs, inputs, dtype)
    bias = torch.randn(outputs).to(dtype)
    with using(level):
        packed = [PackedInt8(values, scales, kind=kind) for kind in kinds(level)]
    for rows in COUNTS:
        x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
        x[0] *= 40  # each row has a scale of its own
        x[-1, 1:] = 0
        for addend in (None, bias):
            wide = Int8Matmul(values, scales, dtype, addend, float32_output=True)(x)
            added = Int8Matmul(values, scales, dtype, addend)(x, residual)
            for weight in packed:
                ours = CppPackedMatmul(weight, dtype, addend)
                assert torch.equal(CppPackedMatmul(weight, dtype, addend, float32_output=True)(x), wide)
                assert torch.equal(ours(x), wide.to(dtype))
                assert torch.equal(ours(x, residual), added)


@each_level
def test_weights_of_minus_128_are_exact(level: ISALevel) -> None:
    """Checkpoints have them; weights that are rounded here end at 127."""
    torch.manual_seed(0)
    values, scales = torch.full((34, 1024), -128, dtype=torch.int8), torch.ones(34)
    values[1::2, ::3] = 127
    x = torch.full((5, 1024), 3.0)
    x[1] = -3.0
    x[2:] = torch.randn(3, 1024)
    expected = Int8Matmul(values, scales, torch.float32, None)(x)
    with using(level):
        for kind in kinds(level):
            packed = PackedInt8(values, scales, kind=kind)
            assert torch.equal(CppPackedMatmul(packed, torch.float32, None)(x), expected)


@each_level
@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gate_equals_the_reference(level: ISALevel, dtype: torch.dtype, activation: str, with_bias: bool) -> None:
    """Up to the last bits of exp, and each row has the same bits in every batch and with any number of threads."""
    torch.manual_seed(0)
    values, scales = rounded(2 * 40, 1100, dtype)
    bias = torch.randn(2 * 40).to(dtype) if with_bias else None
    reference = ReferenceGatedMatmul(Int8Matmul(values, scales, dtype, bias), activation)
    x = torch.randn(300, 1100).to(dtype)
    truth = reference(x)
    limit = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype] * truth.abs().max()
    whole = []
    for kind in kinds(level):
        with using(level):
            product = CppPackedGatedMatmul(PackedInt8(values, scales, gated=True, kind=kind), dtype, bias, activation)
        for count in (1, 2, 8):
            with threads(count):
                whole.append(product(x))
                for rows in (1, 3, 12, 64):
                    assert torch.equal(product(x[300 - rows :]), whole[0][300 - rows :])
    assert all(torch.equal(y, whole[0]) for y in whole)
    assert (whole[0] - truth).abs().max() <= limit


@each_level
@each_dtype
@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS)
def test_an_activation_equals_the_reference(level: ISALevel, dtype: torch.dtype, activation: str) -> None:
    """Up to the last bits of exp and of gelu's polynomials."""
    torch.manual_seed(0)
    values, scales = rounded(70, 1100, dtype)
    bias, x = torch.randn(70).to(dtype), 2 * torch.randn(40, 1100).to(dtype)
    truth = activated(Int8Matmul(values, scales, dtype, bias, float32_output=True), activation)(x)
    limit = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype] * truth.abs().max()
    for kind in kinds(level):
        with using(level):
            packed = CppPackedMatmul(PackedInt8(values, scales, kind=kind), dtype, bias, float32_output=True)
            product = activated(packed, activation)
        assert isinstance(product, CppPackedMatmul) and product(x).dtype == dtype
        assert (product(x) - truth).abs().max() <= limit
        assert torch.equal(product(x[3:5]), product(x)[3:5])


@each_level
def test_the_largest_sums_are_exact(level: ISALevel) -> None:
    """All numbers at their limits: what would saturate 16 bits, and the longest rows that 32 bits hold."""
    for inputs in (8, 1024, MOST_INPUTS):
        values = torch.full((34, inputs), 127, dtype=torch.int8)
        values[::2] = -127
        scales = torch.ones(34)
        x = torch.full((3, inputs), 5.0)
        x[1] = -5.0
        x[2, ::2] = -5.0
        expected = Int8Matmul(values, scales, torch.float32, None)(x)
        for kind in kinds(level):
            with using(level):
                ours = CppPackedMatmul(PackedInt8(values, scales, kind=kind), torch.float32, None)(x)
            assert torch.equal(ours, expected)


@each_level
@each_dtype
def test_splitting_over_inputs_changes_no_bit(level: ISALevel, dtype: torch.dtype) -> None:
    """With more threads than panels, threads take parts of the inputs."""
    values, scales = rounded(40, 3700, dtype)
    x = torch.randn(14, 3700).to(dtype)
    expected = Int8Matmul(values, scales, dtype, None)(x)
    for kind in kinds(level):
        with using(level):
            product = CppPackedMatmul(PackedInt8(values, scales, kind=kind), dtype, None)
        for count in (1, 2, 8):
            with threads(count):
                assert torch.equal(product(x), expected) and torch.equal(product(x[:1]), expected[:1])


@each_level
@each_dtype
def test_rows_come_back_out_of_the_packed_weight(level: ISALevel, dtype: torch.dtype) -> None:
    values, scales = rounded(77, 1030, dtype)
    ids = torch.randint(0, 77, (40,))
    with using(level):
        rows = CppPackedMatmul(PackedInt8(values, scales), dtype, None).rows(ids)
    assert torch.equal(rows, Int8Weight(values, scales, dtype).embed(ids))


@each_level
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_in_their_row(level: ISALevel, broken: float) -> None:
    values, scales = rounded(64, 100, torch.float32)
    for kind in kinds(level):
        with using(level):
            product = CppPackedMatmul(PackedInt8(values, scales, kind=kind), torch.float32, None)
        for at in (0, 50, 99):
            x = torch.randn(4, 100)
            clean = product(x)
            x[1, at] = broken
            y = product(x)
            assert y[1].isnan().all() and Int8Matmul(values, scales, torch.float32, None)(x)[1].isnan().all()
            assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])


def test_rounding_is_to_the_nearest_of_255_numbers() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 300) * torch.logspace(-20, 20, 50).unsqueeze(1)
    x[7] = 0
    values, scales = round_rows(x)
    assert values.abs().max() == 127 and not values[7].any() and scales[7] == 0
    limit = scales.double().unsqueeze(1) * (0.5 + 1e-4)
    assert ((values * scales.double().unsqueeze(1) - x.double()).abs() <= limit).all()
