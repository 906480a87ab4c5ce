"""Products whose inputs are cut into slices: the ranks' partial sums add up to the same bits."""

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.gemm import CppMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.quantized_gemm import INT8, INT8_DOT, PackedInt8, int8_kind
from oarlock.workers.quantization.grouped import GroupedMatmul, stored_groups
from oarlock.workers.quantization.int4 import GROUP, round_groups
from oarlock.workers.quantization.int8 import Int8Matmul, round_rows
from oarlock.workers.quantization.matmul import Matmul, PlainMatmul, SlicedMatmul
from tests.unit.workers.kernel_levels import PARAMETERS, is_here, threads, using

INPUTS, OUTPUTS = 8 * 36, 24  # groups of 32 inputs are cut at the border of every slice


def plain(weight: Tensor, bias: Tensor | None, slices: int, *, float32_output: bool = False) -> Matmul:
    products = [PlainMatmul(part, None) for part in weight.chunk(slices, 1)]
    return SlicedMatmul(products, bias, weight.dtype, float32_output=float32_output)


def int8(weight: Tensor, bias: Tensor | None, slices: int, *, float32_output: bool = False) -> Matmul:
    values, scales = round_rows(weight)
    return Int8Matmul(values, scales, weight.dtype, bias, float32_output=float32_output, slices=slices)


def int4(weight: Tensor, bias: Tensor | None, slices: int, *, float32_output: bool = False) -> Matmul:
    values, scales = round_groups(weight)
    stored = stored_groups(values, scales.float(), None, GROUP)
    return GroupedMatmul(stored, None, weight.dtype, bias, float32_output=float32_output, slices=slices)


def test_the_order_of_the_tree() -> None:
    """Numbers whose sum depends on the order: 2 ** 24 is where float32 ends to count by ones."""
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert tree_sum([big, one, one, one]) == (big + one) + (one + one)
    assert tree_sum([big, one, one]) == (big + one) + one
    assert tree_sum([one, one, big, one, one]) == ((one + one) + (big + one)) + one
    names = [torch.tensor(ord(name)).float() for name in "abcdefgh"]
    assert tree_sum(names) == sum(names)


@pytest.mark.parametrize("form", [plain, int8, int4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_are_near_the_truth(form, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(OUTPUTS, INPUTS) / INPUTS**0.5).to(dtype)
    bias, x, residual = torch.randn(OUTPUTS).to(dtype), torch.randn(5, INPUTS).to(dtype), torch.randn(5, OUTPUTS)
    truth = x.double() @ weight.double().T + bias.double() + residual.to(dtype).double()
    limit = {plain: 2**-20 if dtype == torch.float32 else 2**-5, int8: 0.05, int4: 0.5}[form]
    for slices in (1, 2, 4, 8):
        y = form(weight, bias, slices)(x, residual.to(dtype))
        assert y.dtype == dtype and (y.double() - truth).abs().max() < limit


@pytest.mark.parametrize("form", [plain, int8])
@pytest.mark.parametrize(("slices", "ranks"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
def test_ranks_add_up_to_the_same_bits(form, slices: int, ranks: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS), torch.randn(5, INPUTS)
    whole = form(weight, bias, slices)(x)
    values, scales = round_rows(weight)

    def share(rank: int) -> Tensor:
        part, here = weight.chunk(ranks, 1)[rank], x.chunk(ranks, 1)[rank]
        if form is plain:
            return plain(part, None, slices // ranks, float32_output=True)(here)
        mine = values.chunk(ranks, 1)[rank]  # the scale of an output is that of its whole row
        return Int8Matmul(mine, scales, torch.float32, None, slices=slices // ranks)(here)

    assert torch.equal(tree_sum([share(rank) for rank in range(ranks)]) + bias, whole)


def exact_slices(slices: int, length: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight and inputs whose sum over a slice is exact in any order, and whose slices add up to other bits in any
    other tree: whole numbers, those of each slice times another power of two."""
    weight = torch.randint(-7, 8, (OUTPUTS, slices, length))
    x = torch.randint(-7, 8, (rows, slices, length))
    powers = torch.randint(0, 8, (2, slices, 1))
    return (weight << powers[0]).flatten(1).to(dtype), (x << powers[1]).flatten(1).to(dtype)


each_level = pytest.mark.parametrize("level", PARAMETERS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
each_cut = pytest.mark.parametrize(
    ("slices", "length"), [(2, 36), (2, 1500), (4, 300), (8, 21), (8, 256)], ids=lambda value: str(value)
)


@each_level
@each_dtype
@each_cut
def test_the_dense_kernel_adds_slices_up_in_the_tree(
    level: ISALevel, dtype: torch.dtype, slices: int, length: int
) -> None:
    """Bit by bit as torch's operations do, where the sum of a slice is exact."""
    torch.manual_seed(0)
    weight, x = exact_slices(slices, length, 300, dtype)
    bias, residual = torch.randn(OUTPUTS).to(dtype), torch.randn(300, OUTPUTS).to(dtype)
    expected = plain(weight.float(), bias.float(), slices)
    with using(level):
        wide = CppMatmul(weight, bias, float32_output=True, slices=slices)
        rounded = CppMatmul(weight, bias, slices=slices)
    for count in (1, 4):  # with more threads than panels of outputs, threads take parts of the inputs
        with threads(count):
            for rows in (1, 2, 13, 300):
                here, added = x[:rows], residual[:rows]
                assert torch.equal(wide(here), expected(here.float()))
                assert torch.equal(rounded(here, added), expected(here.float(), added.float()).to(dtype))


@each_level
@each_dtype
@each_cut
def test_the_dense_kernel_computes_a_slice_as_a_weight_by_itself(
    level: ISALevel, dtype: torch.dtype, slices: int, length: int
) -> None:
    """Ranks do the same, with any numbers."""
    torch.manual_seed(0)
    weight, x = torch.randn(OUTPUTS, slices * length).to(dtype), torch.randn(300, slices * length).to(dtype)
    with using(level):
        whole = CppMatmul(weight, None, float32_output=True, slices=slices)
        alone = [CppMatmul(part.contiguous(), None, float32_output=True) for part in weight.chunk(slices, 1)]
    for count, rows in ((1, 1), (1, 300), (4, 1), (4, 14)):
        with threads(count):
            parts = [product(part) for product, part in zip(alone, x[:rows].chunk(slices, 1), strict=True)]
            assert torch.equal(whole(x[:rows]), tree_sum(parts))


@each_level
@each_dtype
@each_cut
def test_the_kernel_for_8_bits_equals_the_reference(
    level: ISALevel, dtype: torch.dtype, slices: int, length: int
) -> None:
    torch.manual_seed(0)
    values, scales = round_rows(torch.randn(OUTPUTS, slices * length))
    x, bias, residual = (
        torch.randn(*shape).to(dtype) for shape in ((300, slices * length), (OUTPUTS,), (300, OUTPUTS))
    )
    x[:, :length] *= 30  # each slice of a row has a scale of its own
    expected = Int8Matmul(values, scales, dtype, bias, slices=slices)
    kinds = [INT8, INT8_DOT] if not is_here(level) or int8_kind(level) == INT8_DOT else [INT8]
    for kind in kinds:
        with using(level):
            product = CppPackedMatmul(PackedInt8(values, scales, kind=kind, slices=slices), dtype, bias)
        for count, rows in ((1, 1), (1, 300), (4, 1), (4, 14)):
            with threads(count):
                assert torch.equal(product(x[:rows]), expected(x[:rows]))
                assert torch.equal(product(x[:rows], residual[:rows]), expected(x[:rows], residual[:rows]))
