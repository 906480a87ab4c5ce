"""Linear layers with adapters: against merged weights in float64, against torch, and row by row."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import RowsBySlot, StepRows
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.layers.linear import (
    ColumnParallelLinear,
    GatedParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from oarlock.workers.layers.placement import Placement
from oarlock.workers.lora import cpp_layers
from oarlock.workers.lora.adapted_layers import AdaptedColumnLayer, AdaptedRowLayer
from oarlock.workers.lora.low_rank import LayerPairs, RankPair
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.matmul import PackedMatmul, activated, can_pack
from oarlock.workers.quantization.method import StoredRows
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.quantization.unrounded import float32_sums
from tests.unit.workers.kernel_levels import NO_KERNELS, PARAMETERS, threads, using
from tests.unit.workers.weights_in_memory import MemoryWeights, placement

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

CPU = torch.device("cpu")
INPUTS, MAX_RANK, SLOTS = 192, 9, 3
# Rows with three adapters and none. The adapter in slot 3 updates other layers only.
SLOT_OF = np.array([1, 0, 2, 2, 3, 1, 1, 1, 1, 1, 0, 2, 1, 3, 0, 1], np.int32)
RANKS = {1: 9, 2: 3}

# Outputs are not whole panels of a kernel, and parts do not end at registers.
LAYERS: dict[str, Callable[[Placement], Any]] = {
    "qkv": lambda place: QKVParallelLinear("m", INPUTS, 20, 4, 2, True, place),
    "gated": lambda place: GatedParallelLinear("m", INPUTS, 84, True, "silu", place),
    "activated": lambda place: _columns(("up",), place, bias=True, activation="gelu_tanh"),
    "float": lambda place: _columns(("b", "a"), place, bias=False),
    "sum": lambda place: RowParallelLinear("m.down", INPUTS, 72, True, place),
}


def _columns(parts: tuple[str, ...], place: Placement, *, bias: bool, **more: Any) -> ColumnParallelLinear:
    rows = tuple(StoredRows(f"m.{part}", 72, 0, 72) for part in parts)
    return ColumnParallelLinear(rows, INPUTS, bias, place, **more)


class Case:
    """A layer with pairs in slots, the rows of a step, and the layer computed exactly with merged weights."""

    def __init__(self, kind: str, dtype: torch.dtype, form: str = "none") -> None:
        """`form`: of the weight: a key of `QUANTIZATIONS`, or "fp8"."""
        draw = torch.Generator().manual_seed(len(kind))
        place = replace(placement(dtype=dtype), slices=4)
        if form in QUANTIZATIONS:
            place = replace(place, quantization=QUANTIZATIONS[form])
        self.kind, self.layer = kind, LAYERS[kind](place)
        shard = self.layer.weight_shard

        def drawn(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=draw) * size).to(dtype)

        self.tensors = {f"{part.name}.weight": drawn(part.rows, INPUTS, size=INPUTS**-0.5) for part in shard.parts}
        self.tensors |= {f"{part.name}.bias": drawn(part.rows) for part in shard.parts}
        self.layer.load(MemoryWeights(self.tensors))
        if form == "fp8":
            self._round_to_float8(dtype)
        self.pairs, self.step = LayerPairs(shard, SLOTS, MAX_RANK, place), StepRows()
        self.updates = torch.zeros((SLOTS + 1, shard.rows, INPUTS), dtype=torch.float64)
        for slot, rank in RANKS.items():
            held, first = [], 0
            for part, rows in enumerate(shard.parts):
                own = max(1, rank - part)
                pair = RankPair(part, 0.3 + part, drawn(own, INPUTS, size=INPUTS**-0.5), drawn(own, rows.count))
                if part != 1 or slot != 2:  # the second adapter leaves out one part of a fused layer
                    held.append(pair)
                    self.updates[slot, first : first + rows.count] = pair.scale * pair.b.double().T @ pair.a.double()
                first += rows.count
            self.pairs.put(slot, held)
        self.x, self.residual = drawn(len(SLOT_OF), INPUTS), drawn(len(SLOT_OF), shard.rows)

    def _round_to_float8(self, dtype: torch.dtype) -> None:
        """Replace the matmul by a matmul with an e4m3 weight: no bias, and a scale for each group of 48 inputs."""
        whole = torch.cat([self.tensors[f"{part.name}.weight"] for part in self.layer.weight_shard.parts])
        scales = torch.rand((len(whole), INPUTS // 48), generator=torch.Generator().manual_seed(0)) + 0.5
        weight = Fp8Weight(whole.to(torch.float8_e4m3fn), scales, 48, dtype)
        if self.kind == "gated":
            self.layer.matmul = weight.gated_matmul(None, "silu")
        elif self.kind == "activated":
            self.layer.matmul = activated(weight.matmul(float32_output=True), "gelu_tanh")
        elif self.kind == "sum":
            self.layer.matmul = weight.matmul(self.layer.bias, slices=4)
        else:
            self.layer.matmul = weight.matmul(float32_output=self.kind == "float")

    def adapt(self) -> AdaptedColumnLayer | AdaptedRowLayer:
        make: Any = cpp_layers.row_layer if self.kind == "sum" else cpp_layers.column_layer
        return make(self.layer, self.pairs, self.step)

    def run(self, rows: slice = slice(None)) -> Tensor:
        """The layer's results for some rows of the step."""
        of_rows = RowsBySlot.of(SLOT_OF[rows], CPU)
        more = (self.residual[rows],) if self.kind == "sum" else ()
        if of_rows is None:
            return self.layer(self.x[rows], *more)
        with self.step.of(of_rows):
            return self.layer(self.x[rows], *more)

    def finished(self, sums: Tensor) -> Tensor:
        """The layer's activation or residual after its sums, with their dtype."""
        if self.kind == "gated":
            gate, up = sums.chunk(2, 1)
            return F.silu(gate) * up
        if self.kind == "activated":
            return F.gelu(sums, approximate="tanh")
        return sums + self.residual.double() if self.kind == "sum" else sums

    @property
    def update(self) -> Tensor:
        """What adapters add to the sums: float64 [T, outputs]."""
        return torch.einsum("ti,toi->to", self.x.double(), self.updates[torch.from_numpy(SLOT_OF).long()])

    def merged_errors(self, exact: Tensor) -> Tensor:
        """Errors of the rows with an adapter if each adapter was merged into the weight, and rounded."""
        errors = []
        for slot in RANKS:
            layer, tensors, first = LAYERS[self.kind](self.layer.placement), dict(self.tensors), 0
            for part in self.layer.weight_shard.parts:
                merged = tensors[f"{part.name}.weight"].double() + self.updates[slot, first : first + part.count]
                tensors[f"{part.name}.weight"] = merged
                first += part.count
            layer.load(MemoryWeights(tensors))
            here = torch.from_numpy(slot == SLOT_OF)
            more = (self.residual[here],) if self.kind == "sum" else ()
            errors.append(layer(self.x[here], *more).double() - exact[here])
        return torch.cat(errors)


def size_of(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


@pytest.mark.parametrize("level", PARAMETERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_merged_weights_are_hardly_more_exact(kind: str, dtype: torch.dtype, level: ISALevel) -> None:
    """Also the C++ operations, torch's, and rows alone: all are compared on one layer."""
    with using(level):
        case = Case(kind, dtype)
        plain = case.run(slice(1, 2)), case.layer(case.x, *((case.residual,) if kind == "sum" else ()))
        parts = case.layer.weight_shard.parts
        weight = torch.cat([case.tensors[f"{part.name}.weight"] for part in parts]).double()
        bias = torch.cat([case.tensors[f"{part.name}.bias"] for part in parts]).double() if kind != "float" else 0.0
        exact = case.finished(case.x.double() @ weight.T + bias + case.update)
        adapted = case.adapt()
        assert type(adapted) in (cpp_layers.CppColumnLayer, cpp_layers.CppRowLayer)
        found = case.run()
        theirs = torch.from_numpy(np.isin(SLOT_OF, list(RANKS)))
        assert torch.equal(found[~theirs], plain[1][~theirs]) and torch.equal(plain[0], plain[1][1:2])
        for rows in (1, 3, 6):  # together
            some = [case.run(slice(row, row + rows)) for row in range(0, len(SLOT_OF), rows)]
            assert torch.equal(torch.cat(some), found), f"{rows} rows together have other bits"
        with threads(2):
            assert torch.equal(case.run(), found)
        most = 2 * size_of(case.merged_errors(exact))
        assert size_of((found.double() - exact)[theirs]) <= most
        slow = AdaptedRowLayer if kind == "sum" else AdaptedColumnLayer
        case.layer.adapted = slow(case.layer, case.pairs, case.step)
        assert size_of((case.run().double() - exact)[theirs]) <= most
        assert torch.equal(case.run()[~theirs], plain[1][~theirs])


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_updates_of_quantised_weights_are_exact(kind: str, form: str) -> None:
    """The update is added to the sums of the quantised weight, and rounded once with them."""
    case = Case(kind, torch.bfloat16, form)
    exact = case.finished(float32_sums(case.layer.matmul)(case.x).double() + case.update)
    plain = case.layer(case.x, *((case.residual,) if kind == "sum" else ()))
    case.adapt()
    found = case.run()
    is_float32 = found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2e-6 if is_float32 else 2**-8, atol=2e-5)
    theirs = torch.from_numpy(np.isin(SLOT_OF, list(RANKS)))
    assert torch.equal(found[~theirs], plain[~theirs])


@pytest.mark.skipif(not can_pack(torch.bfloat16, "cpu"), reason="oneDNN has no such matmul here")
def test_rows_without_an_adapter_have_the_bits_of_a_library() -> None:
    """oneDNN adds the residual before it rounds, and its sums before that are rounded."""
    case = Case("sum", torch.bfloat16)
    case.layer.matmul = PackedMatmul(case.tensors["m.down.weight"], case.layer.bias)
    plain = case.layer(case.x, case.residual)
    assert type(case.adapt()) is AdaptedRowLayer
    theirs = torch.from_numpy(np.isin(SLOT_OF, list(RANKS)))
    assert torch.equal(case.run()[~theirs], plain[~theirs])


def test_slots_are_replaced_and_cleared() -> None:
    case = Case("qkv", torch.float32)
    plain = case.layer(case.x)
    case.adapt()
    before = case.run()
    case.pairs.put(1, [RankPair(0, 1.0, torch.ones((1, INPUTS)), torch.ones((1, 80)))])
    changed = (case.run() != before).any(0)
    assert changed.any(), "the old adapter is still used"
    for slot in RANKS:
        case.pairs.put(slot, ())
    assert torch.equal(case.run(), plain)
    assert not (case.pairs.a.any() or case.pairs.b.any())
