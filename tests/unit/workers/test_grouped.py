"""Weights of few bits with scales and offsets for groups of inputs: what is kept of them, and what products give."""

import pytest
import torch
from torch import Tensor

from workers.layers.quantization.grouped import GroupedWeight, stored_groups
from workers.layers.quantization.groups import group_in_slices, pieces_of


def made(
    outputs: int, inputs: int, group: int, bits: int, *, offsets: bool, whole: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, scales and offsets as a checkpoint may have them: with `whole` as GPTQ, else as Q4_K."""
    shape = (outputs, -(-inputs // group))
    most = 1 << bits - 1
    values = torch.randint(-most, most, (outputs, inputs), dtype=torch.int8)
    scales = ((torch.rand(shape) + 0.5) / most / inputs**0.5).half().float()
    if not whole:
        scales = scales * torch.randint(0, 64, shape)
    shift = torch.randint(-most, most, shape) if whole else torch.randn(shape)
    return values, scales, scales * shift if offsets else None


def dense(values: Tensor, scales: Tensor, offsets: Tensor | None, group: int) -> Tensor:
    """The definition, in float64."""
    group_of = torch.arange(values.shape[1]) // group
    weight = values.double() * scales.double()[:, group_of]
    return weight if offsets is None else weight + offsets.double()[:, group_of]


def test_scales_of_16_bits_and_whole_zero_points_are_kept_exactly() -> None:
    torch.manual_seed(0)
    for scale in (1e-4, 1.0, 1e6):
        for kind in (torch.float16, torch.bfloat16):
            values, scales, _ = made(20, 256, 64, 4, offsets=False)
            scales = (scales * scale).to(kind).float()
            zeros = torch.randint(-8, 9, scales.shape)
            kept = stored_groups(values, scales, scales * zeros, 64)
            assert kept.zeros is not None and torch.equal(kept.zeros.long(), zeros)
            assert torch.equal(kept.scales.float() * kept.factors.unsqueeze(1), scales)


def test_products_of_scales_lose_at_most_a_part_in_2048() -> None:
    torch.manual_seed(0)
    values, scales, offsets = made(50, 512, 32, 4, offsets=True, whole=False)
    assert offsets is not None
    kept = stored_groups(values, scales, offsets, 32)
    assert kept.zeros is not None
    found = kept.scales.double() * kept.factors.double().unsqueeze(1)
    assert ((found - scales).abs() <= 2**-11 * scales.abs()).all()
    assert ((found * kept.zeros.double() - offsets).abs() <= 2**-11 * offsets.abs()).all()


def test_an_offset_without_a_scale_is_kept() -> None:
    values = torch.randint(-8, 8, (3, 64), dtype=torch.int8)
    before = values.clone()
    scales = torch.tensor([[0.0, 1.0], [1e-9, 0.0], [0.0, 0.0]])
    offsets = torch.tensor([[0.25, 0.5], [3.0, 0.0], [0.0, -7.0]])
    weight = stored_groups(values, scales, offsets, 32).dequantised()
    torch.testing.assert_close(weight.double(), dense(before, scales, offsets, 32), rtol=2**-11, atol=0)
    assert torch.equal(values, before)


def test_groups_begin_anew_at_each_slice_wherever_a_rank_begins() -> None:
    assert pieces_of(70, 32, 1, 32) == [[(0, 32), (32, 64), (64, 70)]]
    assert pieces_of(96, 64, 2, 32) == [[(0, 16), (16, 32), (32, 48)], [(48, 64), (64, 80), (80, 96)]]
    for inputs, group, slices in ((4864, 128, 8), (896, 64, 4), (896, 896, 8)):
        whole = pieces_of(inputs, group, slices, 32)
        for ranks in (2, 4):
            local = inputs // ranks
            stored = group_in_slices(inputs, group, ranks)
            alone = pieces_of(local, stored, slices // ranks, 32)
            for rank in range(ranks):
                there = whole[rank * len(alone) : (rank + 1) * len(alone)]
                assert there == [[(a + rank * local, b + rank * local) for a, b in pieces] for pieces in alone]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("inputs", "group"), [(256, 32), (100, 16), (256, 128), (192, 192)])
def test_products_are_those_of_the_dequantised_weight(bits: int, offsets: bool, inputs: int, group: int) -> None:
    torch.manual_seed(0)
    parts = made(24, inputs, group, bits, offsets=offsets)
    truth = dense(*parts, group)
    weight = GroupedWeight(*parts[:2], group, torch.float32, offsets=parts[2], bits=bits)
    x, bias, residual = torch.randn(5, inputs), torch.randn(24), torch.randn(5, 24)
    expected = x.double() @ truth.T + bias + residual
    limit = 0.02 * (x.double().abs() @ truth.T.abs()).max()
    assert (weight.matmul(bias)(x, residual) - expected).abs().max() < limit
    gate, up = (x.double() @ truth.T).chunk(2, 1)
    gated = weight.gated_matmul(None, "silu")(x)
    assert (gated - torch.nn.functional.silu(gate) * up).abs().max() < limit * 4
    torch.testing.assert_close(weight.embed(torch.tensor([3, 0])).double(), truth[[3, 0]])


@pytest.mark.parametrize("slices", [2, 4])
def test_a_rank_with_some_slices_adds_the_same_sums(slices: int) -> None:
    torch.manual_seed(0)
    values, scales, offsets = made(24, 320, 64, 4, offsets=True)
    x = torch.randn(5, 320)
    whole = GroupedWeight(values, scales, 64, torch.float32, offsets=offsets, bits=4).matmul(slices=slices)(x)
    group = group_in_slices(320, 64, 2)
    assert offsets is not None
    halves = []
    for inputs in (slice(0, 160), slice(160, 320)):
        finer = [
            part.repeat_interleave(64 // group, 1)[:, inputs.start // group : inputs.stop // group]
            for part in (scales, offsets)
        ]
        local = GroupedWeight(values[:, inputs], finer[0], group, torch.float32, offsets=finer[1], bits=4)
        halves.append(local.matmul(slices=slices // 2)(x[:, inputs]))
    assert torch.equal(halves[0] + halves[1], whole)


def test_inputs_in_another_order() -> None:
    torch.manual_seed(0)
    values, scales, _ = made(24, 96, 32, 4, offsets=False)
    order = torch.randperm(96)
    plain = GroupedWeight(values, scales, 32, torch.float32, bits=4)
    weight = GroupedWeight(values, scales, 32, torch.float32, bits=4, order=order)
    x, ids = torch.randn(5, 96), torch.tensor([1, 20])
    assert torch.equal(weight.matmul()(x), plain.matmul()(x[:, order]))
    assert torch.equal(weight.embed(ids)[:, order], plain.embed(ids))
