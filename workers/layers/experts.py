"""MoE sublayer on one rank: the router, this rank's part of the experts, and the all-reduce of their outputs.

Experts are sharded along their width, or whole experts are distributed over ranks (`Placement.distributes_experts`).
The shared expert is one expert that every token uses; it is always sharded along its width.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.attention.backend import LayerMemory, LayerStep
from oarlock.workers.attention.rows_by_slot import RowsBySlot
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.experts import CppRouter
from oarlock.workers.kernels.cpu.fused_layer import Rows
from oarlock.workers.kernels.cpu.structures import CMoELayer, CNorm
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.fused_layer import Program
from oarlock.workers.layers.norm import LayerNorm, Norm, RMSNorm, make_norm, rms_norm
from oarlock.workers.layers.placement import Placement, runs_on_host
from oarlock.workers.layers.sharding import ExpertShard, shard_experts, shard_width
from oarlock.workers.quantization.expert_matmul import expert_matmul
from oarlock.workers.quantization.expert_weights import ExpertsShape, ExpertWeights
from oarlock.workers.quantization.fixed_order import FIXED_ORDER, FixedOrderWeight
from oarlock.workers.quantization.method import DenseWeight, LinearWeight, StoredRows, WeightShard
from oarlock.workers.weights.source import PaddedSource, WeightSource


def has_kernel(placement: Placement) -> bool:
    """Return whether routers run in the C++ kernel; else torch operations run, which are its reference."""
    return placement.device.type == "cpu" and library.why_not(placement.dtype) is None


class Router:
    """Router: [T, hidden] -> the experts of each token and their weights, in float32 and identical on every rank."""

    def __init__(self, name: str, spec: ExpertsSpec, hidden: int, placement: Placement) -> None:
        """Prepare the router of the sublayer called `name`."""
        self.name = name
        self.spec = spec.router
        self.experts, self.hidden = spec.choices, hidden
        self.placement = placement
        self.correction: Tensor | None = None
        self.input_scale: Tensor | None = None  # float32 [hidden], divided by the root of the hidden size
        self.expert_scale: Tensor | None = None  # float32 [experts]
        self.kernel: CppRouter | None = None

    @property
    def weight_bytes(self) -> int:
        spec = self.spec
        of_each = self.hidden + spec.bias + (spec.correction is not None) + (spec.expert_scale is not None)
        return 4 * (self.experts * of_each + (0 if spec.input_scale is None else self.hidden))

    def load(self, weights: WeightSource) -> None:
        spec, before = self.spec, f"{self.name}.{self.spec.name}"
        bias = self._taken(weights, f"{before}.bias", self.experts) if spec.bias else None
        weight = self._taken(weights, f"{before}.weight", self.experts, self.hidden)
        if spec.correction is not None:
            self.correction = self._taken(weights, f"{self.name}.{spec.correction}", self.experts)
        if spec.input_scale is not None:
            scale = self._taken(weights, f"{self.name}.{spec.input_scale}", self.hidden)
            self.input_scale = scale * self.hidden**-0.5
        if spec.expert_scale is not None:
            self.expert_scale = self._taken(weights, f"{self.name}.{spec.expert_scale}", self.experts)
        if has_kernel(self.placement):
            self.kernel = CppRouter(weight, self.placement.dtype, bias, self.correction, spec)
        else:
            self.matmul = _weight(weight, self.placement).matmul(bias)

    def _taken(self, weights: WeightSource, name: str, *shape: int) -> Tensor:
        into = torch.empty(shape, device=self.placement.device)
        weights.take(name, into, shape=shape)
        return into

    def logits(self, x: Tensor) -> Tensor:
        """Return the router's logits for `x` [T, hidden]: float32 [T, experts]."""
        if self.input_scale is not None:
            x = rms_norm(x, self.input_scale, self.spec.input_epsilon)
        return self.matmul(x.float()) if self.kernel is None else self.kernel.logits(x)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each row of `x` [T, hidden]: (ids int32 [T, k], ascending; weights float32 [T, k])."""
        return self.choose(self.logits(x))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts by `logits` float32 [T, experts]; the result is as in `__call__`."""
        chosen = route(logits, self.spec, self.correction) if self.kernel is None else self.kernel.route(logits)
        return chosen if self.expert_scale is None else (chosen[0], chosen[1] * self.expert_scale[chosen[0].long()])


def _weight(tensor: Tensor, placement: Placement) -> LinearWeight:
    """Return a float32 weight for torch matmuls, in the summation order that the other weights use."""
    return FixedOrderWeight(tensor) if placement.quantization is FIXED_ORDER else DenseWeight(tensor)


def route(logits: Tensor, spec: RouterSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose experts by `logits` float32 [T, E] and `correction` float32 [E]: (ids int32 [T, k], weights float32 [T,
    k]).

    If experts have equal scores, the lower id is chosen. The ids of a row ascend, and experts are added up in this
    order. Softmax keeps the order of logits, so without a correction the logits are compared, which avoids rounding.
    """
    if spec.scores == "sparsemixer":
        return _mix(logits, spec)
    exact = logits.double()
    scores = torch.sigmoid(exact) if spec.scores == "sigmoid" else torch.softmax(exact, 1)
    key = logits if correction is None else (logits if spec.corrects_logits else scores.float()) + correction
    if spec.groups > 1:
        of_group = key.unflatten(1, (spec.groups, -1))  # [T, groups, E / groups]
        best = of_group.topk(spec.best_of_group, dim=2).values.sum(2)
        left_out = best.sort(dim=1, descending=True, stable=True).indices[:, spec.top_groups :]
        is_out = torch.zeros_like(best, dtype=torch.bool).scatter_(1, left_out, True)
        key = of_group.masked_fill(is_out.unsqueeze(2), float("-inf")).flatten(1)
    ids = key.sort(dim=1, descending=True, stable=True).indices[:, : spec.top_k].sort(dim=1).values
    if spec.normalised and spec.scores == "softmax" and correction is None:
        weights = torch.softmax(exact.gather(1, ids), 1)
    else:
        weights = scores.gather(1, ids)
        if spec.normalised:
            weights = weights / (weights.sum(1, keepdim=True).clamp(min=spec.least_sum) + spec.added_to_sum)
    return ids.int(), (weights * spec.scale).float()


def _mix(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Choose experts one after the other, each with its softmax over the experts that are left and close to it."""
    left = exact = logits.double()
    ids, weights = [], []
    for _ in range(spec.top_k):
        chosen = left.sort(dim=1, descending=True, stable=True).indices[:, :1]
        best = exact.gather(1, chosen)
        is_far = (best - exact) / torch.maximum(exact.abs(), best) > spec.tolerance
        close = left.masked_fill(is_far, float("-inf"))
        weights.append(torch.softmax(close, 1).gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, float("-inf"))
    order = torch.cat(ids, 1).sort(dim=1)
    return order.values.int(), (torch.cat(weights, 1).gather(1, order.indices) * spec.scale).float()


class ExpertsUpdate(Protocol):
    """Experts in steps in which rows have adapters."""

    @property
    def rows(self) -> RowsBySlot | None:
        """Rows of the step that runs that have an adapter of any of the experts; None if there are none."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, rows: RowsBySlot) -> Tensor:
        """Compute the experts as an `ExpertMatmul` does, with the updates of `rows`."""


class ExpertStack:
    """This rank's part of experts of one width; `matmul` is their `ExpertMatmul` after loading."""

    adapted: ExpertsUpdate | None = None  # set if the model serves adapters

    def __init__(
        self,
        names: list[str],
        spec: ExpertsSpec,
        width: int,
        hidden: int,
        bias: bool,
        placement: Placement,
        expert_shard: ExpertShard | None = None,
    ) -> None:
        """Compute this rank's shapes. `names`: modules of all experts. `expert_shard`: the whole experts of this rank,
        or None if it holds a slice of every expert."""
        rank, size = (placement.tp.rank, placement.tp.size) if expert_shard is None else (0, 1)
        unit = placement.unit_of_width(f"{names[0]}.down_proj")
        self.width_shard = shard = shard_width(width, unit, rank, size, placement.slices if expert_shard is None else 1)
        self.width = width
        held = ExpertShard(0, len(names), 0, 1) if expert_shard is None else expert_shard
        self.names = names[held.first : held.first + held.count]
        self.remote_experts = frozenset(names).difference(self.names)  # experts that other ranks hold
        self.hidden, self.bias, self.placement = hidden, bias, placement
        self.shape = ExpertsShape(
            held.first, held.count, hidden, shard.count, placement.dtype, shard.slices, held.groups, held.group,
            spec.activation, spec.alpha, spec.limit, spec.is_gated, spec.weighs_inputs,
        )  # fmt: skip

    @property
    def shards(self) -> list[WeightShard]:
        """Shards of gate and up, and of down, of each of the rank's experts by turns."""
        return [shard for name in self.names for shard in self._shards(name)]

    def _shards(self, name: str) -> tuple[WeightShard, WeightShard]:
        """Return the shards of gate and up, and of down, that this rank holds of an expert."""
        shard, hidden = self.width_shard, self.hidden
        rows = tuple(
            StoredRows(f"{name}.{part}", shard.padded_width, shard.first, shard.count)
            for part in (("gate_proj", "up_proj") if self.shape.is_gated else ("up_proj",))
        )
        down = (StoredRows(f"{name}.down_proj", hidden, 0, hidden),)
        return (
            WeightShard(rows, hidden, 0, hidden),
            WeightShard(down, shard.padded_width, shard.first, shard.count, slices=shard.slices),
        )

    @property
    def weight_bytes(self) -> int:
        return sum(
            self.placement.weight_bytes(
                shard, self.bias and (shard.local_inputs == self.hidden or self.width_shard.first == 0)
            )
            for name in self.names
            for shard in self._shards(name)
        )

    def load(self, weights: WeightSource) -> None:
        source = (
            weights
            if self.width_shard.padded_width == self.width
            else PaddedSource(weights, self.width_shard.padded_width, self.width)
        )
        on_host = runs_on_host(self.placement.device)
        self.matmul = expert_matmul(self.shape, self._loaded(source), on_host=on_host)

    def _loaded(self, weights: WeightSource) -> Iterator[ExpertWeights]:
        placement = self.placement
        for name in self.names:
            gate_up, down = self._shards(name)
            biases = (None, None)
            if self.bias:
                biases = gate_up.take_bias(weights, placement.empty), down.take_bias(weights, placement.empty)
            first = biases[1] if self.width_shard.first == 0 else None  # only the first slice adds the bias
            yield ExpertWeights(placement.load(gate_up, weights), placement.load(down, weights), biases[0], first)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.adapted is not None and (rows := self.adapted.rows) is not None:
            return self.adapted(x, ids, weights, rows)
        return self.matmul(x, ids, weights)


class Experts:
    """Experts of an MoE layer: `x` [T, hidden] (normed) -> [T, hidden], plus the residual if there is one."""

    output = None  # no single linear layer has the partial sums that are all-reduced

    def __init__(self, name: str, spec: ExpertsSpec, layer: int, hidden: int, placement: Placement) -> None:
        assert not (spec.weighs_inputs and spec.bias), "no kernel adds a bias to a scaled input"
        assert spec.norm is None or not spec.identities, "experts without matrices return the sublayer's own input"
        self.first_identity = spec.experts if spec.identities else None  # id of the first expert without matrices
        self.placement = placement
        self.router = Router(name, spec, hidden, placement)
        self.norm = None if spec.norm is None else make_norm(f"{name}.norm", hidden, spec.norm, placement)
        names = [f"{name}.experts.{expert}" for expert in range(spec.experts)]
        tp = placement.tp
        expert_shard = (
            shard_experts(spec.experts, tp.rank, tp.size, placement.slices) if placement.distributes_experts else None
        )
        self.routed = ExpertStack(names, spec, spec.width, hidden, spec.bias, placement, expert_shard)
        self.shared: ExpertStack | None = None
        self.shared_gate: _SharedGate | None = None
        if spec.shared is not None:
            shared = spec.shared
            plain = replace(spec, weighs_inputs=False)
            self.shared = ExpertStack([f"{name}.{shared.name}"], plain, shared.width, hidden, False, placement)
            if shared.gate is not None:
                self.shared_gate = _SharedGate(f"{name}.{shared.gate}", hidden, placement)

    @property
    def parts(self) -> list["Router | ExpertStack | _SharedGate | Norm"]:
        parts = (self.router, self.norm, self.routed, self.shared, self.shared_gate)
        return [part for part in parts if part is not None]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        total = self.unrounded(x, step)
        return (total if residual is None else total + residual).to(x.dtype)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, in the dtype of `sums`: [T, hidden]."""
        routed, shared = self.sums(x)
        return routed if shared is None else routed + shared

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the routed and of the shared experts after the all-reduce, each [T, hidden].

        They are float32 if ranks exchange float32 or if there is one rank, else in the model's dtype. Experts without
        matrices make the first float32.
        """
        ids, weights = self.router(x)
        x = x if self.norm is None else self.norm(x)
        total = self.routed(x, ids, weights)
        if self.shared is None:
            return self._with_identities(self._all_reduce(total), x, ids, weights), None
        # One all-reduce of both, concatenated. If they were added first, the order of additions would differ from one
        # rank.
        both = self._all_reduce(torch.cat((total, self.run_shared_expert(x))))
        return self._with_identities(both[: len(x)], x, ids, weights), both[len(x) :]

    def _with_identities(self, total: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Add the results of the experts without matrices to `total` [T, hidden], after the all-reduce since every rank
        has them. Their weights are added up in the order of their ids, as the C++ kernel does."""
        if self.first_identity is None:
            return total
        first, *others = torch.where(ids >= self.first_identity, weights, 0.0).unbind(1)
        for weight in others:
            first = first + weight
        return total + x.float() * first.unsqueeze(1)

    def _all_reduce(self, partial: Tensor) -> Tensor:
        """Return the all-reduce of `partial`, float32 [T, hidden]."""
        tp = self.placement.tp
        return tp.all_reduce(
            partial if tp.size == 1 or self.placement.all_reduces_in_float32 else partial.to(self.placement.dtype)
        )

    def run_shared_expert(self, x: Tensor) -> Tensor:
        """Return this rank's part of the shared expert's output: float32 [T, hidden]."""
        assert self.shared is not None
        ids = torch.zeros((len(x), 1), dtype=torch.int32, device=x.device)
        scale = torch.ones((len(x), 1), device=x.device) if self.shared_gate is None else self.shared_gate(x)
        return self.shared(x, ids, scale)

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[CMoELayer, Rows]:
        """Describe the MoE layer on `source` as one operation; return it and its input rows."""
        router = program.take(self, "router", Router)
        norm = program.take_optional(self, "norm", RMSNorm, LayerNorm)
        scale = program.take_optional(router, "input_scale", Tensor)
        of_router = None
        if scale is not None:
            of_router = CNorm(scale.data_ptr(), None, router.hidden, router.spec.input_epsilon, 0)
        moe_layer = program.moe_layer(
            router,
            program.take(self, "routed", ExpertStack),
            program.take_optional(self, "shared", ExpertStack),
            program.take_optional(self, "shared_gate", _SharedGate),
            (of_router, None if norm is None else program.norm(norm)),
            router.expert_scale,
            None if self.first_identity is None else (self.first_identity, source),
        )
        return moe_layer, source


class _SharedGate:
    """Gate of the shared expert: [T, hidden] -> its factor, float32 [T, 1]."""

    def __init__(self, name: str, hidden: int, placement: Placement) -> None:
        self.name, self.hidden, self.placement = name, hidden, placement
        self.kernel: CppRouter | None = None

    @property
    def weight_bytes(self) -> int:
        return 4 * self.hidden

    def load(self, weights: WeightSource) -> None:
        into = torch.empty((1, self.hidden), device=self.placement.device)
        weights.take(f"{self.name}.weight", into, shape=(1, self.hidden))
        if has_kernel(self.placement):
            self.kernel = CppRouter(into, self.placement.dtype)
        else:
            self.matmul = _weight(into, self.placement).matmul()

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.matmul(x.float()) if self.kernel is None else self.kernel.logits(x)
        return torch.sigmoid(logits.double()).float()
