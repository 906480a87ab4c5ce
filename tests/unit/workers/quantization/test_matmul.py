"""The packed products against the plain one, and their batch invariance."""

import pytest
import torch
import torch.nn.functional as F

from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.gemm import CppGatedMatmul, CppMatmul
from oarlock.workers.quantization.matmul import (
    ACTIVATIONS,
    FLOAT32_BLOCK,
    PLAIN_ACTIVATIONS,
    ActivatedMatmul,
    Float32Matmul,
    PackedGatedMatmul,
    PackedMatmul,
    PairedRows,
    PlainGatedMatmul,
    PlainMatmul,
    activated,
    can_pack,
    gated_matmul,
    matmul,
    needs_second_row,
)
from tests.unit.workers.attention_cases import EMULATES_BFLOAT16
from tests.unit.workers.kernel_levels import LEVELS, NO_KERNELS, PARAMETERS, using


def at(level: ISALevel, kind):
    """`kind`, made with the kernels of `level`."""

    def make(*arguments, **options):
        with using(level):
            return kind(*arguments, **options)

    return make


def inner(product):
    """The product itself, without `PairedRows`."""
    return product.multiply if isinstance(product, PairedRows) else product


# As the measurement at start reports there.
MULTIPLIES_BY_TILES = (
    "oneDNN multiplies bfloat16 by AMX on this processor and is not batch-invariant"
    if torch.cpu._is_amx_tile_supported()
    else None
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PACKED = [dtype for dtype in DTYPES if can_pack(dtype, "cpu")]  # float16 is packed by few processors
each_form = pytest.mark.parametrize("level", [pytest.param(None, id="onednn"), *PARAMETERS])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def fast_forms(level: ISALevel | None, dtype: torch.dtype):
    """(linear, gated, the fewest rows from which they are batch-invariant) of oneDNN or of a level's kernels."""
    if level is not None:
        return at(level, CppMatmul), at(level, CppGatedMatmul), 1
    if dtype not in PACKED:
        pytest.skip(f"oneDNN packs no {dtype} on this processor")
    return PackedMatmul, PackedGatedMatmul, 2


SHAPES = [(48, 64), (33, 50), (200, FLOAT32_BLOCK), (96, FLOAT32_BLOCK + 1), (70, 3 * FLOAT32_BLOCK + 40), (5, 20)]
COUNTS = (1, 2, 3, 5, 8, 17, 64, 300)


def tolerance(dtype: torch.dtype, size: float) -> float:
    return {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype] * size


@each_form
@each_dtype
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_packed_equals_plain(level, dtype, outputs, inputs, with_bias, with_residual) -> None:
    linear, _, _ = fast_forms(level, dtype)
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


@each_form
@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inputs", [64, 2 * FLOAT32_BLOCK + 8])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_gate_equals_plain(level, dtype, activation, inputs, with_bias) -> None:
    _, gated, _ = fast_forms(level, dtype)
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


@each_form
@each_dtype
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 64), (33, 50), (96, 2 * FLOAT32_BLOCK + 8)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_an_activation_follows_the_sums_and_is_rounded_once(level, dtype, outputs, inputs, with_bias) -> None:
    """oneDNN's sums are rounded before it, so only the kernels are near in every element."""
    linear, _, fewest = fast_forms(level, dtype)
    torch.manual_seed(0)
    weight = (2 * torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    multiply = linear(weight.clone(), bias, **({} if level is None else {"float32_output": True}))
    x = torch.randn(300, inputs).to(dtype)
    sums = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for name, function in PLAIN_ACTIVATIONS.items():
        product, truth = activated(multiply, name), function(sums)
        assert isinstance(product, ActivatedMatmul) == (level is None)
        whole = product(x)
        assert whole.dtype == dtype
        if level is None:
            assert (whole.double() - truth).abs().max() <= 4 * tolerance(dtype, truth.abs().max().item())
        else:
            torch.testing.assert_close(whole.double(), truth, rtol=max(4e-6, torch.finfo(dtype).eps), atol=2e-5)
        for rows in (fewest, 3, 17, 64):
            assert torch.equal(product(x[300 - rows :]), whole[300 - rows :]) or level is None
        with_nan = x.clone()
        with_nan[0, 0] = float("nan")
        assert product(with_nan)[0].isnan().all()


@each_form
@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.slow
def test_rows_do_not_depend_on_the_batch(level, dtype, threads: int) -> None:
    """Bit by bit: a token's numbers are its own."""
    linear, gated, fewest = fast_forms(level, dtype)
    if linear is PackedMatmul and dtype == torch.bfloat16 and (why := EMULATES_BFLOAT16 or MULTIPLIES_BY_TILES):
        pytest.skip(why)
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


@pytest.mark.parametrize("level", PARAMETERS)
def test_subnormal_numbers_do_not_depend_on_the_batch(level) -> None:
    """Tiles of AMX count them as zero: so must what multiplies a few rows in their place."""
    torch.manual_seed(0)
    weight = torch.randn(64, 200).bfloat16()
    weight[::2] *= 1e-39
    x = torch.randn(40, 200).mul_(100).bfloat16()
    product = at(level, CppMatmul)(weight, None)
    whole = product(x)
    for rows in (1, 2, 3, 4, 16):
        assert torch.equal(product(x[:rows]), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.slow
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

    plain = error(F.linear(x, weight))
    assert error(PackedMatmul(weight, None)(x)) <= 1.35 * plain
    for level in LEVELS:
        assert error(at(level, CppMatmul)(weight, None)(x)) <= 1.35 * plain, level.name


def test_the_choice_follows_what_the_processor_can_do() -> None:
    for dtype in DTYPES:
        weight = torch.zeros(32, 16, dtype=dtype)
        kernels = not NO_KERNELS
        packs = can_pack(dtype, "cpu")
        assert isinstance(inner(matmul(weight)), CppMatmul if kernels else PackedMatmul if packs else PlainMatmul)
        wanted = CppGatedMatmul if kernels else PackedGatedMatmul if packs else PlainGatedMatmul
        assert isinstance(inner(gated_matmul(weight, None, "silu")), wanted)
    assert not can_pack(torch.float32, "cuda")
    assert not can_pack(torch.int64, "cpu")


each_level = pytest.mark.parametrize("level", PARAMETERS)


@each_level
@each_dtype
def test_float32_results_are_not_rounded(level, dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(77, 128).to(dtype), torch.randn(5, 128).to(dtype)
    wide = at(level, CppMatmul)(weight, None, float32_output=True)(x)
    truth = x.double() @ weight.double().T
    assert wide.dtype == torch.float32
    assert (wide - truth).abs().max() <= 1e-5 * truth.abs().max()
    assert torch.equal(wide.to(dtype), at(level, CppMatmul)(weight, None)(x))


@each_level
@each_dtype
@pytest.mark.parametrize(("rows", "inputs"), [(77, 50), (64, 33)])
def test_rows_come_back_out_of_the_packed_weight(level, dtype, rows: int, inputs: int) -> None:
    weight = torch.randn(rows, inputs).to(dtype)
    ids = torch.randint(0, rows, (40,))
    assert torch.equal(at(level, CppMatmul)(weight, None).rows(ids), weight[ids])


@each_level
@each_dtype
def test_nan_and_infinity_stay_unchanged_in_their_own_row(level, dtype) -> None:
    weight = torch.randn(64, 32).to(dtype)
    product = at(level, CppGatedMatmul)(weight, None, "silu")
    for rows in (3, 30):
        x = torch.randn(rows, 32).to(dtype)
        clean = product(x)
        x[1, 3] = float("nan")
        y = product(x)
        assert y[1].isnan().all()
        others = [row for row in range(rows) if row != 1]
        assert torch.equal(y[others], clean[others])


@each_level
@each_dtype
def test_splitting_over_inputs_changes_no_bit(level, dtype) -> None:
    """With more threads than panels, threads take parts of the inputs."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, 1700).to(dtype), torch.randn(14, 1700).to(dtype)
    product = at(level, CppMatmul)(weight, None)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            results.append([product(x[:rows]) for rows in (1, 5, 14)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@each_level
def test_a_view_of_rows_is_read_in_place(level) -> None:
    whole = torch.randn(9, 300)
    weight = torch.randn(40, 300)
    part, cut = whole[:, 100:164], weight[:, 100:164]
    product = at(level, CppMatmul)(cut, None)
    assert torch.equal(product(part), product(part.contiguous()))
    assert torch.allclose(product(part), part @ cut.T, atol=1e-4)


def test_partial_sums_on_a_device_are_not_rounded() -> None:
    """With a product of torch's signature for CUDA, here computed on the host; slices are one piece there."""

    def multiply(x: torch.Tensor, y: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        return x.to(out_dtype) @ y.to(out_dtype)

    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(Float32Matmul(weight, multiply)(x).double(), exact, rtol=1e-5, atol=1e-5)
    on_device = torch.empty((8, 64), dtype=torch.bfloat16, device="meta")
    assert isinstance(matmul(on_device, float32_output=True, slices=4), Float32Matmul)
    assert isinstance(matmul(on_device, slices=4), PlainMatmul)
    assert isinstance(matmul(on_device.float(), float32_output=True), PlainMatmul)
