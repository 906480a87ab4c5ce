"""Weights of few bits with scales and offsets for groups of inputs: their stored form, and their products.

The kernel equals the reference bit by bit.
"""

import pytest
import torch
from torch import Tensor

from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.gemm import CppPackedGatedMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.quantized_gemm import GROUPED, GROUPED_DOT, grouped_kind
from oarlock.workers.quantization.grouped import GroupedMatmul, GroupedWeight, stored_groups
from oarlock.workers.quantization.groups import group_in_slices, packed_bytes, pieces_of
from oarlock.workers.quantization.matmul import ACTIVATIONS, ReferenceGatedMatmul
from tests.unit.workers.kernel_levels import NO_KERNELS, PARAMETERS, is_here, threads, using

Bits = int | None
FLOATS = None  # in place of a number of bits: floats of 4 bits, as whole numbers that are twice as large
TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def made(
    outputs: int, inputs: int, group: int, bits: Bits, *, offsets: bool, whole: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, scales and offsets as a checkpoint may have them: with `whole` as GPTQ, else as Q4_K."""
    shape = (outputs, -(-inputs // group))
    if bits is FLOATS:
        return TWICE[torch.randint(0, len(TWICE), (outputs, inputs))], 2.0 ** torch.randint(-12, -2, shape), None
    most = 1 << bits - 1
    values = torch.randint(-most, most, (outputs, inputs), dtype=torch.int8)
    scales = ((torch.rand(shape) + 0.5) / most / inputs**0.5).half().float()
    if not whole:
        scales = scales * torch.randint(0, 64, shape)
    shift = torch.randint(-most, most, shape) if whole else torch.randn(shape)
    return values, scales, scales * shift if offsets else None


def of_bits(bits: Bits) -> dict[str, int]:
    """Arguments of `GroupedWeight`."""
    return {"bits": 4, "is_float": True} if bits is FLOATS else {"bits": bits}


def dense(values: Tensor, scales: Tensor, offsets: Tensor | None, group: int) -> Tensor:
    """Weights by their definition, in float64."""
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


@pytest.mark.parametrize(("bits", "offsets"), [(4, False), (4, True), (8, False), (8, True), (FLOATS, False)])
@pytest.mark.parametrize(("inputs", "group"), [(256, 32), (100, 16), (256, 128), (192, 192)])
def test_products_match_the_dequantised_weight(bits: Bits, offsets: bool, inputs: int, group: int) -> None:
    torch.manual_seed(0)
    parts = made(24, inputs, group, bits, offsets=offsets)
    truth = dense(*parts, group)
    weight = GroupedWeight(*parts[:2], group, torch.float32, offsets=parts[2], **of_bits(bits))
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


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (outputs, inputs, stored group, slices): around panels, registers, blocks of inputs, groups and four inputs at a time.
SHAPES = [
    (48, 64, 32, 1), (33, 50, 64, 1), (200, 256, 128, 2), (70, 3000, 32, 1), (5, 21, 16, 1), (96, 1024, 1024, 4),
    (40, 288, 32, 8), (34, 4 * 1216, 128, 4),
]  # fmt: skip
FORMS = [(4, False), (4, True), (8, False), (8, True), (FLOATS, False)]  # bits, and whether there are offsets

each_level = pytest.mark.parametrize("level", PARAMETERS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_form = pytest.mark.parametrize(("bits", "offsets"), FORMS)


def kinds(level: ISALevel) -> list[int]:
    """Kinds of packed weights that run here; the emulated processors have every instruction."""
    return [GROUPED, GROUPED_DOT] if not is_here(level) or grouped_kind(level) == GROUPED_DOT else [GROUPED]


def weight_of(
    outputs: int,
    inputs: int,
    group: int,
    dtype: torch.dtype,
    bits: Bits,
    offsets: bool,
    order: Tensor | None = None,
) -> GroupedWeight:
    values, scales, shift = made(outputs, inputs, group, bits, offsets=offsets, whole=False)
    return GroupedWeight(values, scales, group, dtype, offsets=shift, order=order, **of_bits(bits))


def reference(weight: GroupedWeight, bias: Tensor | None, *, wide: bool = False, slices: int = 1) -> GroupedMatmul:
    return GroupedMatmul(weight.weight, weight.order, weight.dtype, bias, float32_output=wide, slices=slices)


@each_level
@each_form
@each_dtype
@pytest.mark.parametrize(("outputs", "inputs", "group", "slices"), SHAPES)
def test_the_kernel_equals_the_reference_bit_by_bit(
    level: ISALevel,
    dtype: torch.dtype,
    bits: Bits,
    offsets: bool,
    outputs: int,
    inputs: int,
    group: int,
    slices: int,
) -> None:
    torch.manual_seed(0)
    weight = weight_of(outputs, inputs, group, dtype, bits, offsets)
    x, bias, residual = (torch.randn(*n).to(dtype) for n in ((300, inputs), (outputs,), (300, outputs)))
    x[0] *= 40  # each row has a scale of its own, and each slice of it
    x[:, : inputs // slices] *= 3
    x[12, 1:] = 0
    plain = reference(weight, None, wide=True, slices=slices)(x)
    added = reference(weight, bias, slices=slices)(x, residual)
    for kind in kinds(level):
        with using(level):
            packed = weight.packed(slices=slices, kind=kind)
        for rows in (1, 2, 13, 64, 300):
            here = slice(0, rows)
            assert torch.equal(CppPackedMatmul(packed, dtype, None, float32_output=True)(x[here]), plain[here])
            assert torch.equal(CppPackedMatmul(packed, dtype, None)(x[here]), plain[here].to(dtype))
            assert torch.equal(CppPackedMatmul(packed, dtype, bias)(x[here], residual[here]), added[here])


@each_level
@each_form
@pytest.mark.parametrize("slices", [1, 4])
def test_the_kernel_reads_inputs_in_another_order(level: ISALevel, bits: Bits, offsets: bool, slices: int) -> None:
    torch.manual_seed(0)
    order = None if bits is FLOATS else torch.randperm(1280)  # no checkpoint has floats in another order
    weight = weight_of(50, 1280, 64, torch.bfloat16, bits, offsets, order)
    x, ids = torch.randn(40, 1280, dtype=torch.bfloat16), torch.randint(0, 50, (20,))
    expected = reference(weight, None, slices=slices)(x)
    for kind in kinds(level):
        with using(level):
            product = CppPackedMatmul(weight.packed(slices=slices, kind=kind), torch.bfloat16, None)
        for rows in (1, 40):
            assert torch.equal(product(x[:rows]), expected[:rows])
        assert torch.equal(product.rows(ids), weight.embed(ids))


@each_level
def test_an_input_may_come_again_where_the_weight_is_zero(level: ISALevel) -> None:
    torch.manual_seed(0)
    values, scales, _ = made(40, 96, 32, 4, offsets=False)
    values[:, 40:64] = 0
    order = torch.cat([torch.randperm(72)[:40], torch.zeros(24, dtype=torch.int64), torch.arange(40, 72)])
    weight = GroupedWeight(values, scales, 32, torch.float32, bits=4, order=order)
    x = torch.randn(5, 72)
    for kind in kinds(level):
        with using(level):
            product = CppPackedMatmul(weight.packed(kind=kind), torch.float32, None)
        assert torch.equal(product(x), reference(weight, None)(x))


@pytest.mark.parametrize(("bits", "offsets"), FORMS)
def test_memory_is_as_it_is_counted(bits: Bits, offsets: bool) -> None:
    if NO_KERNELS is not None:
        pytest.skip(NO_KERNELS)
    for inputs, group in ((256, 64), (100, 16), (5, 32), (48, 48)):
        weight = weight_of(64, inputs, group, torch.float32, bits, offsets)
        assert len(weight.packed().memory) - 64 == packed_bytes(64, inputs, bits or 4, group, offsets=offsets)


@each_level
@each_form
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gate_equals_the_reference(
    level: ISALevel, dtype: torch.dtype, bits: Bits, offsets: bool, activation: str
) -> None:
    """Up to the last bits of exp, and each row has the same bits in every batch and with any number of threads."""
    torch.manual_seed(0)
    weight = weight_of(2 * 40, 1100, 32, dtype, bits, offsets)
    bias = torch.randn(2 * 40).to(dtype)
    x = torch.randn(300, 1100).to(dtype)
    truth = ReferenceGatedMatmul(GroupedMatmul(weight.weight, None, dtype, bias), activation)(x)
    limit = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype] * truth.abs().max()
    whole = []
    for kind in kinds(level):
        with using(level):
            product = CppPackedGatedMatmul(weight.packed(gated=True, kind=kind), dtype, bias, activation)
        for count in (1, 2, 8):
            with threads(count):
                whole.append(product(x))
                for rows in (1, 12, 64):
                    assert torch.equal(product(x[300 - rows :]), whole[0][300 - rows :])
    assert all(torch.equal(y, whole[0]) for y in whole)
    assert (whole[0] - truth).abs().max() <= limit


@each_level
@each_form
def test_the_largest_sums_of_a_group_are_exact(level: ISALevel, bits: Bits, offsets: bool) -> None:
    """All numbers at their limits: what would saturate 16 bits, or 32 if sums were not of one group."""
    most = 12 if bits is FLOATS else 1 << bits - 1
    for inputs in (8, 1024, 100_000):
        values = torch.full((34, inputs), most if bits is FLOATS else most - 1, dtype=torch.int8)
        values[::2] = -most
        scales = torch.ones((34, -(-inputs // 32)))
        shift = scales * most if offsets else None
        weight = GroupedWeight(values, scales, 32, torch.float32, offsets=shift, **of_bits(bits))
        x = torch.full((3, inputs), 5.0)
        x[1] = -5.0
        x[2, ::2] = -5.0
        expected = reference(weight, None)(x)
        for kind in kinds(level):
            with using(level):
                assert torch.equal(CppPackedMatmul(weight.packed(kind=kind), torch.float32, None)(x), expected)


@each_level
@each_form
def test_the_number_of_threads_changes_no_bit(level: ISALevel, bits: Bits, offsets: bool) -> None:
    """Weights with many inputs, and more threads than panels."""
    torch.manual_seed(0)
    weight = weight_of(40, 3700, 32, torch.bfloat16, bits, offsets)
    x = torch.randn(14, 3700).to(torch.bfloat16)
    expected = reference(weight, None)(x)
    for kind in kinds(level):
        with using(level):
            product = CppPackedMatmul(weight.packed(kind=kind), torch.bfloat16, None)
        for count in (1, 2, 8):
            with threads(count):
                assert torch.equal(product(x), expected) and torch.equal(product(x[:1]), expected[:1])


@each_level
@each_form
@each_dtype
def test_rows_come_back_out_of_the_packed_weight(
    level: ISALevel, dtype: torch.dtype, bits: Bits, offsets: bool
) -> None:
    torch.manual_seed(0)
    weight = weight_of(77, 1030, 32, dtype, bits, offsets)
    ids = torch.randint(0, 77, (40,))
    for kind in kinds(level):
        with using(level):
            rows = CppPackedMatmul(weight.packed(kind=kind), dtype, None).rows(ids)
        assert torch.equal(rows, weight.embed(ids))


@each_level
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_in_their_row(level: ISALevel, broken: float) -> None:
    weight = weight_of(64, 100, 32, torch.float32, 4, True)
    for kind in kinds(level):
        with using(level):
            product = CppPackedMatmul(weight.packed(kind=kind), torch.float32, None)
        for at in (0, 50, 99):
            x = torch.randn(4, 100)
            clean = product(x)
            x[1, at] = broken
            y = product(x)
            assert y[1].isnan().all() and reference(weight, None)(x)[1].isnan().all()
            assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])
