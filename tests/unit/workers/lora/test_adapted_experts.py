"""Experts with adapters in the C++ kernel: against torch, against merged weights, row by row, and cut among ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import RowsBySlot, StepRows
from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.layers.experts import ExpertStack
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.sharding import shard_experts
from oarlock.workers.lora.adapted_experts import AdaptedExperts
from oarlock.workers.lora.cpp_layers import CppAdaptedExperts, expert_stack
from oarlock.workers.lora.low_rank import LayerPairs, RankPair
from oarlock.workers.quantization.expert_matmul import expert_matmul
from oarlock.workers.quantization.expert_weights import ExpertWeights, gate_of
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.method import WeightShard
from oarlock.workers.quantization.registry import QUANTIZATIONS
from tests.unit.workers.kernel_levels import NO_KERNELS, PARAMETERS, threads, using
from tests.unit.workers.weights_in_memory import MemoryWeights, placement

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

CPU = torch.device("cpu")
HIDDEN, WIDTH, EXPERTS, TOP_K, SLICES = 136, 160, 5, 2, 4
MAX_RANK, SLOTS = 9, 3
# Rows with three adapters and none. The adapter in slot 3 updates other layers only.
SLOT_OF = np.array([1, 0, 2, 2, 3, 1, 1, 1, 1, 1, 0, 2, 1, 3, 0, 1], np.int32)
RANKS = {1: 9, 2: 3}
# Matrices that an adapter leaves out, by slot: number of the expert, and of the matrix (0: gate and up, 1: down).
LEFT_OUT = {1: {(0, 0), (1, 1), (2, 0), (2, 1)}, 2: {(1, 0)}}


@dataclass(frozen=True)
class Case:
    """Experts of one kind. `form`: of the weights: a key of `QUANTIZATIONS`, or "fp8"."""

    dtype: torch.dtype
    form: str = "none"
    activation: str = "silu"
    is_gated: bool = True
    bias: bool = False
    weighs_inputs: bool = False
    deals: bool = False  # whether ranks hold whole experts

    @property
    def spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            EXPERTS, WIDTH, RouterSpec(TOP_K), self.activation, bias=self.bias, weighs_inputs=self.weighs_inputs,
            is_gated=self.is_gated,
        )  # fmt: skip

    @property
    def parts(self) -> tuple[str, ...]:
        return ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)


CASES = {
    "float32": Case(torch.float32, bias=True),
    "bfloat16": Case(torch.bfloat16),
    "float16, no gate": Case(torch.float16, activation="relu2", is_gated=False, bias=True),
    "clamped": Case(torch.bfloat16, activation="clamped_swiglu", bias=True),
    "scaled inputs": Case(torch.float32, weighs_inputs=True),
    "whole experts": Case(torch.bfloat16, deals=True),
    "int8": Case(torch.bfloat16, "int8"),
    "int4": Case(torch.bfloat16, "int4"),
    "fp8": Case(torch.bfloat16, "fp8"),
}


def drawn(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


class Adapters:
    """The weights of all experts, and the matrices A and B of two adapters: by slot, expert and module."""

    def __init__(self, case: Case) -> None:
        self.case, dtype = case, case.dtype
        self.weights: dict[str, Tensor] = {}
        self.halves: dict[tuple[int, str], tuple[float, Tensor, Tensor]] = {}
        modules = [(expert, part) for expert in range(EXPERTS) for part in (*case.parts, "down_proj")]
        for seed, (expert, part) in enumerate(modules):
            name, is_down = f"m.{expert}.{part}", part == "down_proj"
            outputs, inputs = (HIDDEN, WIDTH) if is_down else (WIDTH, HIDDEN)
            self.weights[f"{name}.weight"] = drawn(seed, outputs, inputs, size=inputs**-0.5).to(dtype)
            if case.bias:
                self.weights[f"{name}.bias"] = drawn(seed + 100, outputs).to(dtype)
            for slot, rank in RANKS.items():
                if (expert, int(is_down)) not in LEFT_OUT[slot]:
                    own = rank - (part == "up_proj")
                    a = drawn(seed + 200 * slot, own, inputs, size=inputs**-0.5).to(dtype)
                    self.halves[slot, name] = 0.3 + slot, a, drawn(seed + 300 * slot, outputs, own).to(dtype)

    def stack(self, rank: int = 0, size: int = 1) -> ExpertStack:
        """The part of a rank, with adapters in its slots, computed by the kernel."""
        case = self.case
        place = replace(placement(rank, size, case.dtype), slices=SLICES, distributes_experts=case.deals)
        if case.form in QUANTIZATIONS:
            place = replace(place, quantization=QUANTIZATIONS[case.form])
        held = shard_experts(EXPERTS, rank, size, SLICES) if case.deals else None
        names = [f"m.{expert}" for expert in range(EXPERTS)]
        stack = ExpertStack(names, case.spec, WIDTH, HIDDEN, case.bias, place, held)
        stack.load(MemoryWeights(self.weights))
        if case.form == "fp8":
            stack.matmul = expert_matmul(stack.shape, (self._float8(name) for name in stack.names))
        pairs = [LayerPairs(shard, SLOTS, MAX_RANK, place) for shard in stack.shards]
        for slot in RANKS:
            for one in pairs:
                one.put(slot, list(self._cut(one.shard, slot)))
        adapted = expert_stack(stack, pairs, StepRows())
        adapted.note_slots()
        assert type(adapted) is CppAdaptedExperts
        return stack

    def _cut(self, shard: WeightShard, slot: int) -> Iterator[RankPair]:
        for number, part in enumerate(shard.parts):
            if (slot, part.name) in self.halves:
                scale, a, b = self.halves[slot, part.name]
                local_a, local_b = a.new_zeros((len(a), shard.local_inputs)), b.new_zeros((len(a), part.count))
                held_a = a[:, shard.first_input : shard.first_input + shard.local_inputs]
                held_b = b[part.first : part.first + part.count].T  # widths of some formats are padded
                local_a[:, : held_a.shape[1]], local_b[:, : held_b.shape[1]] = held_a, held_b
                yield RankPair(number, scale, local_a, local_b)

    def _float8(self, name: str) -> ExpertWeights:
        def rounded(*parts: str) -> Fp8Weight:
            whole = torch.cat([self.weights[f"{name}.{part}.weight"] for part in parts])
            scales = drawn(7, len(whole), -(-whole.shape[1] // 40)).abs() + 0.5
            return Fp8Weight(whole.to(torch.float8_e4m3fn), scales, 40, whole.dtype)

        return ExpertWeights(rounded(*self.case.parts), rounded("down_proj"))

    def merged(self, stack: ExpertStack, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts with merged weights, in float64, row by row."""
        total = torch.zeros((len(x), HIDDEN), dtype=torch.float64)

        def times(row: Tensor, slot: int, name: str) -> Tensor:
            weight = self.weights[f"{name}.weight"].double()
            if (found := self.halves.get((slot, name))) is not None:
                weight = weight + found[0] * found[2].double() @ found[1].double()
            bias = self.weights[f"{name}.bias"].double() if self.case.bias else 0.0
            return row @ weight.T + bias

        for row, slot in enumerate(SLOT_OF.tolist()):
            for expert, factor in zip(ids[row].tolist(), weights[row].double(), strict=True):
                before, after = (factor, 1.0) if self.case.weighs_inputs else (1.0, factor)
                scaled = x[row : row + 1].double() * before
                both = torch.cat([times(scaled, slot, f"m.{expert}.{part}") for part in self.case.parts], 1)
                inner = gate_of(both, stack.shape).double()
                total[row] += after * times(inner, slot, f"m.{expert}.down_proj")[0]
        return total


def run(stack: ExpertStack, inputs: tuple[Tensor, Tensor, Tensor], rows: slice = slice(None)) -> Tensor:
    """The results of some rows of the step."""
    assert isinstance(stack.adapted, AdaptedExperts)
    of_rows = RowsBySlot.of(SLOT_OF[rows], CPU)
    some = [one[rows] for one in inputs]
    if of_rows is None:
        return stack(*some)
    with stack.adapted.step.of(of_rows):
        return stack(*some)


@pytest.mark.parametrize("level", PARAMETERS)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_updates_experts_as_torch_does(name: str, level: ISALevel) -> None:
    """Also rows without adapters, rows alone, threads and ranks: all are compared on the same experts."""
    case = CASES[name]
    adapters, count = Adapters(case), len(SLOT_OF)
    ids = torch.stack([torch.arange(row, row + TOP_K) % EXPERTS for row in range(count)]).sort(1).values.int()
    inputs = drawn(1, count, HIDDEN).to(case.dtype), ids, drawn(2, count, TOP_K).abs() + 0.1
    theirs = torch.from_numpy(np.isin(SLOT_OF, list(RANKS)))
    with using(level):
        stack = adapters.stack()
        found, plain = run(stack, inputs), stack(*inputs)
        assert torch.equal(found[~theirs], plain[~theirs]) and not torch.equal(found[theirs], plain[theirs])
        for rows in (1, 3):  # together
            some = [run(stack, inputs, slice(row, row + rows)) for row in range(0, count, rows)]
            assert torch.equal(torch.cat(some), found), f"{rows} rows together have other bits"
        with threads(2):
            assert torch.equal(run(stack, inputs), found)
        for size in () if case.form == "fp8" else (2, 4) if case.deals else (4,):
            ranks = [run(adapters.stack(rank, size), inputs) for rank in range(size)]
            assert torch.equal(tree_sum(ranks), found), f"{size} ranks"
        kernel = stack.adapted
        assert isinstance(kernel, CppAdaptedExperts)
        with kernel.step.of(RowsBySlot.of(SLOT_OF, CPU)):
            assert kernel.rows is not None
            judged = AdaptedExperts.__call__(kernel, *inputs, kernel.rows)
    error = (found - judged).norm() / judged.norm()
    assert error <= (1e-6 if case.dtype == torch.float32 else 1e-4), "torch's results differ"
    if case.form == "none":
        exact = adapters.merged(stack, *inputs)
        assert (found - exact).norm() <= (1e-6 if case.dtype == torch.float32 else 1e-2) * exact.norm()
