"""Products with weights of 4 and 8 bits on a CUDA device, or in Triton's interpreter, against float64.

In the interpreter, products of bfloat16 are not those of a device, so that type is left to devices.
"""

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.kernels.triton import elementwise as activation_kernel
from oarlock.workers.kernels.triton.elementwise import gated as one_kernel
from oarlock.workers.quantization import block_float8, scaled_float8, weight_only
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.int8 import Int8Weight
from oarlock.workers.quantization.matmul import ACTIVATIONS, gated_with_torch
from oarlock.workers.quantization.method import DenseWeight, LinearWeight, StackedWeight
from oarlock.workers.quantization.weight_only import MOST_ROWS, WeightOnly
from tests.unit.workers.kernels.triton.triton_resources import of_program

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
# of the sum of the sizes of what is added: weights, sums and results are rounded
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
FINITE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = FINITE[FINITE.float().isfinite()]  # every number, subnormals as well

pytestmark = pytest.mark.slow


def grouped(outputs: int, inputs: int, group: int, bits: int, *, offsets: bool, ordered: bool, dtype: torch.dtype):
    """A weight, and its numbers at their places: float64 [N, K]."""
    most, groups = 1 << bits - 1, (outputs, -(-inputs // group))
    values = torch.randint(-most, most, (outputs, inputs), dtype=torch.int8)
    scales = ((torch.rand(groups) + 0.5) / most / inputs**0.5).half().float()
    shifts = scales * torch.randint(-most, most, groups) if offsets else None
    order = torch.randperm(inputs) if ordered else None
    group_of = torch.arange(inputs) // group
    truth = values.double() * scales.double()[:, group_of]
    if shifts is not None:
        truth = truth + shifts.double()[:, group_of]
    if order is not None:
        truth = torch.empty_like(truth).index_copy_(1, order, truth)
    return GroupedWeight(values, scales, group, dtype, offsets=shifts, bits=bits, order=order), truth


def channels(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Int8Weight, Tensor]:
    values, scales = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) / inputs
    return Int8Weight(values, scales, dtype), values.double() * scales.double().unsqueeze(1)


def float8(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> tuple[Fp8Weight, Tensor]:
    values = FINITE[torch.randint(0, len(FINITE), (outputs, inputs))]
    scales = torch.rand(outputs, -(-inputs // group)) * 1e-3
    truth = values.double() * scales.double()[:, torch.arange(inputs) // group]
    return Fp8Weight(values, scales, group, dtype), truth


def agree(weight: LinearWeight, truth: Tensor, dtype: torch.dtype, rows: int) -> None:
    """Products, with bias and residual, shares of a sum, gated, and rows of the weight."""
    placed = weight.on(DEVICE)
    # Sums of many rows are rounded before the residual is added.
    rounding = ROUNDING[dtype] * (2 if rows > MOST_ROWS else 1)
    outputs, inputs = truth.shape
    x, bias, residual = (
        torch.randn(shape).to(DEVICE, dtype) for shape in ((rows, inputs), (outputs,), (rows, outputs))
    )
    exact, share = x.double().cpu() @ truth.T, placed.matmul(float32_output=True)(x)
    size = x.double().cpu().abs() @ truth.T.abs() + 1e-30
    assert share.dtype == torch.float32
    assert ((share.double().cpu() - exact).abs() / size).max() < rounding
    y, wanted = placed.matmul(bias)(x, residual), exact + bias.double().cpu() + residual.double().cpu()
    whole = size + bias.double().cpu().abs() + residual.double().cpu().abs()
    assert y.dtype == dtype and ((y.double().cpu() - wanted).abs() / whole).max() < rounding
    if outputs % 2 == 0:
        for activation in ACTIVATIONS:
            result = placed.gated_matmul(bias, activation)(x)
            gate, up = (exact + bias.double().cpu()).chunk(2, 1)
            gated = ACTIVATIONS[activation].function(gate) * up
            sizes = (size + bias.double().cpu().abs()).chunk(2, 1)
            assert ((result.double().cpu() - gated).abs() / (sizes[0] * sizes[1] + 1)).max() < 4 * rounding
    ids = torch.randint(0, outputs, (5,))
    torch.testing.assert_close(placed.embed(ids.to(DEVICE)).cpu(), truth[ids].to(dtype), rtol=rounding, atol=1e-7)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "outputs", "inputs", "group", "offsets", "ordered", "rows"),
    [
        (4, 130, 256, 32, True, False, 1),
        (4, 64, 200, 64, False, False, 17),
        (4, 70, 96, 48, True, True, 3),
        (4, 64, 1024, 128, True, False, MOST_ROWS + 1),
        (8, 66, 160, 16, True, False, 2),
        (8, 32, 144, 144, True, True, MOST_ROWS),
    ],
)
def test_groups_of_whole_numbers(bits, outputs, inputs, group, offsets, ordered, rows, dtype):
    torch.manual_seed(0)
    agree(*grouped(outputs, inputs, group, bits, offsets=offsets, ordered=ordered, dtype=dtype), dtype, rows)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(70, 300, 1), (33, 64, 20), (128, 50, MOST_ROWS + 6)])
def test_a_scale_for_each_output(outputs, inputs, rows, dtype):
    torch.manual_seed(0)
    agree(*channels(outputs, inputs, dtype), dtype, rows)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "rows"), [(64, 300, 128, 1), (70, 96, 96, 4), (34, 256, 64, 65), (20, 54, 18, 3)]
)
def test_every_number_of_float8(outputs, inputs, group, rows, dtype):
    torch.manual_seed(0)
    agree(*float8(outputs, inputs, group, dtype), dtype, rows)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_are_rounded_to_float8_as_by_torch(dtype):
    torch.manual_seed(0)
    sizes = torch.tensor([1, 1e-3, 0, 1e-40, 100, 1]).to(DEVICE, dtype)
    x = torch.randn(6, 3000).to(DEVICE, dtype) * sizes.unsqueeze(1)
    x[5, 7] = torch.inf
    values, scales = scaled_float8.round_rows_fused(x)
    wanted, wanted_scales = scaled_float8.round_rows(x)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    same = values.float() == wanted.float()
    if DEVICE.type == "cpu":
        # Where a number is rounded up to a power of 2, the interpreter loses the carry into the exponent.
        same |= wanted.float().abs() == 2 * values.float().abs()
    assert same[:5].double().mean() > 0.998  # ties, of which float16 has many, may be decided by a last bit
    assert (values.float()[5] * scales[5]).isnan().any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_many_rows_are_multiplied_in_float8_where_the_device_can(dtype, monkeypatch):
    torch.manual_seed(0)
    values, scales = FINITE[torch.randint(0, len(FINITE), (48, 96))], torch.rand(48, 1) * 1e-3
    truth = values.double() * scales.double()
    weight = Fp8Weight(values, scales, 96, dtype, rounds_rows=True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(scaled_float8, "round_rows_fused", scaled_float8.round_rows)  # see the test of both
    x, bias = torch.randn(MOST_ROWS + 1, 96).to(DEVICE, dtype), torch.randn(48).to(DEVICE, dtype)
    rounded, sizes = (part.double().cpu() for part in scaled_float8.round_rows(x))
    wanted = (rounded * sizes[:, None]) @ truth.T + bias.double().cpu()
    size = x.double().cpu().abs() @ truth.T.abs() + bias.double().cpu().abs()
    product = weight.on(DEVICE).matmul(bias)
    assert ((product(x).double().cpu() - wanted).abs() / size).max() < 2 * ROUNDING[dtype]
    few = product(x[:MOST_ROWS]).double().cpu() - (x[:MOST_ROWS].double().cpu() @ truth.T + bias.double().cpu())
    assert (few.abs() / size[:MOST_ROWS]).max() < ROUNDING[dtype], "few rows are not rounded"

    monkeypatch.setattr(scaled_float8, "why_not", lambda values, dtype: "this test has no such device")
    agree(weight, truth, dtype, MOST_ROWS + 1)
    monkeypatch.undo()
    agree(Fp8Weight(values, scales, 96, dtype), truth, dtype, MOST_ROWS + 1)  # a checkpoint that rounds weights alone


def test_matmuls_that_torch_refuses_in_float8_use_another_kernel(monkeypatch):
    values = torch.zeros((32, 48), dtype=torch.float8_e4m3fn)
    assert scaled_float8.why_not(values[:, :40], torch.float32) == "outputs and inputs are not multiples of 16"

    def refuses(*arguments: object) -> Tensor:
        raise RuntimeError("Only bf16 results\nand a stack")

    monkeypatch.setattr(scaled_float8, "_matmul", refuses)
    scaled_float8._refused.cache_clear()
    assert scaled_float8.why_not(values, torch.float32) == "Only bf16 results"
    monkeypatch.undo()
    assert scaled_float8.why_not(values, torch.float32) == "Only bf16 results", "tried once"
    scaled_float8._refused.cache_clear()
    assert DEVICE.type == "cuda" or scaled_float8.why_not(values, torch.float32) is None


def stand_in(rounded: Tensor, scales: Tensor, values: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Product with scales of blocks, as torch has it on devices of compute capability 9.0 alone."""
    groups = values.shape[1] // 128
    assert len(rounded) % 4 == 0 and scales.stride(0) == 1 and blocks.stride(0) == 1 and blocks.stride(1) % 4 == 0
    x = rounded.double() * scales.double().repeat_interleave(128, 1)
    weight = values.double() * blocks[:groups].double().T.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x @ weight.T).to(dtype)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the device has the product itself, or has not")
@pytest.mark.parametrize("pads_shape", [True, False])
def test_blocks_of_float8_are_multiplied_in_float8_where_that_is_right_and_faster(pads_shape, monkeypatch):
    torch.manual_seed(0)
    values, blocks = FINITE[torch.randint(0, len(FINITE), (128, 384))], torch.rand(1, 3) * 1e-3
    truth = values.double() * blocks.double().repeat_interleave(128, 0).repeat_interleave(128, 1)

    def product(rounds_rows: bool = True) -> weight_only.WeightOnlyMatmul:
        block_float8._chosen.clear()
        weight = Fp8Weight(values, blocks.repeat_interleave(128, 0), 128, torch.float32, rounds_rows=rounds_rows)
        return weight.on(DEVICE).matmul()

    def of_shape(*given: Tensor) -> Tensor:
        if (given[3].shape[0] == 4) != pads_shape:
            raise RuntimeError("scales have another shape\nand a stack")
        return stand_in(*given)

    monkeypatch.setattr(scaled_float8, "round_rows_fused", scaled_float8.round_rows)  # see the test of both
    assert product().in_float8 is None, "torch has no such product on CPUs"
    assert isinstance(next(iter(block_float8._chosen.values())), str)
    monkeypatch.setattr(block_float8, "_matmul", of_shape)
    times = [1.0, 2.0]
    monkeypatch.setattr(block_float8, "_seconds", lambda run, x: times.pop(0))
    x = torch.randn(MOST_ROWS + 1, 384)
    rounded, scales = block_float8.round_blocks(x)
    wanted = (rounded.double() * scales.double().repeat_interleave(128, 1)) @ truth.T
    size = x.double().abs() @ truth.T.abs()
    assert ((product()(x).double() - wanted).abs() / size).max() < 2 * ROUNDING[torch.float32]
    assert product(rounds_rows=False).in_float8 is None
    times[:] = [2.0, 1.0]
    assert product().in_float8 is None and "the other kernel" in str(block_float8._chosen)
    monkeypatch.setattr(block_float8, "_matmul", lambda *given: 1.05 * stand_in(*given))
    assert product().in_float8 is None and "results are wrong by 0.05" in str(block_float8._chosen)
    block_float8._chosen.clear()


def test_blocks_that_ranks_have_cut_are_none():
    scales = torch.rand(2, 3).repeat_interleave(128, 0)
    assert torch.equal(block_float8.blocks_of(scales), scales[::128])
    assert block_float8.blocks_of(scales[64:192]) is None and block_float8.blocks_of(scales[:100]) is None


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [3, MOST_ROWS + 1])
def test_gated_products_of_all_forms_use_the_kernel(activation, rows, as_on_cuda, monkeypatch):
    """Gate and up of one form, or of two; the judge computes in float64 from the stored numbers."""
    torch.manual_seed(0)
    dtype, asked = torch.float16, []

    def counted(y: Tensor, activation: str) -> Tensor:
        asked.append(y.dtype)
        return one_kernel(y, activation)

    monkeypatch.setattr(activation_kernel, "gated", counted)
    (gate, first), (up, second) = channels(32, 96, dtype), float8(32, 96, 96, dtype)
    both, truth = channels(64, 96, dtype)
    x = torch.randn(rows, 96).to(DEVICE, dtype)
    stacked = StackedWeight([gate, up], [32, 32]), torch.cat([first, second])
    for weight, numbers in (stacked, (both, truth)):
        found = weight.on(DEVICE).gated_matmul(None, activation)(x)
        assert found.dtype == dtype
        judge = gated_with_torch(x.double().cpu() @ numbers.T, activation)
        gates, ups = (x.double().cpu().abs() @ numbers.T.abs()).chunk(2, 1)  # sizes of what is added, as in `agree`
        rounding = ROUNDING[dtype] * (2 if rows > MOST_ROWS else 1)
        assert ((found.double().cpu() - judge).abs() / (gates * ups + 1)).max() < 4 * rounding
    # Of few rows of one form, the kernel that adds spans up has the activation too.
    assert asked == ([torch.float32] if rows == 3 else [torch.float32, dtype])


@pytest.mark.parametrize("processors", [1, 132])
def test_inputs_are_cut_into_spans_by_the_size_of_the_device(processors, monkeypatch):
    """Whatever the spans are, sums are those of the whole; and they do not depend on other rows."""
    monkeypatch.setattr(weight_only, "processors", lambda device: processors)
    torch.manual_seed(0)
    weight, truth = grouped(63, 2048 + 32, 32, 4, offsets=True, ordered=False, dtype=torch.float32)
    agree(weight, truth, torch.float32, 3)
    placed = weight.on(DEVICE)
    assert isinstance(placed, WeightOnly)
    span, spans = placed.stored.spans()
    assert spans == min(4 * processors, 4) and (spans - 1) * span < placed.stored.units <= spans * span
    x, product = torch.randn(18, 2080, device=DEVICE), placed.matmul()
    whole = product(x)
    assert all(torch.equal(product(x[row : row + count]), whole[row : row + count]) for row, count in ((0, 1), (3, 2)))


def test_many_rows_are_multiplied_some_outputs_at_a_time(monkeypatch):
    monkeypatch.setattr(weight_only, "_WRITTEN_OUT", 7 * 96 * 4)
    torch.manual_seed(0)
    agree(*grouped(64, 96, 32, 4, offsets=False, ordered=False, dtype=torch.float32), torch.float32, MOST_ROWS + 1)


def test_parts_of_several_forms_are_placed_one_by_one():
    torch.manual_seed(0)
    (first, one), (second, two) = channels(32, 96, torch.float32), float8(16, 96, 96, torch.float32)
    dense = DenseWeight(torch.randn(8, 96))
    stacked = StackedWeight([first, second, dense], [32, 16, 8]).on(DEVICE)
    x, truth = torch.randn(3, 96), torch.cat([one, two, dense.tensor.double()])
    torch.testing.assert_close(
        stacked.matmul()(x.to(DEVICE)).double().cpu(), x.double() @ truth.T, atol=1e-3, rtol=1e-5
    )


@pytest.mark.parametrize(
    "weight",
    [
        channels(32, 64, torch.float16)[0],
        grouped(32, 64, 32, 4, offsets=True, ordered=True, dtype=torch.float16)[0],
        float8(32, 64, 64, torch.float16)[0],
        float8(32, 64, 32, torch.float16)[0],
        float8(32, 40, 20, torch.float16)[0],
    ],
)
def test_all_of_a_weight_is_on_the_device(weight):
    placed = weight.on(torch.device("meta"))
    if isinstance(placed, DenseWeight):
        assert placed.tensor.is_meta and placed.tensor.dtype == torch.float16
        return
    parts = [placed.stored.values, placed.stored.scales, placed.stored.zeros, placed.stored.factors, placed.order]
    assert all(part.is_meta for part in parts if part is not None)


def test_stored_weights_keep_their_number_of_bits():
    weight = grouped(64, 256, 128, 4, offsets=True, ordered=False, dtype=torch.float16)[0].on(DEVICE)
    assert isinstance(weight, WeightOnly)
    stored = weight.stored
    assert stored.scales is not None and stored.zeros is not None
    taken = [part.numel() * part.element_size() for part in (stored.values, stored.scales, stored.zeros)]
    assert taken == [64 * 128, 64 * 2 * 2, 64 * 2 * 2]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 300, 25))
def test_hundreds_of_shapes_at_random(first):
    for seed in range(first, first + 25):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        dtype, rows = draw.choice(TYPES), draw.choice([1, 2, 15, 16, 17, 33, 64, 65, 130])
        outputs, inputs = draw.randint(1, 200), draw.randint(1, 700)
        kind = draw.choice(["4", "8", "channels", "float8"])
        if kind == "channels":
            agree(*channels(outputs, inputs, dtype), dtype, rows)
        elif kind == "float8":
            agree(*float8(outputs, inputs, draw.choice([inputs, 16, 32, 48, 128, 20]), dtype), dtype, rows)
        else:
            group = draw.choice([16, 32, 48, 64, 128, -(-inputs // 16) * 16])
            offsets, ordered = draw.random() < 0.5, draw.random() < 0.3
            made = grouped(outputs, inputs, group, int(kind), offsets=offsets, ordered=ordered, dtype=dtype)
            agree(*made, dtype, rows)


@pytest.mark.parametrize(
    ("formats", "kinds"),
    [
        ("largest", ["89"]),
        pytest.param("all", ["80", "89", "90", "100"], marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
def test_kernels_fit_every_kind_of_device(formats, kinds):
    """Compiled for each, without a device: shared memory and registers suffice, and none is spilled."""
    found = of_program("weight_only_resources", formats, *kinds)
    assert {name.split()[0] for name in found} == set(kinds)
    assert sum(name.endswith("in order") for name in found) == 2 * len(kinds)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_kernels_of_experts_fit_every_kind_of_device():
    kinds = {"80", "89", "90", "100"}
    assert {name.split()[0] for name in of_program("expert_resources", "all", *kinds)} == kinds
