"""Kernels whose rows have the same bits in every batch, on a CUDA device, or else on the CPU in Triton's interpreter.

Judges: the reference attention and torch's products within rounding; the same rows in other batches bit by bit.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.attention import triton_tiles
from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, KVSpec
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.triton_backend import TritonBackend
from oarlock.workers.attention.triton_tiles import TritonPlan, fixed_span
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import read_spec
from oarlock.workers.quantization import weight_only
from oarlock.workers.quantization.fixed_order import FIXED_ORDER, FixedOrderMatmul
from oarlock.workers.quantization.matmul import ACTIVATIONS, ReadableMatmul
from oarlock.workers.runner import invariance
from oarlock.workers.runner.layer_memory import allocate_memory
from oarlock.workers.weights.source import DummyWeights
from tests.golden.tiny_models import make_tiny
from tests.interpreted_products import multiply_row_by_row
from tests.unit.workers.attention_cases import Case, Seq

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.slow
each_dtype = pytest.mark.parametrize("dtype", TYPES, ids=str)


@pytest.fixture(autouse=True)
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cuda":
        multiply_row_by_row(monkeypatch)


class Decoding(TritonBackend):
    """Backend as in a graph: plans of decodes know of contexts only that none is longer than 400."""

    def prepare(self, batch: ForwardBatch) -> TritonPlan:
        if set(batch.query_lens) != {1}:
            return super().prepare(batch)
        return self.prepare_decode(replace(batch, context_lens=[400] * batch.num_seqs))


@pytest.mark.parametrize(
    ("dtype", "group", "width", "window", "softcap", "form"),
    [
        (torch.float32, 1, 32, None, None, "auto"),
        (torch.float16, 1, 32, 66, None, "auto"),
        (torch.float32, 1, 32, None, None, "int8"),
        *(
            pytest.param(dtype, *rest, marks=pytest.mark.soak)  # seconds each in the interpreter
            for dtype in TYPES
            for rest in ((4, 64, None, None, "auto"), (3, 80, 70, None, "auto"), (2, 32, None, 20.0, "fp8"))
        ),
    ],
)
def test_attention_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, group: int, width: int, window: int | None, softcap: float | None, form: str
) -> None:
    """Alone and whole; beside another, in chunks that end within a block of keys, and decoded as in a graph."""
    span = 32 if dtype == torch.float32 else 64  # keys: one step of a tile
    spec = KVSpec(1, 1, width, 16, dtype, DEVICE, form, fixed_span=span)
    layer = AttentionSpec(0, group, 1, width, width**-0.5, window, softcap)
    case = Case(spec, layer, [Seq(span + 6, span + 6), Seq(3, 3)], sinks=window is not None)
    for scale, rows in enumerate(case.v[0]):  # of int8: each block of keys has others beside a token, and other sizes
        rows *= 0.1 * (scale % 19 + 1)
    whole = [case.seqs]
    alone = [case.run(TritonBackend(spec), whole, alone=number)[number] for number in range(2)]
    for ours, wanted in zip(alone, case.run(ReferenceBackend(spec), whole), strict=True):
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    chunks = [[Seq(5, 5), Seq(0, 0)], [Seq(span - 2, span + 3), Seq(1, 1)]]
    decodes = [[Seq(1, span + 3 + i), Seq(i > 1, i)] for i in (1, 2, 3)]
    for rows, wanted in zip(case.run(Decoding(spec), [*chunks, *decodes]), alone, strict=True):
        assert torch.equal(rows, wanted)


def test_attention_computes_tiles_in_parts_where_there_is_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KVSpec(1, 1, 32, 16, torch.float32, DEVICE, fixed_span=32)
    case = Case(spec, AttentionSpec(0, 1, 1, 32, 0.2), [Seq(34, 34), Seq(1, 20)])
    wanted = case.run(TritonBackend(spec))
    monkeypatch.setattr(triton_tiles, "_FIXED_SCRATCH", 2 * 4 * 2 * 16 * 34)  # two tiles of the longest
    backend = TritonBackend(spec)
    launched = []
    compute = TritonBackend._compute
    monkeypatch.setattr(
        TritonBackend, "_compute", lambda *args: (launched.append(len(args[5].tiles.ends)), compute(*args))
    )
    for ours, whole in zip(case.run(backend), wanted, strict=True):
        assert torch.equal(ours, whole)
    assert max(launched) == 2 and len(launched) > 2


def test_a_span_depends_only_on_the_longest_sequence() -> None:
    assert [fixed_span(tokens) for tokens in (1, 4096, 5000, 40_960, 131_072)] == [256, 256, 512, 4096, 8192]


def test_pages_of_int8_are_refused_in_float16() -> None:
    spec = KVSpec(1, 1, 32, 16, torch.float16, DEVICE, "int8", fixed_span=256)
    assert "int8 pages with float16" in (TritonBackend.why_not(spec) or "")
    for served in (replace(spec, fixed_span=None), replace(spec, dtype=torch.bfloat16)):
        assert TritonBackend.why_not(served) is None


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@each_dtype
@pytest.mark.parametrize(("columns", "inputs"), [(80, 100), (40, 1030)])
def test_products_have_the_same_bits_in_every_batch(
    columns: int, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_only, "processors", lambda device: 16)
    x, weight = noise(40, inputs, dtype=dtype), noise(columns, inputs, dtype=dtype, seed=1) / inputs**0.5
    bias, residual = noise(columns, dtype=dtype, seed=2), noise(40, columns, dtype=dtype, seed=3)
    product, wide = FixedOrderMatmul(weight, bias), FixedOrderMatmul(weight, None, float32_output=True)
    assert (product.spans > 1) == (inputs > 1000)
    exact = F.linear(x.double(), weight.double())
    bound = TOLERANCE[dtype]
    found, sums, added = product(x), wide(x), product(x, residual)
    assert found.dtype == dtype and sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), exact, atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(found.double(), exact + bias.double(), atol=bound, rtol=bound)
    torch.testing.assert_close(added.double(), exact + bias.double() + residual.double(), atol=bound, rtol=bound)
    for rows in (slice(0, 1), slice(39, 40), slice(3, 38)):
        assert torch.equal(wide(x[rows]), sums[rows]), rows
        assert torch.equal(product(x[rows], residual[rows]), added[rows]), rows
    product.rows_at_once = product.tile.rows
    assert torch.equal(product(x, residual), added)
    ids = torch.tensor([3, 1], device=DEVICE)
    assert isinstance(product, ReadableMatmul) and torch.equal(product.rows(ids), weight[ids])


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products(activation: str, dtype: torch.dtype) -> None:
    x, weight = noise(20, 96, dtype=dtype), noise(2 * 40, 96, dtype=dtype, seed=1) / 10
    product = FixedOrderMatmul(weight, None, activation=activation)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, 1)
    found = product(x)
    torch.testing.assert_close(
        found.double(), ACTIVATIONS[activation].function(gate) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert torch.equal(product(x[7:8]), found[7:8])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@torch.inference_mode()
def test_the_start_finds_a_whole_model_invariant(
    tmp_path: Path, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a step by the kernels, in every way that a start tries, which finds a product that rounds by its rows."""
    monkeypatch.setattr(invariance, "OTHERS", 3)
    path = make_tiny(tmp_path, "qwen2", num_hidden_layers=1)
    model = Decoder(read_spec(str(path)), TensorParallel.solo(), torch.float32, DEVICE, FIXED_ORDER)
    model.load(DummyWeights(0), lambda share: None)
    (spec,) = model.kv_specs(8)
    backends: dict[int, AttentionBackend] = {0: TritonBackend(replace(spec, device=DEVICE, fixed_span=32))}
    memory = allocate_memory(model, backends, [8])

    def result() -> invariance.InvarianceResult:
        return invariance.check_batch_invariance(
            model, memory, backends, num_blocks=[8], block_size=8, max_len=40, span=32, is_asked=True
        )

    found = result()
    assert found.batch_invariant and "40 tokens gave the same bits in 7 ways" in found.reason, found.reason
    real = FixedOrderMatmul._multiply
    monkeypatch.setattr(FixedOrderMatmul, "_multiply", lambda self, x: real(self, x) * (1.001 if len(x) == 4 else 1))
    found = result()
    assert not found.batch_invariant and "a prompt in chunks" in found.reason, found.reason
