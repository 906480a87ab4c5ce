"""Latent attention in the Triton kernels against the reference: values inside keys, heads divided among tiles.

On a CUDA device, or else on the CPU in Triton's interpreter.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.kv_format import ROUNDED
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.selector import choose
from oarlock.workers.attention.triton_latent import LatentTritonBackend
from oarlock.workers.attention.triton_tiles import TritonPlan
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.head_matmul import HeadMatmul
from oarlock.workers.layers.rotary import rotate_neighbours, rotate_with_torch
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.quantization.fixed_order import FIXED_ORDER, FixedOrderHeadMatmul
from tests.interpreted_products import multiply_row_by_row
from tests.unit.workers.attention.test_kv_format import odd_rows
from tests.unit.workers.attention_cases import Case, Seq, batch_of
from tests.unit.workers.kernels.triton.test_triton_attention import (
    DEVICE,
    SLOWLY_INTERPRETED,
    SOAK,
    TOLERANCE,
    TYPES,
)
from tests.unit.workers.kernels.triton.triton_resources import of_program
from tests.unit.workers.layers.test_latent_attention import MODELS, fed, loaded, model_of, weights_of
from tests.unit.workers.weights_in_memory import MemoryWeights

KINDS = ("80", "89", "90", "100", "120")

pytestmark = [
    pytest.mark.slow,
    # Of the interpreter, where values of one type are converted to another that cannot hold them.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def specs(
    heads: int, rank: int, others: int, dtype: torch.dtype = torch.float32, cache: str = "auto", block: int = 16
) -> tuple[KVSpec, AttentionSpec]:
    width = rank + others
    spec = KVSpec(1, 1, width, block, dtype, DEVICE, cache, value_dim=rank, value_in_key=True)
    return spec, AttentionSpec(0, heads, 1, width, 0.5 * width**-0.5)


class Live(LatentTritonBackend):
    """Backend as in graphs: plans know of contexts only that none is longer than 400, and of prompts their number."""

    def prepare(self, batch: ForwardBatch) -> TritonPlan:
        bounds = replace(batch, context_lens=[400] * batch.num_seqs)
        prompts = sum(length > 1 for length in batch.query_lens)
        return self.prepare_prompts(bounds, prompts) if prompts else self.prepare_decode(bounds)


def backend_of(spec: KVSpec, processors: int, kind: type[LatentTritonBackend] = LatentTritonBackend) -> Live:
    backend = kind(spec)
    backend.processors, backend.least_span = processors, 64
    return backend


@pytest.mark.parametrize(
    ("heads", "rank", "others", "block", "dtype", "cache", "processors", "kind"),
    [
        (18, 32, 8, 16, torch.float32, "auto", 16, LatentTritonBackend),
        (20, 48, 16, 32, torch.float16, "auto", 16, Live),
        (6, 64, 24, 8, torch.float16, "int8", 1, Live),
        pytest.param(34, 32, 16, 16, torch.float32, "int8", 4, LatentTritonBackend, marks=SOAK),
        pytest.param(5, 32, 4, 16, torch.float16, "fp8", 16, LatentTritonBackend, marks=SOAK),
        # Widths of published models.
        pytest.param(3, 512, 64, 16, torch.float32, "fp8", 4, Live, marks=SLOWLY_INTERPRETED),
        pytest.param(16, 512, 64, 16, torch.float16, "auto", 4, LatentTritonBackend, marks=SLOWLY_INTERPRETED),
        pytest.param(128, 512, 64, 16, torch.float16, "auto", 1, Live, marks=SLOWLY_INTERPRETED),
        pytest.param(64, 256, 32, 16, torch.float16, "int8", 4, Live, marks=SLOWLY_INTERPRETED),
    ],
)
def test_it_agrees_with_the_reference(heads, rank, others, block, dtype, cache, processors, kind):
    """Heads that fit into a tile and heads that do not, padded widths, spans that are merged, and plans of graphs."""
    for each in (dtype, torch.bfloat16) if DEVICE.type == "cuda" else [dtype]:
        spec, layer = specs(heads, rank, others, each, cache, block)
        case = Case(spec, layer, [Seq(1, 1), Seq(3, 3), Seq(1, 140)])
        backends = backend_of(spec, processors, kind), ReferenceBackend(spec)
        found = (case.run(backend, attends_earlier=False) for backend in backends)
        for ours, wanted in zip(*found, strict=True):
            torch.testing.assert_close(ours, wanted, atol=TOLERANCE[each], rtol=TOLERANCE[each])


def test_large_tiles_agree_with_the_reference():
    """Tiles of 64 rows for devices that read operands from shared memory."""
    spec, layer = specs(20, 32, 8, torch.float16)
    backend = backend_of(spec, 4)
    backend.is_wide = True
    case = Case(spec, layer, [Seq(1, 70), Seq(4, 4)])
    for ours, wanted in zip(case.run(backend), case.run(ReferenceBackend(spec)), strict=True):
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE[spec.dtype], rtol=TOLERANCE[spec.dtype])


@pytest.mark.parametrize(
    ("heads", "dtype", "cache"),
    [
        (2, torch.float32, "auto"),
        pytest.param(20, torch.float16, "fp8", marks=SLOWLY_INTERPRETED),
        pytest.param(3, torch.float32, "int8", marks=SLOWLY_INTERPRETED),
    ],
)
def test_a_row_has_the_same_bits_in_every_batch(
    heads: int, dtype: torch.dtype, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and whole; with another, in chunks that end within a block of keys, and decoded as in a graph."""
    if DEVICE.type != "cuda":
        multiply_row_by_row(monkeypatch)
    spec, layer = specs(heads, 32, 8, dtype, cache)
    spec = replace(spec, fixed_span=32)
    case = Case(spec, layer, [Seq(36, 36), Seq(3, 3)])
    for scale, rows in enumerate(case.k[0]):  # the rows of a block have other sizes each
        rows *= 0.1 * (scale % 19 + 1)
    whole = [case.seqs]
    alone = [case.run(LatentTritonBackend(spec), whole, alone=number)[number] for number in range(2)]
    for ours, wanted in zip(alone, case.run(ReferenceBackend(spec), whole), strict=True):
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    chunks = [[Seq(5, 5), Seq(0, 0)], [Seq(29, 34), Seq(1, 1)]]
    decodes = [[Seq(1, 34 + i), Seq(1, 1 + i)] for i in (1, 2)]

    class Decoding(LatentTritonBackend):
        def prepare(self, batch: ForwardBatch) -> TritonPlan:
            return super().prepare(batch) if max(batch.query_lens) > 1 else Live.prepare(self, batch)

    for rows, wanted in zip(case.run(Decoding(spec), [*chunks, *decodes]), alone, strict=True):
        assert torch.equal(rows, wanted)


def stored(spec: KVSpec, pages: Tensor) -> Tensor:
    """The rows of pages as the reference stores them: [blocks, block_size, 1, elements of a row]."""
    width, size = spec.head_dim, spec.block_size
    rows = pages[..., : size * width].unflatten(-1, (size, width))
    if spec.cache_dtype != "int8":
        return rows.transpose(1, 2)
    scales = pages[..., size * width :].unflatten(-1, (2, size, 2))
    parts = rows[..., : spec.value_width], scales[:, :, 0], rows[..., spec.value_width :], scales[:, :, 1]
    return torch.cat(parts, -1).transpose(1, 2)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("cache", ["auto", *ROUNDED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_pages_hold_the_bits_of_the_reference(dtype: torch.dtype, cache: str) -> None:
    """Latents and other elements of different sizes, some of which are not finite."""
    spec, _ = specs(1, 48, 16, dtype, cache)
    rows = odd_rows(64, dtype)
    rows = torch.cat([rows[:60:5], rows[-9:]]).to(DEVICE)
    count = len(rows)
    rows = torch.cat([rows[:, :48], rows.roll(7, 0)[:, 48:]], 1).unsqueeze(1)
    batch = batch_of(np.array([[3, 1]], np.int32), [Seq(count, count)], 16, DEVICE)
    backends = ReferenceBackend(spec), LatentTritonBackend(spec)
    expected, found = (backend.allocate(4)[0] for backend in backends)
    for backend, kv in zip(backends, (expected, found), strict=True):
        backend.write(kv, rows, None, batch)
    assert found.k.nbytes == 4 * spec.bytes_per_block and found.v.nbytes == 0
    assert same_bits(stored(spec, found.k)[1:], expected.k[1:])


@pytest.mark.parametrize(("cache", "rotary", "neighbours"), [("auto", 12, True), ("int8", 8, False), ("fp8", 0, False)])
def test_rows_are_normed_rotated_and_written_as_by_separate_operations(
    cache: str, rotary: int, neighbours: bool
) -> None:
    spec, _ = specs(3, 48, 12, torch.float16, cache)
    random = torch.Generator().manual_seed(1)
    q, mixed = (torch.randn(shape, generator=random).to(DEVICE, spec.dtype) for shape in ((7, 3, 28), (7, 70)))
    rows, weight = mixed[:, 3:63], torch.randn(48, generator=random).to(DEVICE) + 1.0  # parts of wider rows
    angles = None
    both = torch.cat((q[:, :, 16:], rows[:, None, 48:]), 1)
    if rotary:
        halves = torch.randn(7, 1, rotary // 2, generator=random).to(DEVICE)
        angles = torch.cat((halves.cos(),) * 2, -1), torch.cat((-halves.sin(), halves.sin()), -1)
        both = (rotate_neighbours if neighbours else rotate_with_torch)(both, *angles, spec.dtype)
    latents = F.rms_norm(rows[:, :48].float(), (48,), weight, 1e-5).to(spec.dtype)
    batch = batch_of(np.array([[3, 1]], np.int32), [Seq(7, 20)], 16, DEVICE)
    backend = LatentTritonBackend(spec)
    expected, found = backend.allocate(4)[0], backend.allocate(4)[0]
    backend.write(expected, torch.cat((latents, both[:, 3]), 1).unsqueeze(1), None, batch)
    queries = backend.norm_rotate_and_write(found, q, rows, (weight, 1e-5), angles, batch, pairs_neighbours=neighbours)
    torch.testing.assert_close(queries[:, :, 48:], both[:, :3], atol=2e-3, rtol=2e-3)
    ours, wanted = (spec.key_format.dequantized(stored(spec, kv.k)) for kv in (found, expected))
    bound = {"auto": 2e-3, "int8": 4e-2, "fp8": 7e-2}[cache]  # one step of a stored value
    torch.testing.assert_close(ours, wanted, atol=bound, rtol=bound)
    assert ours.count_nonzero() > 400 and not ours[[0, 2]].any()
    if cache == "auto":
        assert torch.equal(backend.stored_keys(found, batch).float(), ours.flatten(0, 1)[batch.slots[0]])


@pytest.mark.parametrize("name", ["neighbours", pytest.param("without rotation", marks=SOAK)])
def test_a_model_computes_with_the_kernels_as_with_the_reference(
    name: str, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Projections, matmuls of heads in one order, and attention: of a whole model, in chunks."""
    if DEVICE.type != "cuda":
        multiply_row_by_row(monkeypatch)
    attention = MODELS["neighbours"]
    spec = model_of(attention if name == "neighbours" else replace(attention, rope=None))
    model = Decoder(spec, TensorParallel.solo(), torch.float32, DEVICE, FIXED_ORDER)
    model.load(MemoryWeights(weights_of(spec)), lambda share: None)
    assert isinstance(model.layers[0].attention.matrices.keys, FixedOrderHeadMatmul)
    found = fed(model, LatentTritonBackend, [7, 8])
    expected = fed(loaded(spec, TensorParallel.solo(), device=DEVICE), ReferenceBackend, [7, 8])
    torch.testing.assert_close(found, expected, atol=4e-6 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_matmuls_of_heads_have_the_same_bits_in_every_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts of wider rows, into parts of wider rows."""
    if DEVICE.type != "cuda":
        multiply_row_by_row(monkeypatch)
    random = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=random).to(DEVICE, dtype) for shape in ((40, 3, 110), (3, 80, 100)))
    product, wide = FixedOrderHeadMatmul(weight), torch.zeros(40, 3, 90, dtype=dtype, device=DEVICE)
    found = product(x[..., 10:], out=wide[..., :80])
    exact = torch.einsum("thk,hnk->thn", x[..., 10:].double(), weight.double())
    torch.testing.assert_close(found.double(), exact, atol=10 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not wide[..., 80:].any()
    for rows in (slice(0, 1), slice(3, 38)):
        assert torch.equal(product(x[rows, :, 10:]), found[rows])
    torch.testing.assert_close(HeadMatmul(weight)(x[..., 10:], out=wide[..., :80]), found, atol=4e-2, rtol=4e-3)


def test_it_is_chosen_by_the_name_of_the_other_backend_in_triton() -> None:
    spec, _ = specs(2, 32, 8)
    assert isinstance(choose(spec, "triton", lambda line: None), LatentTritonBackend)
    for refused, word in (
        (replace(spec, value_dim=40), "512 + 64"),
        (replace(spec, head_dim=592, value_dim=528), "512 + 64"),
        (replace(spec, num_kv_heads=2), "one row"),
        (replace(spec, dtype=torch.float16, cache_dtype="int8", fixed_span=256), "float16"),
    ):
        assert word in (LatentTritonBackend.why_not(refused) or "")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SOAK) for kind in KINDS])
def test_kernels_fit_every_kind_of_device(kind: str) -> None:
    """Compiled for each, without a device: shared memory and registers suffice, so that none are spilled."""
    found = of_program("latent_resources", kind)
    waiting = {name for name, taken in found.items() if taken["waits"]}
    # Rows and block tables are copied ahead, except in float32; scales of int8 rows, and results to merge, are not.
    assert all("attend 32" in name or "int8" in name or "merge" in name for name in waiting), waiting
