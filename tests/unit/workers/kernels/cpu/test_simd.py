"""Each operation of the vector layer at each level, against numpy in float64 or exact integers."""

import ctypes
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oarlock.workers.kernels.cpu import build
from oarlock.workers.kernels.cpu.build import ISALevel
from tests.unit.workers import kernel_levels
from tests.unit.workers.kernels.cpu.emulated_library import EmulatedLibrary

SOURCE = Path(__file__).parent / "csrc" / "simd_operations.cpp"
UNARY = ["abs", "round", "exp", "sigmoid", "silu", "tanh", "gelu_tanh", "sum", "largest", "first_lane", "gelu"]
BINARY = ["add", "subtract", "multiply", "divide", "min", "max", "with_sign_of", "scale_by_power_of_2", "less"]
TYPES = [torch.bfloat16, torch.float16, torch.float32]
SPECIAL = np.array([0.0, -0.0, 1, -1, 0.5, 2.5, 3.5, -2.5, 1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)


@pytest.fixture(scope="module", params=[each for each in kernel_levels.PARAMETERS if not each.values[0].tiles])
def simd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[ctypes.CDLL]:
    level: ISALevel = request.param
    functions: Any
    if kernel_levels.is_here(level):
        target = tmp_path_factory.mktemp("simd") / f"{level.name}.so"
        compiler = shutil.which("g++")
        assert compiler is not None
        build.compile_to(target, level, compiler, [SOURCE])
        functions = ctypes.CDLL(str(target))
    else:
        functions = EmulatedLibrary(level, [SOURCE])
    functions.exp_of_one.restype = ctypes.c_float
    functions.exp_of_one.argtypes = [ctypes.c_float]
    yield functions
    if not kernel_levels.is_here(level):
        functions.close()


def address(array: np.ndarray | torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data)


def unary(simd: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    simd.unary(UNARY.index(name), address(x), address(y), ctypes.c_long(len(x)))
    return y


def binary(simd: ctypes.CDLL, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    z = np.empty_like(x)
    simd.binary(BINARY.index(name), address(x), address(y), address(z), ctypes.c_long(len(x)))
    return z


def numbers(count: int = 1 << 16, scale: float = 1.0) -> np.ndarray:
    """Random floats of every size, and the special ones; a multiple of 16 of them."""
    random = np.random.default_rng(0)
    spread = random.standard_normal(count) * np.exp2(random.uniform(-8, 4, count)) * scale
    return np.concatenate([spread, np.resize(SPECIAL, 16)]).astype(np.float32)


def same(ours: np.ndarray, exact: np.ndarray) -> bool:
    """Whether the bits are equal, the sign of zero included; any NaN equals a NaN."""
    nan = np.isnan(exact)
    return bool((np.isnan(ours) == nan).all() and (ours.view(np.uint32) == exact.view(np.uint32))[~nan].all())


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
@pytest.mark.slow
def test_arithmetic_rounds_once(simd: ctypes.CDLL, name: str) -> None:
    x, y = numbers(), np.random.default_rng(1).permutation(numbers())
    with np.errstate(all="ignore"):
        assert same(binary(simd, name, x, y), getattr(np, name)(x, y))


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.slow
def test_fused_multiplication_rounds_once(simd: ctypes.CDLL, negated: bool) -> None:
    x, y = numbers()[:-16], np.random.default_rng(1).permutation(numbers()[:-16])
    z = -(x * y) if not negated else x * y  # cancels all but what the product loses when it is rounded
    out = np.empty_like(x)
    simd.fused(negated, address(x), address(y), address(z), address(out), ctypes.c_long(len(x)))
    product = x.astype(np.float64) * y  # exact: 48 bits
    assert same(out, ((-product if negated else product) + z).astype(np.float32) + np.float32(0))


@pytest.mark.parametrize(("name", "pick"), [("min", np.less), ("max", np.greater)])
def test_min_and_max_return_the_second_where_one_is_nan(simd: ctypes.CDLL, name: str, pick: Callable) -> None:
    x, y = (part.ravel() for part in np.meshgrid(np.resize(SPECIAL[2:], 16), np.resize(SPECIAL[2:], 16)))
    ours = binary(simd, name, x, y)
    assert same(ours, np.where(pick(x, y), x, y))
    assert same(ours[np.isnan(x)], y[np.isnan(x)]), "the second operand is kept where the first is NaN"
    assert np.isnan(ours[np.isnan(y)]).all()


def test_less_is_false_for_nan(simd: ctypes.CDLL) -> None:
    x, y = (part.ravel() for part in np.meshgrid(np.resize(SPECIAL, 16), np.resize(SPECIAL, 16)))
    assert (binary(simd, "less", x, y) == (x < y)).all()


def test_signs_and_rounding_to_whole_numbers(simd: ctypes.CDLL) -> None:
    x = numbers()
    assert same(unary(simd, "abs", x), np.abs(x))
    assert same(unary(simd, "round", x), np.rint(x))
    sizes, signs = np.abs(x[:-16]), np.random.default_rng(1).permutation(x[:-16])
    assert same(binary(simd, "with_sign_of", sizes, signs), np.copysign(sizes, signs))


def test_scaling_by_powers_of_two(simd: ctypes.CDLL) -> None:
    powers = np.resize(np.arange(-252, 255, dtype=np.float32), 512)
    x = np.resize(np.array([1.0, -1.5, 1.25], np.float32), 512)
    with np.errstate(over="ignore"):
        exact = np.ldexp(x.astype(np.float64), powers.astype(int)).astype(np.float32)
    assert same(binary(simd, "scale_by_power_of_2", x, powers), exact)


def test_reductions(simd: ctypes.CDLL) -> None:
    lanes = simd.lanes()
    x = np.random.default_rng(0).standard_normal(lanes * 64).astype(np.float32)
    registers = x.reshape(-1, lanes)
    for name, exact in (("largest", registers.max(1)), ("first_lane", registers[:, 0])):
        assert same(unary(simd, name, x), exact.repeat(lanes))
    sums = unary(simd, "sum", x)
    np.testing.assert_allclose(sums, registers.sum(1, dtype=np.float64).repeat(lanes), atol=2e-6)
    whole = np.arange(lanes * 4, dtype=np.float32)
    assert same(unary(simd, "sum", whole), whole.reshape(-1, lanes).sum(1).repeat(lanes))


def test_masks_are_bits(simd: ctypes.CDLL) -> None:
    lanes = simd.lanes()
    for count in range(-1, lanes + 2):
        assert simd.first_lanes(ctypes.c_long(count)) == (1 << max(0, min(count, lanes))) - 1
    for bits in range(1 << min(lanes, 8)):
        assert simd.both_lanes(bits, (1 << lanes) - 1) == bits
        assert simd.both_lanes(bits, 0b10101010) == bits & 0b10101010


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_conversions_of_every_number(simd: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Every 16-bit number, and every float near which rounding changes, or whose upper half is any of them."""
    kind = TYPES.index(dtype)
    if dtype == torch.float32:
        x = torch.from_numpy(numbers())
    else:
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    whole, single = torch.empty(len(x)), torch.empty(len(x))
    simd.widen(kind, address(x), address(whole), ctypes.c_long(len(x)))
    simd.widen_each(kind, address(x), address(single), ctypes.c_long(len(x)))
    assert same(whole.numpy(), x.float().numpy()) and same(single.numpy(), x.float().numpy())
    normal = x[x.float().abs() >= 2.0**-126] if dtype == torch.bfloat16 else x  # the instruction drops subnormals
    between = (normal.float().view(torch.int32)[:, None] + torch.tensor([-1, 0, 1, 0x7FFF, 0x8000, 0x8001])).ravel()
    between = between[: len(between) // 16 * 16].to(torch.int32).view(torch.float32)
    between = between[: len(between) // 16 * 16].clone()
    if dtype == torch.bfloat16:
        between = torch.where(between.abs() < 2.0**-126, 1.0, between)
    rounded = torch.empty(len(between), dtype=dtype)
    simd.round_to(kind, address(between), address(rounded), ctypes.c_long(len(between)))
    assert same(rounded.float().numpy(), between.to(dtype).float().numpy())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_parts_of_registers_touch_nothing_else(simd: ctypes.CDLL, dtype: torch.dtype) -> None:
    lanes, kind = simd.lanes(), TYPES.index(dtype)
    values, numbers = torch.arange(1, lanes + 3).to(dtype), torch.arange(1.0, lanes + 3)
    for count in range(-1, lanes + 2):
        inside = max(0, min(count, lanes))
        loaded = torch.full((lanes + 1,), 7.0)
        simd.load_part(kind, address(values), ctypes.c_long(count), address(loaded))
        assert loaded[:lanes].tolist() == [*values[:inside].tolist(), *[0.0] * (lanes - inside)]
        stored = torch.full((lanes + 2,), 7.0).to(dtype)
        simd.store_part(kind, address(numbers), ctypes.c_long(count), address(stored))
        assert stored.tolist() == [*values[:inside].tolist(), *[7.0] * (lanes + 2 - inside)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_parts_do_not_read_the_next_page(simd: ctypes.CDLL, dtype: torch.dtype) -> None:
    """`count` elements end where memory ends: a page that may not be read follows."""
    page = 4096
    memory = ctypes.CDLL(None, use_errno=True)
    memory.mmap.restype = ctypes.c_void_p
    memory.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, *[ctypes.c_int] * 2, ctypes.c_long]
    base = memory.mmap(None, 2 * page, 3, 0x22, -1, 0)
    assert memory.mprotect(ctypes.c_void_p(base + page), ctypes.c_size_t(page), 0) == 0
    try:
        for count in range(simd.lanes() + 1):
            at = ctypes.c_void_p(base + page - count * dtype.itemsize)
            values = torch.ones(simd.lanes())
            simd.store_part(TYPES.index(dtype), address(values), ctypes.c_long(count), at)
            simd.load_part(TYPES.index(dtype), at, ctypes.c_long(count), address(values))
            assert values.tolist() == [1.0] * count + [0.0] * (simd.lanes() - count)
    finally:
        memory.munmap(ctypes.c_void_p(base), ctypes.c_size_t(2 * page))


def test_pairs_of_products(simd: ctypes.CDLL) -> None:
    """Lower values first where they are fused multiply-adds; the instruction adds the products to each other first."""
    count = simd.lanes() * 32
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(count, 2, generator=random).bfloat16(), torch.randn(2, generator=random).bfloat16()
    sums = torch.randn(count, generator=random)
    ours = sums.clone()
    simd.multiply_pairs(address(a), address(b), address(ours), ctypes.c_long(count))
    exact = sums.double() + (a.double() * b.double()).sum(1)
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=0)
    if not simd.multiplies_pairs():
        one = (sums.double() + a[:, 0].double() * b[0].double()).float()
        assert torch.equal(ours, (one.double() + a[:, 1].double() * b[1].double()).float())


@pytest.mark.parametrize(
    ("name", "function", "relative"),
    [
        ("exp", np.exp, 3e-7),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), 4e-7),
        ("silu", lambda x: x / (1 + np.exp(-x)), 5e-7),
        ("tanh", np.tanh, 6e-7),
        (
            "gelu_tanh",
            lambda x: x / (1 + np.exp(-1.5957691216057308 * (x + 0.044715 * x**3))),
            2e-5,
        ),  # of x = -7: exp magnifies
        ("gelu", lambda x: 0.5 * x * torch.special.erfc(torch.from_numpy(-x / 2**0.5)).numpy(), 1e-5),
    ],
)
def test_functions_are_right_to_float32(simd: ctypes.CDLL, name: str, function: Callable, relative: float) -> None:
    x = np.concatenate([np.linspace(-80, 80, 1 << 16), np.linspace(-1, 1, 1 << 14), np.geomspace(1e-30, 1, 1 << 10)])
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        exact = function(x.astype(np.float64))
    np.testing.assert_allclose(unary(simd, name, x), exact, rtol=relative, atol=3e-37)


def test_functions_at_their_ends(simd: ctypes.CDLL) -> None:
    ends = np.resize(np.array([np.nan, np.inf, -np.inf, 200, -200, 0, -0.0, 88.72], np.float32), 16)
    exp = unary(simd, "exp", ends)[:8]
    assert np.isnan(exp[0]) and exp[1:7].tolist() == [np.inf, 0, np.inf, 0, 1, 1] and np.isfinite(exp[7])
    tanh = unary(simd, "tanh", ends)[:7]
    assert np.isnan(tanh[0]) and tanh[1:].tolist() == [1, -1, 1, -1, 0, 0] and np.signbit(tanh[6])
    sigmoid = unary(simd, "sigmoid", ends)[:7]
    assert np.isnan(sigmoid[0]) and sigmoid[1:].tolist() == [1, 0, 1, 0, 0.5, 0.5]


def test_one_number_gets_the_bits_of_a_lane(simd: ctypes.CDLL) -> None:
    x = np.linspace(-90, 90, 256, dtype=np.float32)
    assert [simd.exp_of_one(value) for value in x] == unary(simd, "exp", x).tolist()
