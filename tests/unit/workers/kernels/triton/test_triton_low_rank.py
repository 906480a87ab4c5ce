"""Layers with adapters by Triton kernels, on a CUDA device, or else on the CPU in Triton's interpreter.

References: merged weights in float64 within rounding; the same rows in other batches, and rows of the layer without
adapters, bit by bit.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.attention.blocks_by_slot import BLOCK_ROWS, UNUSED, BlocksBySlot, num_blocks, write_blocks
from oarlock.workers.attention.rows_by_slot import StepRows
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_shard
from oarlock.workers.layers.linear import (
    ColumnParallelLinear,
    GatedParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from oarlock.workers.layers.placement import Placement
from oarlock.workers.lora.adapter_slots import _attach_kernels, _of_tokens
from oarlock.workers.lora.device_pairs import DevicePairs
from oarlock.workers.lora.low_rank import RankPair
from oarlock.workers.quantization.fixed_order import FIXED_ORDER
from oarlock.workers.quantization.method import StoredRows, WeightShard
from oarlock.workers.quantization.registry import NONE
from tests.golden.interpreter_lock import one_kernel_at_a_time
from tests.golden.paged_run import on_ranks
from tests.interpreted_products import multiply_row_by_row
from tests.unit.workers.kernels.triton.triton_resources import of_program
from tests.unit.workers.weights_in_memory import MemoryWeights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float16, *((torch.bfloat16, torch.float32) if DEVICE.type == "cuda" else ())]  # float32 takes longer
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
INPUTS, LONG, MAX_RANK, SLOTS = 96, 1100, 9, 3  # rows of LONG are cut into spans
IDS = 136
RANKS = {1: 9, 2: 3}  # the adapter in slot 3 updates other layers only
SLOT_OF = np.array([1, 0, 2, 2, 3, *([1] * 33), 0, 2, 0], np.int32)  # a block of slot 1, and one more row

KINDS: dict[str, Callable[[Placement], Any]] = {
    "qkv": lambda place: QKVParallelLinear("m", INPUTS, 20, 4, 2, True, place),
    "gated": lambda place: GatedParallelLinear("m", INPUTS, 72, True, "silu", place),
    "activated": lambda place: _columns(place, bias=True, activation="gelu_tanh"),
    "float": lambda place: _columns(place, bias=False),
    "sum": lambda place: RowParallelLinear("m.down", LONG, 72, True, place),
    "head": lambda place: VocabParallelHead("lm_head", IDS - 5, INPUTS, place),
    "embedding": lambda place: VocabParallelEmbedding("embed_tokens", IDS, 72, place, 2.0),
}


def _columns(place: Placement, *, bias: bool, **more: Any) -> ColumnParallelLinear:
    parts = tuple(StoredRows(f"m.{part}", 72, 0, 72) for part in ("one", "two"))
    return ColumnParallelLinear(parts, INPUTS, bias, place, **more)


class Case:
    """A layer of one rank with pairs in slots, and its results computed exactly."""

    def __init__(self, kind: str, tp: TensorParallel, dtype: torch.dtype, formats: Any) -> None:
        draw = torch.Generator().manual_seed(len(kind))
        place = Placement(tp, dtype, DEVICE, formats)
        self.kind, self.layer, self.step = kind, KINDS[kind](place), StepRows()
        self.whole = KINDS[kind](replace(place, tp=TensorParallel.solo()))

        def drawn(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=draw) * size).to(dtype)

        shard, own = self._shard(self.whole), self._shard(self.layer)
        inputs = shard.inputs
        if kind == "embedding":
            names = {"embed_tokens": IDS}
            self.tensors = {"embed_tokens.weight": drawn(IDS, 72)}
        else:
            names = {part.name: part.rows for part in shard.parts}
            self.tensors = {f"{name}.weight": drawn(rows, inputs, size=inputs**-0.5) for name, rows in names.items()}
            self.tensors |= {f"{name}.bias": drawn(rows) for name, rows in names.items()}
        self.layer.load(MemoryWeights(self.tensors))
        self.pairs = DevicePairs(own, SLOTS, MAX_RANK, place)
        size = 1.0 if kind == "embedding" else inputs**-0.5
        self.updates = torch.zeros((SLOTS + 1, shard.rows, inputs), dtype=torch.float64)
        for slot, rank in RANKS.items():
            held, first = [], 0
            for number, (part, local) in enumerate(zip(shard.parts, own.parts, strict=True)):
                a, b = drawn(max(1, rank - number), inputs, size=size), drawn(max(1, rank - number), part.rows)
                scale = 0.3 + number + 0.4 * slot
                if number != 1 or slot != 2:  # the second adapter leaves out one part of a fused layer
                    columns = slice(own.first_input, own.first_input + own.local_inputs)
                    rows = slice(local.first, local.first + local.count)
                    held.append(RankPair(number, scale, a[:, columns].contiguous(), b[:, rows].contiguous()))
                    self.updates[slot, first : first + part.rows] = scale * b.double().T @ a.double()
                first += part.rows
            self.pairs.put(slot, held)
        count = len(SLOT_OF)
        self.ids = torch.arange(count) * 17 % IDS
        self.x = self.ids.to(DEVICE) if kind == "embedding" else drawn(count, inputs).to(DEVICE)
        self.residual = drawn(count, shard.rows).to(DEVICE)
        self.columns = slice(own.first_input, own.first_input + own.local_inputs) if kind == "sum" else slice(None)
        _attach_kernels(self.layer, self.pairs, self.step)

    def _shard(self, layer: Any) -> WeightShard:
        if isinstance(layer, VocabParallelHead):
            return vocab_shard(layer)
        return _of_tokens(layer) if isinstance(layer, VocabParallelEmbedding) else layer.weight_shard

    def run(self, rows: slice = slice(None), *, adapts: bool = True, unrounded: bool = False) -> Tensor:
        """The layer's results for some rows of the step."""
        blocks = BlocksBySlot.of(SLOT_OF[rows], DEVICE) if adapts else None
        with nullcontext() if blocks is None else self.step.of(blocks):
            if self.kind == "embedding":
                return self.layer(self.x[rows])
            if self.kind == "head":
                return self.layer(self.x[rows], blocks)
            x = self.x[rows, self.columns]
            if self.kind == "sum":
                return self.layer.unrounded(x) if unrounded else self.layer(x, self.residual[rows])
            return self.layer(x)

    @property
    def exact(self) -> Tensor:
        """Results of the whole layer with merged weights: float64 [T, outputs]."""
        slot_of = torch.from_numpy(SLOT_OF).long()
        if self.kind == "embedding":
            updates = self.updates[slot_of, :, self.ids]
            return 2.0 * (self.tensors["embed_tokens.weight"].double()[self.ids] + updates)
        parts = self._shard(self.whole).parts
        weight = torch.cat([self.tensors[f"{part.name}.weight"] for part in parts]).double()
        x = self.x.double().cpu()
        sums = x @ weight.T + torch.einsum("ti,toi->to", x, self.updates[slot_of])
        if self.kind not in ("float", "head"):
            sums += torch.cat([self.tensors[f"{part.name}.bias"] for part in parts]).double()
        if self.kind == "gated":
            return F.silu(sums.chunk(2, 1)[0]) * sums.chunk(2, 1)[1]
        if self.kind == "activated":
            return F.gelu(sums, approximate="tanh")
        return sums + self.residual.double().cpu() if self.kind == "sum" else sums


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch, as_on_cuda: None) -> None:
    if DEVICE.type != "cuda":
        multiply_row_by_row(monkeypatch)
        one_kernel_at_a_time(monkeypatch)


CASES = [(kind, dtype, FIXED_ORDER, 1) for kind in KINDS for dtype in TYPES]
CASES += [("qkv", torch.float32, NONE, 1), *((kind, TYPES[0], NONE, 1) for kind in ("gated", "sum"))]
CASES += [(kind, TYPES[0], FIXED_ORDER, 2) for kind in ("sum", "embedding")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "formats", "size"), CASES)
def test_layers_match_merged_weights_in_every_batch(kind: str, dtype: torch.dtype, formats: Any, size: int) -> None:
    def work(tp: TensorParallel) -> None:
        case = Case(kind, tp, dtype, formats)
        found, exact = case.run(), case.exact
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(found.double().cpu(), exact[:, : found.shape[1]], atol=bound, rtol=bound)
        if formats is not FIXED_ORDER:
            return
        plain, theirs = case.run(adapts=False), torch.from_numpy(np.isin(SLOT_OF, list(RANKS)))
        assert torch.equal(found[~theirs], plain[~theirs]) and not torch.equal(found[theirs], plain[theirs])
        for rows in (slice(1, 3), slice(36, None)):
            assert torch.equal(case.run(rows), found[rows]), rows
        if kind == "head":  # logits are computed some rows at a time
            blocks = BlocksBySlot.of(SLOT_OF, DEVICE)
            assert blocks is not None and torch.equal(case.layer(case.x[36:], blocks.from_row(36)), found[36:])
        if kind == "sum":
            own, total = case.run(unrounded=True), case.run(adapts=False, unrounded=True)
            assert own.dtype == total.dtype and torch.equal(own[~theirs], total[~theirs])
            sums = own.double() + case.residual.double()
            torch.testing.assert_close(sums.cpu(), exact, atol=2 * bound, rtol=bound)
        for slot in RANKS:
            case.pairs.put(slot, ())
        assert torch.equal(case.run(), plain), "an adapter is used after it was removed"

    on_ranks(size, work)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_hold_every_row_once(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for count, num_slots in ((1, 8), (2, 1), (31, 3), (33, 2), (200, 8)):
        slot_of = draw.integers(0, num_slots + 1, count).astype(np.int32) if seed else np.full(count, num_slots)
        blocks = num_blocks(count, num_slots)
        order, slots = np.full(blocks * BLOCK_ROWS, 77, np.int32), np.full(blocks, 77, np.int32)
        write_blocks(slot_of, order, slots)
        assert sorted(order[order >= 0]) == list(range(count))
        for rows, slot in zip(order.reshape(-1, BLOCK_ROWS), slots, strict=True):
            own = rows[rows >= 0]
            assert (len(own) == 0) == (slot == UNUSED) and (slot_of[own] == slot).all() and (np.diff(own) > 0).all()


def test_a_slot_is_filled_whose_memory_was_taken_in_inference_mode() -> None:
    place = Placement(TensorParallel.solo(), torch.float16, DEVICE, NONE)
    with torch.inference_mode():
        pairs = DevicePairs(WeightShard((StoredRows("m", 8, 0, 8),), 16, 0, 16), SLOTS, MAX_RANK, place)
    pairs.put(2, [RankPair(0, 1.0, torch.ones(4, 16).half(), torch.ones(4, 8).half())])
    assert pairs.device_ranks.tolist() == [0, 4, 0]


@pytest.mark.slow
def test_kernels_fit_the_smallest_device() -> None:
    """Compiled for it, without a device. The interpreter accepts kernels that no compiler does."""
    assert len(of_program("low_rank_resources", "usual", "89")) == 4


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_kernels_fit_every_kind_of_device() -> None:
    """Compiled for each, without a device: shared memory and registers suffice, and none is spilled."""
    kinds = ["80", "89", "90", "100"]
    found = of_program("low_rank_resources", "all", *kinds)
    assert {name.split()[0] for name in found} == set(kinds)
