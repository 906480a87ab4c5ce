"""Keys and values in 8 bits: what is stored, the same bits in every backend and at every level, and a planted fault."""

import dataclasses

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.attention.kv_format import FORMATS, ROUNDED, dequantized
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.torch_backend import TorchBackend
from tests.unit.workers.attention.test_attention import MIXED, TOLERANCE
from tests.unit.workers.attention_cases import CPP, EMULATED, Case, Seq, batch_of

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GROUP = 16  # positions
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def odd_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Rows of every size, of one number, of ties, with zeros, and with numbers that are not finite: [rows, width]."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-40, 38, 40).unsqueeze(1)
    rows = [torch.randn(40, width, generator=random) * sizes, torch.randn(40, width, generator=random)]
    ties = torch.arange(width) * 0.5 - 17
    ties[0] = 127
    rows += [ties.unsqueeze(0), torch.zeros(1, width), torch.full((1, width), -3.0), torch.full((1, width), 1e-45)]
    for bad in (torch.nan, torch.inf, -torch.inf):
        row = torch.randn(1, width, generator=random)
        row[0, width // 2] = bad
        rows.append(row)
    return torch.cat(rows).to(dtype)


@each_dtype
def test_int8_is_rounded_to_the_nearest_with_a_scale_that_is_barely_large_enough(dtype: torch.dtype) -> None:
    x = odd_rows(64, dtype)
    rows = FORMATS["int8"].rounded(x)
    assert rows.shape == (len(x), 66) and rows.dtype == torch.uint8
    values, scales = rows[:, :64].view(torch.int8).double(), rows[:, 64:].view(torch.bfloat16).squeeze(1).double()
    finite = x.isfinite().all(1)
    assert torch.equal(scales.isnan(), ~finite) and values.abs().max() <= 127
    x, values, scales = x[finite].double(), values[finite], scales[finite]
    largest = x.abs().amax(1)
    normal = largest > 127 * torch.finfo(torch.bfloat16).tiny
    assert ((scales * 127 >= largest * (1 - 1e-7)) & (scales * 127 <= largest * (1 + 2**-7) * (1 + 1e-6)))[normal].all()
    assert ((x - values * scales.unsqueeze(1)).abs() <= scales.unsqueeze(1) * 0.5000001)[normal].all()
    assert torch.equal(dequantized(FORMATS["int8"], rows)[finite].double(), (values * scales.unsqueeze(1)))


def test_fp8_is_the_nearest_number_that_there_is_and_saturates() -> None:
    kv_format = FORMATS["fp8"]
    known = torch.arange(256, dtype=torch.uint8)
    numbers = dequantized(kv_format, known)
    is_nan = numbers.isnan()
    assert int(is_nan.sum()) == 2 and torch.equal(kv_format.rounded(numbers)[~is_nan], known[~is_nan])
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 20_000)
    found = dequantized(kv_format, kv_format.rounded(x))
    nearest = (x.unsqueeze(1) - numbers[~is_nan]).abs().amin(1)
    assert torch.equal((x - found).abs(), nearest)
    beyond = dequantized(kv_format, kv_format.rounded(torch.tensor([449.0, -1e30, torch.inf, -torch.inf, torch.nan])))
    assert beyond[:2].tolist() == [448.0, -448.0] and beyond[2:].isnan().all()


def keys_of(kv: KVSpec, pages: Tensor) -> Tensor:
    """The keys in pages of the C++ backend, as the reference stores them: [blocks, block_size, heads, row]."""
    step = 2 if kv.dtype == torch.bfloat16 else 1
    groups = pages.view(len(pages), kv.num_kv_heads, -1, GROUP * kv.shape.key_bytes)
    numbers = groups[..., : GROUP * kv.head_dim].unflatten(-1, (-1, GROUP, step)).transpose(3, 4)
    return _rows(kv, numbers.flatten(4), groups)


def values_of(kv: KVSpec, pages: Tensor) -> Tensor:
    step = 2 if kv.dtype == torch.bfloat16 else 1
    groups = pages.view(len(pages), kv.num_kv_heads, -1, GROUP * kv.shape.key_bytes)
    numbers = groups[..., : GROUP * kv.head_dim].unflatten(-1, (-1, kv.head_dim, step)).transpose(4, 5)
    return _rows(kv, numbers.flatten(3, 4), groups)


def _rows(kv: KVSpec, numbers: Tensor, groups: Tensor) -> Tensor:
    """numbers [blocks, heads, groups, GROUP, D] and the scales that follow them, one or several for each position."""
    bytes_of_scale = kv.kv_format.elements(kv.head_dim) - kv.head_dim
    scales = groups[..., GROUP * kv.head_dim :]
    if bytes_of_scale:
        scales = scales.unflatten(-1, (-1, GROUP, bytes_of_scale)).transpose(-3, -2).flatten(-2)
    else:
        scales = scales.unflatten(-1, (GROUP, -1))
    return torch.cat([numbers, scales], -1).flatten(2, 3).transpose(1, 2)


@pytest.mark.parametrize("backend", [*CPP, *EMULATED])
@pytest.mark.parametrize("width", [16, 64, 112, 256])
@pytest.mark.parametrize("cache", ROUNDED)
@each_dtype
def test_pages_hold_the_bits_of_the_reference(
    backend: type[CppBackend], dtype: torch.dtype, cache: str, width: int
) -> None:
    kv = KVSpec(1, 2, width, 32, dtype, CPU, cache)
    rows = odd_rows(width, dtype)
    k = torch.stack([rows, rows.flip(0)], 1)  # [tokens, heads, D]
    v = torch.stack([rows.roll(7, 0), rows.roll(-9, 0)], 1)
    blocks = [3, 1, 4, 2][: -(-len(rows) // 32)]
    batch = batch_of(torch.tensor([blocks], dtype=torch.int32).numpy(), [Seq(len(rows), len(rows))], 32, CPU)
    padding = torch.zeros(len(batch.slots[0]) - len(rows), 2, width, dtype=dtype)
    k, v = torch.cat([k, padding]), torch.cat([v, padding])
    expected, found = (each.allocate(6)[0] for each in (ReferenceBackend(kv), backend(kv)))
    ReferenceBackend(kv).write(expected, k, v, batch)
    backend(kv).write(found, k, v, batch)
    for read, wanted, ours in ((keys_of, expected.k, found.k), (values_of, expected.v, found.v)):
        assert torch.equal(read(kv, ours)[1:], wanted[1:])


@pytest.mark.parametrize("backend", [*CPP, *EMULATED])
@pytest.mark.parametrize("cache", ["auto", *ROUNDED])
@each_dtype
def test_pages_of_keys_with_values_hold_the_bits_of_the_reference(
    backend: type[CppBackend], dtype: torch.dtype, cache: str
) -> None:
    """The elements of the value and the others have separate scales."""
    kv = KVSpec(1, 1, 96, 32, dtype, CPU, cache, value_dim=64, value_in_key=True)
    k = torch.cat([odd_rows(64, dtype), odd_rows(32, dtype).roll(5, 0)], 1).unsqueeze(1)  # [tokens, 1, D]
    blocks = [3, 1, 4, 2][: -(-len(k) // 32)]
    batch = batch_of(torch.tensor([blocks], dtype=torch.int32).numpy(), [Seq(len(k), len(k))], 32, CPU)
    k = torch.cat([k, k.new_zeros(len(batch.slots[0]) - len(k), 1, 96)])
    expected, found = (each.allocate(6)[0] for each in (ReferenceBackend(kv), backend(kv)))
    ReferenceBackend(kv).write(expected, k, None, batch)
    backend(kv).write(found, k, None, batch)
    assert found.v.nbytes == expected.v.nbytes == 0 and found.k.nbytes == expected.k.nbytes
    if cache == "auto":
        step = 2 if dtype == torch.bfloat16 else 1
        ours = found.k.view(6, 1, 2, -1, GROUP, step).transpose(3, 4).reshape(6, 32, 1, 96)
        assert torch.equal(ours[1:].view(torch.uint8), expected.k[1:].view(torch.uint8))
        return
    rows = keys_of(kv, found.k)[1:]  # [blocks, block_size, 1, elements, then all scales]
    of_part = kv.kv_format.elements(64) - 64  # bytes of a scale
    parts = rows[..., :64], rows[..., 96 : 96 + of_part], rows[..., 64:96], rows[..., 96 + of_part :]
    assert torch.equal(torch.cat(parts, -1), expected.k[1:])


class NeighboursScale(ReferenceBackend):
    """The planted fault: each key is multiplied by the scale of the token before it."""

    def attend(self, q: Tensor, kv: LayerKV, plan: list, layer: AttentionSpec, *sinks: Tensor | None) -> Tensor:
        rows = kv.k.flatten(0, 1).clone()
        rows[..., -2:] = rows[..., -2:].roll(1, 0)
        return super().attend(q, LayerKV(rows.view_as(kv.k), kv.v), plan, layer, *sinks)


@each_dtype
def test_the_scale_of_another_token_would_be_noticed(dtype: torch.dtype) -> None:
    """By the comparison with the reference, at the tolerance of each type."""
    kv = KVSpec(1, 2, 64, 16, dtype, CPU, "int8")
    case = Case(kv, AttentionSpec(0, 8, 2, 64, 0.125), MIXED)

    def agrees(backend: AttentionBackend) -> bool:
        expected, found = torch.cat(case.run(ReferenceBackend(kv))), torch.cat(case.run(backend))
        return torch.allclose(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    assert all(agrees(backend(kv)) for backend in (TorchBackend, *CPP))
    assert not agrees(NeighboursScale(kv))


@pytest.mark.parametrize("backend", [ReferenceBackend, TorchBackend, *CPP])
@pytest.mark.parametrize("cache", ROUNDED)
def test_a_number_that_is_not_finite_is_not_hidden(backend: type, cache: str) -> None:
    """It makes the results of the tokens that see it NaN, and leaves other sequences alone."""
    kv = KVSpec(1, 2, 64, 16, torch.float32, CPU, cache)
    for name in ("k", "v"):
        case = Case(kv, AttentionSpec(0, 4, 2, 64, 0.125), [Seq(40, 40), Seq(40, 40)])
        getattr(case, name)[0][20, 0, 5] = torch.inf
        bad, good = case.run(backend(kv))
        of_head = bad.view(40, 4, 64)[:, :2]  # query heads of KV head 0
        assert good.isfinite().all() and not of_head[20:, :, 5].isfinite().any()


@pytest.mark.parametrize("backend", [ReferenceBackend, TorchBackend, *CPP])
@pytest.mark.parametrize("cache", ["auto", *ROUNDED])
@pytest.mark.parametrize("element", [5, 70])
def test_a_number_of_a_latent_or_behind_it_is_not_hidden(backend: type, cache: str, element: int) -> None:
    """Likewise. If it is not part of the value, it does not reach the tokens before it either."""
    kv = KVSpec(1, 1, 80, 16, torch.bfloat16, CPU, cache, value_dim=64, value_in_key=True)
    case = Case(kv, AttentionSpec(0, 4, 1, 80, 0.125), [Seq(40, 40), Seq(40, 40)])
    case.k[0][20, 0, element] = torch.nan
    bad, good = case.run(backend(kv))
    assert good.isfinite().all() and not bad[20:].view(-1, 4, 64)[..., 5].isfinite().any()
    assert element < 64 or bad[:20].isfinite().all()


@pytest.mark.parametrize("backend", [TorchBackend, *CPP])
@pytest.mark.parametrize("cache", ["auto", *ROUNDED])
@pytest.mark.parametrize("in_key", [False, True])
def test_earlier_content_of_a_page_changes_nothing(backend: type, cache: str, in_key: bool) -> None:
    """A page of NaN is written again from its first slot on, some of it."""
    kv = KVSpec(1, 2, 64, 32, torch.bfloat16, CPU, cache, value_dim=48 if in_key else 64, value_in_key=in_key)
    case = Case(kv, AttentionSpec(0, 4, 2, 64, 0.125), [Seq(1, 21)])
    steps = [[Seq(n, end)] for n, end in ((5, 5), (15, 20), (1, 21))]
    whole = torch.cat(case.run(backend(kv), steps))  # pages are full of NaN before
    assert whole.isfinite().all()
    fresh, ours = backend(kv), []
    pages = fresh.allocate(case.num_blocks)[0]
    for step in steps:
        ours += case._step(fresh, pages, case.tables, step, [0])
    assert torch.equal(torch.cat(ours), whole)


@pytest.mark.parametrize("backend", CPP)
@pytest.mark.parametrize("cache", ROUNDED)
def test_every_number_of_ranks_has_the_same_bits(backend: type[CppBackend], cache: str) -> None:
    """A rank computes some of the heads; each has scales of its own."""
    whole = KVSpec(1, 4, 64, 16, torch.bfloat16, CPU, cache)
    case = Case(whole, AttentionSpec(0, 12, 4, 64, 0.125), MIXED)
    together = [rows.unflatten(1, (12, 64)) for rows in case.run(backend(whole))]
    for size in (2, 4):
        heads, kv_heads = 12 // size, 4 // size
        part = dataclasses.replace(whole, num_kv_heads=kv_heads)
        for rank in range(size):
            ours = Case(part, AttentionSpec(0, heads, kv_heads, 64, 0.125), MIXED)
            ours.k, ours.v = ([x[:, rank * kv_heads :][:, :kv_heads] for x in xs] for xs in (case.k, case.v))
            ours.q = [x[:, rank * heads :][:, :heads] for x in case.q]
            for found, wanted in zip(ours.run(backend(part)), together, strict=True):
                assert torch.equal(found, wanted[:, rank * heads :][:, :heads].flatten(1))
