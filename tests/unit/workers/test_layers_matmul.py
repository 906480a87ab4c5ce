"""The packed products against the plain one, and their batch invariance."""

import pytest
import torch
import torch.nn.functional as F

from tests.unit.workers.attention_cases import EMULATES_BFLOAT16
from workers.kernels.cpu import library
from workers.kernels.cpu.avx512_gemm import Avx512GatedMatmul, Avx512Matmul
from workers.layers.matmul import (
    ACTIVATIONS,
    FLOAT32_BLOCK,
    PackedGatedMatmul,
    PackedMatmul,
    PlainGatedMatmul,
    PlainMatmul,
    can_pack,
    gated_matmul,
    matmul,
)
from workers.layers.row_invariance import PairedRows, needs_second_row


def inner(product):
    """The product itself, without `PairedRows`."""
    return product.product if isinstance(product, PairedRows) else product


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PACKED = [dtype for dtype in DTYPES if can_pack(dtype, "cpu")]  # float16 is packed by few processors
# (dtype, linear, gated, the fewest rows from which it is batch-invariant): every fast form this machine has
FORMS = [pytest.param(dtype, PackedMatmul, PackedGatedMatmul, 2, id=f"onednn-{dtype}") for dtype in PACKED]
if library.provides("oarlock_gemm"):
    FORMS.append(pytest.param(torch.bfloat16, Avx512Matmul, Avx512GatedMatmul, 1, id="avx512"))
SHAPES = [(48, 64), (33, 50), (200, FLOAT32_BLOCK), (96, FLOAT32_BLOCK + 1), (70, 3 * FLOAT32_BLOCK + 40)]
COUNTS = (1, 2, 3, 5, 8, 17, 64, 300)


def tolerance(dtype: torch.dtype, size: float) -> float:
    return {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype] * size


@pytest.mark.parametrize(("dtype", "linear", "gated", "fewest"), FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_packed_equals_plain(dtype, linear, gated, fewest, outputs, inputs, with_bias, with_residual) -> None:
    if linear is Avx512Matmul and inputs % 2:
        pytest.skip("the kernel takes inputs in pairs; oneDNN serves the others")
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    packed, plain = linear(weight.clone(), bias), PlainMatmul(weight, bias)
    for rows in COUNTS:
        x, residual = (
            torch.randn(rows, inputs).to(dtype),
            torch.randn(rows, outputs).to(dtype) if with_residual else None,
        )
        kept = None if residual is None else residual.clone()
        ours = packed(x, residual)
        truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        truth = truth if residual is None else truth + residual.double()
        limit = tolerance(dtype, truth.abs().max().item())
        assert (ours.double() - truth).abs().max() <= limit
        assert (plain(x, residual).double() - truth).abs().max() <= 2 * limit  # rounds before it adds as well
        if residual is not None and kept is not None:
            assert torch.equal(residual, kept), "the residual must not be written to"


@pytest.mark.parametrize(("dtype", "linear", "gated", "fewest"), FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inputs", [64, 2 * FLOAT32_BLOCK + 8])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_gate_equals_plain(dtype, linear, gated, fewest, activation, inputs, with_bias) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(2 * 40, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(2 * 40).to(dtype) if with_bias else None
    packed = gated(weight.clone(), bias, activation)
    plain = PlainGatedMatmul(weight, bias, activation)
    act = F.silu if activation == "silu" else lambda y: F.gelu(y, approximate="tanh")
    for rows in COUNTS:
        x = torch.randn(rows, inputs).to(dtype)
        gate, up = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).chunk(2, 1)
        truth = act(gate) * up
        limit = 3 * tolerance(dtype, max(1.0, truth.abs().max().item()))
        for product in (packed, plain):
            assert (product(x).double() - truth).abs().max() <= limit


@pytest.mark.parametrize(("dtype", "linear", "gated", "fewest"), FORMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_the_batch(dtype, linear, gated, fewest, threads: int) -> None:
    """Bit by bit: a token's numbers are its own."""
    if linear is PackedMatmul and dtype == torch.bfloat16 and EMULATES_BFLOAT16:
        pytest.skip(EMULATES_BFLOAT16)
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for outputs, inputs in ((896, 1216), (64, 3200)):
            weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
            x, residual = torch.randn(300, inputs).to(dtype), torch.randn(300, outputs).to(dtype)
            product, both = linear(weight, None), gated(weight, None, "silu")
            whole, added, gate = product(x), product(x, residual), both(x)
            for rows in (fewest, 2, 7, 12, 13, 16, 33, 128, 257):
                for start in (0, 300 - rows):
                    part = slice(start, start + rows)
                    assert torch.equal(product(x[part]), whole[part])
                    assert torch.equal(product(x[part], residual[part]), added[part])
                    assert torch.equal(both(x[part]), gate[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_has_the_bits_that_it_has_beside_another(dtype, threads: int) -> None:
    """Whichever product was chosen: where its library rounds a single row differently, it is given two."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for outputs, inputs in ((896, 896), (1152, 896), (4864, 896), (9000, 256)):
            weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
            x, residual = torch.randn(32, inputs).to(dtype), torch.randn(32, outputs).to(dtype)
            product, both = matmul(weight), gated_matmul(weight, None, "silu")
            for row in range(32):
                one, two = slice(row, row + 1), slice(row // 2 * 2, row // 2 * 2 + 2)
                assert torch.equal(product(x[one]), product(x[two])[row % 2 : row % 2 + 1])
                assert torch.equal(
                    product(x[one], residual[one]), product(x[two], residual[two])[row % 2 : row % 2 + 1]
                )
                assert torch.equal(both(x[one]), both(x[two])[row % 2 : row % 2 + 1])
    finally:
        torch.set_num_threads(before)


def test_only_a_product_that_rounds_a_single_row_differently_gets_two() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 200).bfloat16()
    seen: list[int] = []

    def product(x: torch.Tensor, halves: bool) -> torch.Tensor:
        """float32 sums rounded to 16 bits; a single row in two halves, if so."""
        seen.append(len(x))
        if halves and len(x) == 1:
            return (
                x[:, :100].float() @ weight[:, :100].float().T + x[:, 100:].float() @ weight[:, 100:].float().T
            ).bfloat16()
        return torch.cat([(row.float() * weight.float()).sum(1)[None] for row in x]).bfloat16()

    assert not needs_second_row(lambda x: product(x, False), weight, "alike")
    assert needs_second_row(lambda x: product(x, True), weight, "in halves")
    tries = len(seen)
    assert (
        needs_second_row(lambda x: product(x, False), weight, "in halves") and len(seen) == tries
    )  # known by its kind
    PairedRows(lambda x: product(x, True))(torch.randn(1, 200).bfloat16())
    PairedRows(lambda x: product(x, True))(torch.randn(3, 200).bfloat16())
    assert seen[tries:] == [2, 3]


def test_float32_blocks_keep_the_error_near_the_plain_products() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(256, 4864) * 0.02, torch.randn(64, 4864)
    truth = x.double() @ weight.double().T

    def error(y: torch.Tensor) -> float:
        return (y.double() - truth).pow(2).mean().sqrt().item()

    assert error(PackedMatmul(weight, None)(x)) <= 1.35 * error(F.linear(x, weight))


def test_the_choice_follows_what_the_processor_can_do() -> None:
    for dtype in DTYPES:
        weight = torch.zeros(32, 16, dtype=dtype)
        kernels = dtype == torch.bfloat16 and library.provides("oarlock_gemm")
        packs = can_pack(dtype, "cpu")
        assert isinstance(inner(matmul(weight)), Avx512Matmul if kernels else PackedMatmul if packs else PlainMatmul)
        wanted = Avx512GatedMatmul if kernels else PackedGatedMatmul if packs else PlainGatedMatmul
        assert isinstance(inner(gated_matmul(weight, None, "silu")), wanted)
    assert not can_pack(torch.float32, "cuda")
    assert not can_pack(torch.int64, "cpu")


needs_kernels = pytest.mark.skipif(not library.provides("oarlock_mask"), reason="this level has no kernel yet")


@needs_kernels
def test_wide_products_are_not_rounded() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(77, 128).bfloat16(), torch.randn(5, 128).bfloat16()
    wide = matmul(weight, wide=True)(x)
    truth = x.double() @ weight.double().T
    assert wide.dtype == torch.float32
    assert (wide - truth).abs().max() <= 1e-5 * truth.abs().max()
    assert torch.equal(wide.bfloat16(), matmul(weight)(x))


@needs_kernels
@pytest.mark.parametrize("rows", [77, 64])
def test_rows_come_back_out_of_the_packed_weight(rows: int) -> None:
    weight = torch.randn(rows, 50).bfloat16()
    ids = torch.randint(0, rows, (40,))
    assert torch.equal(Avx512Matmul(weight, None).rows(ids), weight[ids])


@needs_kernels
def test_nan_and_infinity_stay_what_they_are_in_their_own_row() -> None:
    weight = torch.randn(64, 32).bfloat16()
    x = torch.randn(3, 32).bfloat16()
    clean = gated_matmul(weight, None, "silu")(x)
    x[1, 3] = float("nan")
    y = gated_matmul(weight, None, "silu")(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
