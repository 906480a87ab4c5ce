"""Products whose inputs are cut into slices: what ranks compute with theirs adds up to the same bits."""

import pytest
import torch
from torch import Tensor

from workers.distributed.tree_sum import tree_sum
from workers.layers.matmul import Matmul, PlainMatmul, SlicedMatmul
from workers.layers.quantization.int4 import Int4Matmul, round_groups
from workers.layers.quantization.int8 import Int8Matmul, round_rows

INPUTS, OUTPUTS = 8 * 36, 24  # groups of 32 inputs are cut at the border of every slice


def plain(weight: Tensor, bias: Tensor | None, slices: int, *, float32_output: bool = False) -> Matmul:
    products = [PlainMatmul(part, None) for part in weight.chunk(slices, 1)]
    return SlicedMatmul(products, bias, weight.dtype, float32_output=float32_output)


def int8(weight: Tensor, bias: Tensor | None, slices: int, *, float32_output: bool = False) -> Matmul:
    values, scales = round_rows(weight)
    return Int8Matmul(values, scales, weight.dtype, bias, float32_output=float32_output, slices=slices)


def int4(weight: Tensor, bias: Tensor | None, slices: int, *, float32_output: bool = False) -> Matmul:
    values, scales = round_groups(weight)
    return Int4Matmul(values, scales, weight.dtype, bias, float32_output=float32_output, slices=slices)


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
