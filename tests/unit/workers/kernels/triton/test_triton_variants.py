"""Kernels are compiled before requests wait: steps of every kind launch no variant that a start has not launched.

Triton compiles a kernel anew for each set of constants, types, integers that are 1 or that 16 divides, and addresses
that 16 divides. Launches are only noted here.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.interpreter import InterpretedFunction

from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.attention.triton_backend import TritonBackend
from oarlock.workers.attention.triton_latent import LatentTritonBackend
from oarlock.workers.quantization.expert_weights import ExpertsShape, ExpertWeights
from oarlock.workers.quantization.fixed_order import FixedOrderHeadMatmul, FixedOrderMatmul
from oarlock.workers.quantization.int8 import Int8Weight
from oarlock.workers.quantization.triton_experts import TritonExpertMatmul
from oarlock.workers.recurrent import triton_operations as operations
from oarlock.workers.runner.graph_capture import warm_up_sizes
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from tests.unit.workers.state_steps import state_step_of

CPU = torch.device("cpu")
MOST = 2048  # tokens of a step

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are noted in Triton's interpreter")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple]:
    """The variants that have been launched; nothing is computed."""
    found: set[tuple] = set()

    def run(function: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.add(variant(function, args, kwargs))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


def variant(function: InterpretedFunction, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Kernel of a launch, and what Triton compiles it for."""
    plain, unaligned = (function.kwargs.get(f"do_not_specialize{rest}") or () for rest in ("", "_on_alignment"))
    annotations = function.fn.__annotations__
    key: list[Any] = [function.fn.__name__]
    for name, value in {**dict(zip(function.arg_names, args, strict=False)), **kwargs}.items():
        if isinstance(value, torch.Tensor):
            key.append((name, value.dtype, name in unaligned or value.data_ptr() % 16 == 0))
        elif isinstance(value, float) and name not in annotations:
            key.append((name, "float"))
        elif isinstance(value, int) and name in function.arg_names and "constexpr" not in str(annotations.get(name)):
            key.append((name, value.bit_length() > 31, None if name in plain else (value == 1, value % 16 == 0)))
        else:
            key.append((name, value))
    return tuple(key)


def check_variants(step: Callable[..., None], launched: set[tuple], rounds: int) -> None:
    """Check that steps of attention launch no other variants than the steps of the warm-up.

    `step` runs a step of sequences, each (query length, context), whose contexts a graph's plan bounds if a bound is
    given.
    """
    for tokens in warm_up_sizes(MOST):
        step([(tokens, tokens)])
    for bucket in (1, 8):
        step([(1, 1)] * bucket, 4096)
    warm = set(launched)
    draw = random.Random(1)
    for _ in range(rounds):
        seqs = []
        for _ in range(draw.choice([1, 2, 3, 7])):
            context = draw.choice([1, 3, 16, 17, 100, 4000])
            seqs.append((draw.choice([1, 1, min(5, context), min(context, 600)]), context))
        step(seqs)
        step([(1, context) for _, context in seqs], draw.choice([4096, 4097]))
    assert launched == warm, sorted(map(str, launched - warm))


@pytest.mark.parametrize("fixed", [None, 256])
@pytest.mark.parametrize("form", ["auto", "int8"])
def test_attention(form: str, fixed: int | None, launched: set[tuple]) -> None:
    spec = KVSpec(2, 2, 64, 16, torch.float32 if fixed else torch.float16, CPU, form, fixed)
    layers = [AttentionSpec(0, 8, 2, 64, 0.1), AttentionSpec(1, 8, 2, 64, 0.1, 100)]
    backend = TritonBackend(spec)
    backend.processors = 132
    pages, tables = backend.allocate(2), BlockTables(64, 300, 16, CPU)

    def step(seqs: list[tuple[int, int]], bound: int | None = None) -> None:
        chunks = [SequenceChunk([0] * query, context - query, [0] * -(-context // 16)) for query, context in seqs]
        made = greedy_step(chunks, 16, step_id=1)
        tables.write(made)
        batch = ForwardBatch.from_step(made, tables)
        if bound is not None:
            batch.context_lens = [bound] * len(seqs)
        plan = backend.prepare(batch) if bound is None else backend.prepare_decode(batch)
        tokens = len(batch.token_ids)
        for layer, kv in zip(layers, pages, strict=True):
            qkv = torch.empty(tokens, 12, 64, dtype=spec.dtype)
            q = backend.rotate_and_write(kv, qkv, None, *[torch.empty(tokens, 1, 64)] * 2, batch)
            backend.write(kv, qkv[:, 8:10], qkv[:, 10:], batch)
            backend.attend(q, kv, plan, layer, torch.empty(8) if layer.sliding_window else None)

    check_variants(step, launched, 60)


@pytest.mark.parametrize("heads", [3, 40])
def test_latent_attention(heads: int, launched: set[tuple]) -> None:
    """Heads in two groups and in one, in plans of graphs and others; queries are views of projected rows."""
    spec = KVSpec(1, 1, 576, 16, torch.float16, CPU, "int8", value_dim=512, value_in_key=True)
    layer, backend = AttentionSpec(0, heads, 1, 576, 0.1), LatentTritonBackend(spec)
    backend.processors = 132
    (pages,), tables, norm = backend.allocate(2), BlockTables(64, 300, 16, CPU), (torch.empty(512), 1e-6)
    of_heads = FixedOrderHeadMatmul(torch.zeros(heads, 512, 128, dtype=spec.dtype))

    def step(seqs: list[tuple[int, int]], bound: int | None = None) -> None:
        chunks = [SequenceChunk([0] * query, context - query, [0] * -(-context // 16)) for query, context in seqs]
        made = greedy_step(chunks, 16, step_id=1)
        tables.write(made)
        batch = ForwardBatch.from_step(made, tables)
        if bound is not None:
            batch.context_lens = [bound] * len(seqs)
        plan = backend.prepare(batch) if bound is None else backend.prepare_decode(batch)
        tokens = len(batch.token_ids)
        q, rows = (torch.empty(tokens, *shape, dtype=spec.dtype) for shape in ((heads, 192), (576,)))
        angles = torch.empty(tokens, 1, 64), torch.empty(tokens, 1, 64)
        queries = backend.norm_rotate_and_write(pages, q, rows, norm, angles, batch, pairs_neighbours=True)
        of_heads(q[..., :128], out=queries[..., :512])
        backend.write(pages, rows.unsqueeze(1), None, batch)
        backend.attend(queries, pages, plan, layer)

    check_variants(step, launched, 30)


def test_recurrent_operations(launched: set[tuple]) -> None:
    """Heads in numbers that 4 does not divide, as views of projected rows; the view of one row has another stride."""
    widths = {"q": 5 * 12, "k": 5 * 12, "v": 10 * 20, "b": 2 * 16, "c": 2 * 16, "dt": 10}
    of_rule, of_mamba = torch.zeros(3, 10, 12, 20), torch.zeros(3, 10, 20, 16)
    of_convolution = torch.zeros(3, sum(widths.values()), 3)
    of_heads, weight = torch.zeros(10), torch.zeros(10, 20)
    of_kimi, of_channels = torch.zeros(3, 5, 12, 12), torch.zeros(5, 12)

    def step(tokens: int) -> None:
        slots, rows = state_step_of([tokens], [0], [1]), torch.zeros(tokens, sum(widths.values()))
        rows = operations.causal_convolution(
            rows, of_convolution, torch.zeros(rows.shape[1], 4), None, slots, silu=True
        )
        parts = dict(zip(widths, rows.split(list(widths.values()), 1), strict=True))
        q, k, b, c = (parts[name].unflatten(1, (heads, -1)) for name, heads in (("q", 5), ("k", 5), ("b", 2), ("c", 2)))
        v = parts["v"].unflatten(1, (10, -1))
        gates = operations.delta_gates(parts["dt"], parts["dt"], of_heads, of_heads)
        operations.gated_norm(
            operations.gated_delta_rule(q, k, v, *gates, of_rule, slots), v, weight, 1e-5, gates_first=False
        )
        decays = operations.kimi_gates(q, parts["dt"][:, :5], of_heads[:5], of_channels, lower_bound=-5.0)
        mixed = operations.gated_delta_rule(q, q, k, *decays, of_kimi, slots)
        operations.gated_norm(mixed, k, weight[:5, :12].contiguous(), 1e-5, gates_first=False, sigmoid=True)
        steps = operations.mamba_steps(parts["dt"], of_heads, 0.0, 1.0)
        mixed = operations.mamba2(v, steps, of_heads, b, c, of_heads, of_mamba, slots)
        operations.silu_gate(mixed, v)
        squares = operations.gated_squares(mixed, v, gates_first=True).unflatten(1, (2, 5))
        operations.gated_norm_of_heads(mixed, v, squares, weight, 1e-5, gates_first=True)

    for tokens in warm_up_sizes(MOST):
        step(tokens)
    warm = set(launched)
    for tokens in (1, 3, 5, 15, 16, 17, 33, 257, 600):
        step(tokens)
    assert launched == warm, sorted(map(str, launched - warm))


def test_products(launched: set[tuple]) -> None:
    int8 = Int8Weight(torch.zeros(64, 96, dtype=torch.int8), torch.ones(64), torch.float16).on(CPU)
    products = [int8.matmul(), int8.gated_matmul(None, "silu"), FixedOrderMatmul(torch.zeros(64, 96).half(), None)]

    def step(tokens: int) -> None:
        for product in products:
            product(torch.zeros(tokens, 96, dtype=torch.float16))

    for tokens in warm_up_sizes(MOST):
        step(tokens)
    warm = set(launched)
    for tokens in (1, 3, 15, 16, 17, 33, 64, 65, 100, 129, 200, 256, 257, 600):
        step(tokens)
    assert launched == warm, sorted(map(str, launched - warm))


def test_experts(launched: set[tuple]) -> None:
    weights = [torch.zeros(rows, columns, dtype=torch.int8) for rows, columns in ((64, 96), (96, 32))]
    gate_up, down = (Int8Weight(part, torch.ones(len(part)), torch.float16).on(CPU) for part in weights)
    experts = TritonExpertMatmul(ExpertsShape(0, 8, 96, 32, torch.float16), [ExpertWeights(gate_up, down)] * 8)

    def step(tokens: int) -> None:
        experts(torch.zeros(tokens, 96).half(), torch.zeros(tokens, 3, dtype=torch.int32), torch.zeros(tokens, 3))

    for tokens in warm_up_sizes(MOST):
        step(tokens)
    warm = set(launched)
    for tokens in (1, 2, 5, 16, 33, 48, 150, 171, 300, 400, 1999):
        step(tokens)
    assert launched == warm, sorted(map(str, launched - warm))
