"""The decoder that all families use: embedding, layers, final norm and output head, or a pipeline stage of them.

Keeps no state between calls: the step and the KV memory are arguments. Does not know requests or sampling.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, KVSpec, LayerMemory, LayerStep
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.rows_by_slot import AdaptedRows, StepRows
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu.gemm import CppMatmul, CppPackedMatmul
from oarlock.workers.layers import joined_layers
from oarlock.workers.layers.attention import Attention
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import (
    BranchSpec,
    DecoderSpec,
    in_stages,
    is_ignorable,
    is_in_stage,
    slices_of,
)
from oarlock.workers.layers.embedding import PositionEmbedding, VocabParallelEmbedding, VocabParallelHead
from oarlock.workers.layers.experts import Experts
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.fused_layer import CannotPrepare, PreparedLayers
from oarlock.workers.layers.gated_delta import GatedDelta
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.gated_mlp import GatedMLP
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.kimi_delta import KimiDelta
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.latent_attention import LatentAttention
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.layer_input import LayerInput, LayerInputs
from oarlock.workers.layers.layer_input_spec import LayerInputSpec
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.mamba2 import Mamba2
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.memory_spec import PagesSpec
from oarlock.workers.layers.mlp import MLP
from oarlock.workers.layers.mlp_spec import MLPSpec
from oarlock.workers.layers.norm import LayerScalar, Norm, RMSNorm, make_norm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.rotary import QueryScaleTable, RotaryTable
from oarlock.workers.layers.short_convolution import ShortConvolution
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.models.class_reference import ClassReference
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.weights.source import WeightSource

_STAND_INS = 256  # number of different rows


class _Part(Protocol):
    """A layer that owns weights."""

    @property
    def weight_bytes(self) -> int: ...

    def load(self, weights: WeightSource) -> None: ...


class Sublayer(Protocol):
    """One kind of sublayer on one rank, built from its `SublayerSpec`."""

    @property
    def parts(self) -> Sequence[_Part]:
        """Its layers that own weights, in loading order."""

    @property
    def output(self) -> RowParallelLinear | None:
        """The linear layer whose partial sums are all-reduced; None if there are several."""

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        """Return the sublayer's result for `x` [T, hidden] (normed), plus `residual` if there is one: [T, hidden]."""


# Class of each kind of sublayer.
_SUBLAYERS: dict[type, Callable[..., Sublayer]] = {
    SelfAttentionSpec: Attention, LatentAttentionSpec: LatentAttention, GatedMLPSpec: GatedMLP, MLPSpec: MLP,
    ExpertsSpec: Experts, GatedDeltaSpec: GatedDelta, Mamba2Spec: Mamba2, ShortConvolutionSpec: ShortConvolution,
    LayerInputSpec: LayerInput, KimiDeltaSpec: KimiDelta,
}  # fmt: skip


class Branch:
    """A sublayer, with the norms around it, whose result is added to the residual."""

    def __init__(
        self,
        name: str,
        spec: BranchSpec,
        layer: int,
        hidden: int,
        placement: Placement,
        norms: dict[tuple[str, float], Norm],
    ) -> None:
        """Build the sublayer of the layer called `name`. `norms`: the layer's norms by name and factor."""
        self.norm = None if spec.norm is None else norms[spec.norm, spec.input_scale]
        self.sublayer = _SUBLAYERS[type(spec.sublayer)](
            f"{name}.{spec.sublayer.module}", spec.sublayer, layer, hidden, placement
        )
        self.post_norm = None if spec.post_norm is None else norms[spec.post_norm, 1.0]
        self.scale = spec.scale
        self.is_held = spec.is_held

    def __call__(self, x: Tensor, residual: Tensor, step: LayerStep) -> Tensor:
        """Add the sublayer's result for `x` to `residual`: both [T, hidden]."""
        if self.post_norm is None and self.scale == 1.0:
            normed = x if self.norm is None else self.norm(x)
            return self.sublayer(normed, residual, step)  # added inside the output projection
        result = self.result(x, step)
        if self.scale == 1.0:
            return result.add_(residual)
        return (residual.float() + result.float() * self.scale).to(residual.dtype)  # `add` would round the scale

    def result(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the sublayer's result for `x`, normed but not scaled: [T, hidden]."""
        result = self.sublayer(x if self.norm is None else self.norm(x), None, step)
        return result if self.post_norm is None else self.post_norm(result)


class HeldResult:
    """The result of a layer's branch on its way to the next layer, within a step."""

    rows: Tensor | None = None  # [T, hidden]

    def take(self) -> Tensor:
        """Return the result, and keep it no longer."""
        rows, self.rows = self.rows, None
        assert rows is not None, "the layer before holds a result"
        return rows


class DecoderLayer:
    """A decoder layer, [T, hidden] -> [T, hidden]: the branches of a `LayerSpec`."""

    def __init__(self, name: str, spec: DecoderSpec, layer: int, placement: Placement, held: HeldResult) -> None:
        """Build the sublayers. `held`: shared by all layers of the stage."""
        shape = spec.layers[layer]
        pairs = [
            pair for branch in shape.branches for pair in ((branch.norm, branch.input_scale), (branch.post_norm, 1.0))
        ]
        norms = {
            (norm, scale): make_norm(f"{name}.{norm}", spec.hidden_size, spec.norm, placement, scale)
            for norm, scale in pairs
            if norm is not None
        }
        sums = [None] * len(shape.stages) if not shape.sum_norms else shape.sum_norms
        self.sum_norms = [
            None if norm is None else make_norm(f"{name}.{norm}", spec.hidden_size, spec.norm, placement)
            for norm in sums
        ]  # of the sum of each stage's results
        self.norms = [*norms.values(), *(norm for norm in self.sum_norms if norm is not None)]
        self.branches = [Branch(name, branch, layer, spec.hidden_size, placement, norms) for branch in shape.branches]
        self.stages: list[tuple[Branch, ...]] = in_stages(self.branches, shape.lengths)
        self.scalar = None if shape.scalar is None else LayerScalar(f"{name}.{shape.scalar}", placement)
        self.held, self.adds_held = held, shape.adds_held

    @property
    def attention(self) -> Attention | LatentAttention | None:
        """Its attention; None if it has none."""
        sublayers = [branch.sublayer for branch in self.branches]
        return next((one for one in sublayers if isinstance(one, Attention | LatentAttention)), None)

    @property
    def mlp(self) -> GatedMLP | MLP:
        return next(branch.sublayer for branch in self.branches if isinstance(branch.sublayer, GatedMLP | MLP))

    @property
    def parts(self) -> list[_Part]:
        scalars = [] if self.scalar is None else [self.scalar]
        return [*self.norms, *(part for branch in self.branches for part in branch.sublayer.parts), *scalars]

    def __call__(self, hidden: Tensor, step: LayerStep) -> Tensor:
        for stage, norm in zip(self.stages, self.sum_norms, strict=True):
            entering = hidden
            if norm is not None:
                first, *others = (branch.result(entering, step) for branch in stage)
                hidden = norm(sum(others, first)).add_(entering)
                continue
            for branch in stage:
                if branch.is_held:
                    self.held.rows = branch.result(entering, step)
                else:
                    hidden = branch(entering, hidden, step)
        if self.adds_held:
            hidden = hidden + self.held.take()
        return hidden if self.scalar is None else self.scalar(hidden)


class Decoder:
    """One rank's shard of the model, or of its pipeline stage: a `RankModel`. It holds no weights before `load`."""

    why_not_captured: str | None = None  # CUDA graphs may contain its steps
    reference: ClassReference | None = None  # golden tests compare every family with its class

    def __init__(
        self,
        spec: DecoderSpec,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        quantization: WeightFormats = NONE,
        stage: range | None = None,
        *,
        distributes_experts: bool = False,
    ) -> None:
        """Build the layers. `stage`: the layers of a pipeline stage, or None for all. `distributes_experts`: ranks have
        whole experts."""
        self.spec = spec
        self.stage = stage = stage or range(spec.num_layers)
        self.is_first, self.is_last = stage.start == 0, stage.stop == spec.num_layers
        # On other devices libraries compute the all-reduced sums, and slices would only cost time.
        slices = slices_of(spec, quantization) if device.type == "cpu" else 1
        self.placement = placement = Placement(
            tp, dtype, device, quantization, slices, distributes_experts=distributes_experts
        )
        vocab, hidden = spec.vocab_size, spec.hidden_size
        vocab_placement = replace(placement, quantization=quantization.of_head)
        self.embedding = VocabParallelEmbedding(
            "model.embed_tokens", vocab, hidden, vocab_placement, spec.embedding_scale
        )
        self.positions = (
            PositionEmbedding("model.embed_positions", spec.positions, hidden, placement)
            if spec.positions is not None and self.is_first
            else None
        )
        self.layer_inputs: LayerInputs | None = None
        if spec.layer_inputs is not None:
            assert self.is_first and self.is_last, "inputs of layers are not sent to other stages"
            self.layer_inputs = LayerInputs(spec.layer_inputs, spec.num_layers, hidden, placement, vocab_placement)
        held = HeldResult()
        shapes = [spec.layers[i] for i in stage]
        handed_on = [False, *(one.holds for one in shapes)] == [*(one.adds_held for one in shapes), False]
        assert handed_on, "each result that a layer holds is added by the next layer of the stage"
        self.layers = [DecoderLayer(f"model.layers.{i}", spec, i, placement, held) for i in stage]
        self.norm = make_norm("model.norm", hidden, spec.norm, placement)
        self.head = VocabParallelHead.of(spec, vocab_placement)
        attentions = [spec.layers[i].attention for i in stage]
        ropes = [None if one is None else one.rope for one in attentions]
        self.rotary = {rope: RotaryTable(rope, device) for rope in ropes if rope is not None}  # usually only one
        self.rotary_of = [-1 if rope is None else list(self.rotary).index(rope) for rope in ropes]
        scales = [one.query_scale if isinstance(one, SelfAttentionSpec) else None for one in attentions]
        self.query_scales = {scale: QueryScaleTable(scale, device) for scale in scales if scale is not None}
        self.scale_of = [-1 if scale is None else list(self.query_scales).index(scale) for scale in scales]
        self.remote_experts = {
            name for experts in self.mixtures() for name in experts.routed.remote_experts
        }  # experts of other ranks
        self._prepared: dict[bool, PreparedLayers | None] = {}  # for steps without and with adapters
        self.why_not_prepared: str | None = None  # reason in the most recent step
        self.step_rows = StepRows()  # read by the layers of a step with adapters
        self.joins_layers = joined_layers.has_join_kernels(device)
        self.numbers = list(stage)  # of the layers in the whole model
        self.groups = spec.groups  # memory groups of the whole model
        groups = [spec.group_of(i, PagesSpec) for i in stage]
        self.pages_of = [-1 if group is None else group for group in groups]  # number of each layer's group of pages

    def with_layers(self, layers: list[int]) -> "Decoder":
        """Return a decoder of only these layers that shares this decoder's weights: faster, with the same kernels and
        shapes."""
        other = copy.copy(self)
        other.layers = [self.layers[layer] for layer in layers]
        other.rotary_of = [self.rotary_of[layer] for layer in layers]
        other.scale_of = [self.scale_of[layer] for layer in layers]
        other.pages_of = [self.pages_of[layer] for layer in layers]
        other.numbers = [self.numbers[layer] for layer in layers]
        return other

    def one_of_each_kind(self) -> list[int]:
        """Return the first layer of each different specification, and the layers whose pages or held results these
        read, in ascending order. Layers are counted from the first layer of the stage."""
        kinds = [self.spec.layers[layer] for layer in self.stage]
        found = {layer for layer, kind in enumerate(kinds) if kinds.index(kind) == layer}
        found |= {layer - 1 for layer in found if kinds[layer].adds_held}
        pages = [memory for layer in found for memory in kinds[layer].memories if isinstance(memory, PagesSpec)]
        found |= {one.of_layer - self.stage.start for one in pages if one.of_layer is not None}
        return sorted(found)

    def mixtures(self) -> list[Experts]:
        """Return the MoE sublayers of all layers."""
        sublayers = [branch.sublayer for layer in self.layers for branch in layer.branches]
        return [sublayer for sublayer in sublayers if isinstance(sublayer, Experts)]

    def summed_outputs(self) -> list[RowParallelLinear]:
        """Return the linear layers of all sublayers whose partial sums are all-reduced."""
        outputs = [branch.sublayer.output for layer in self.layers for branch in layer.branches]
        return [output for output in outputs if output is not None]

    def why_not_rank_invariant(self, memory: list[LayerMemory], backends: Mapping[int, AttentionBackend]) -> str | None:
        """Return the reason why this rank's kernels on the CPU guarantee nothing, or None if they do."""
        if self.prepared_for(memory, backends) is None:
            return f"not everything is computed by kernels that add up in one order: {self.why_not_prepared}"
        if self.is_last and not isinstance(self.head.matmul, CppMatmul | CppPackedMatmul):
            return "logits are computed by torch, in an order that depends on the shape of a rank's vocabulary"
        return None

    @property
    def vocab_start(self) -> int:
        """The first id of this rank's logits."""
        return self.head.start

    @property
    def vocab_local(self) -> int:
        """Number of ids in this rank's logits, the same on every rank; the last ids may be padding."""
        return self.head.local

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, over all ranks. A tied head counts once."""
        return self.spec.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on this rank, including a tied head's packed copy."""
        return sum(part.weight_bytes for part in self._parts()) + (self.head.weight_bytes if self.is_last else 0)

    def kv_specs(self, block_size: int, cache_dtype: str = "auto") -> list[KVSpec]:
        """Return the shapes of this rank's pages, of each group of pages that a layer of the stage reads.

        `cache_dtype`: a key of `oarlock.workers.attention.kv_format.FORMATS`.
        """
        place, found = self.placement, []
        for number in sorted({group for group in self.pages_of if group >= 0}):
            memory, layers = self.groups[number]
            assert isinstance(memory, PagesSpec)
            own = sum(layer in self.stage for layer in layers)
            sizes = own, memory.heads_of_rank(place.tp.size), memory.key_width, block_size
            spec = KVSpec(
                *sizes, place.dtype, place.device, cache_dtype, value_dim=memory.value_width,
                value_in_key=memory.value_in_key, group=number,
            )  # fmt: skip
            found.append(spec)
        return found

    def load(self, weights: WeightSource, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slices, layer by layer. `on_progress` is called with the share of bytes read, ending with
        1.0."""
        total, done = self.weight_bytes, 0
        for part in self._parts():
            part.load(weights)
            done += part.weight_bytes
            on_progress(min(done / total, 0.999))
        if self.is_last and self.spec.tie_word_embeddings:
            self.head.tie(self.embedding)
            self.head.load_bias(weights)
        elif self.is_last:
            self.head.load(weights)
        weights.finish(self._may_stay_unused)
        self.placement.staging.release()
        on_progress(1.0)

    def _may_stay_unused(self, name: str) -> bool:
        """Return whether a checkpoint tensor may stay unused: only other stages or ranks use it, or the model does
        not."""
        if name.rsplit(".", 2)[0] in self.remote_experts:
            return True
        if is_ignorable(self.spec, name) or not is_in_stage(self.spec, name, self.stage):
            return True
        return self.placement.quantization.ignores(name)

    @property
    def parts(self) -> list[_Part | VocabParallelHead]:
        """All layers of the stage that have weights, or share another's, among them all layers that adapters may
        update."""
        return [*self._parts(), self.head] if self.is_last else list(self._parts())

    def _parts(self) -> Iterator[_Part]:
        """Yield all layers that load weights, except the output head, which may share the embedding's."""
        if self.is_first or (self.is_last and self.spec.tie_word_embeddings):
            yield self.embedding
        if self.positions is not None:
            yield self.positions
        if self.layer_inputs is not None:
            yield from self.layer_inputs.parts
        for layer in self.layers:
            yield from layer.parts
        if self.is_last:
            yield self.norm

    def stand_in(self, token_ids: Tensor) -> Tensor | None:
        """Return rows [T, hidden] that replace the previous stage's hidden states, for trials of a single stage.

        Each row depends only on its entry of `token_ids`, int64 [T]. Returns None on the first stage, which has the
        embedding.
        """
        if self.is_first:
            return None
        rows = torch.randn((_STAND_INS, self.spec.hidden_size), generator=torch.Generator().manual_seed(0))
        return rows.to(self.placement.dtype)[token_ids.cpu() % _STAND_INS].to(self.placement.device)

    def __call__(
        self,
        batch: ForwardBatch,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
        plans: Mapping[int, Any],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run one step; return [T, hidden] after the final norm, or the hidden states for the next stage.

        `memory`: of each layer. `backends`: attention backend of each group of pages, by its number; `plans`: the
        results of their `prepare(batch)`. `hidden`: from the previous stage, may be overwritten; None on
        the first stage.
        """
        assert (hidden is None) == self.is_first, "the first stage embeds, the others get hidden states"
        if batch.adapters is None:
            return self._run(batch, memory, backends, plans, hidden)
        with self.step_rows.of(batch.adapters):
            return self._run(batch, memory, backends, plans, hidden)

    def _run(
        self,
        batch: ForwardBatch,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
        plans: Mapping[int, Any],
        hidden: Tensor | None,
    ) -> Tensor:
        """Run one step, as `__call__` describes. The layers of a step with adapters run one after the other."""
        longest = max(batch.context_lens)
        if hidden is None:
            hidden = self.embedding(batch.token_ids)  # [T, hidden]
            if self.positions is not None:
                hidden = self.positions(hidden, batch.positions)
        inputs = None if self.layer_inputs is None else self.layer_inputs(batch.token_ids, hidden)  # [T, layers, width]
        prepared = self.prepared_for(memory, backends, adapts=batch.adapters is not None)
        # Nearly all models have no such table, and this is computed for every token.
        scales = [table(batch.positions, longest) for table in self.query_scales.values()] if self.query_scales else []
        if prepared is not None:
            prepared(hidden, batch, [table.up_to(longest) for table in self.rotary.values()], plans, scales, inputs)
            return self.norm(hidden) if self.is_last and not prepared.norms_last else hidden
        angles = [table(batch.positions, longest) for table in self.rotary.values()]  # once per step for all layers
        steps = [
            LayerStep(
                None if which < 0 else angles[which], batch, own.kv, backends.get(pages), plans.get(pages),
                None if scale < 0 else scales[scale], own.states, None if inputs is None else inputs[:, number],
            )
            for which, scale, pages, own, number in zip(
                self.rotary_of, self.scale_of, self.pages_of, memory, self.numbers, strict=True
            )
        ]  # fmt: skip
        may_join = self.joins_layers and isinstance(self.norm, RMSNorm) and self.is_last
        if may_join and joined_layers.can_join(self.layers):
            return joined_layers.run_joined(self.layers, self.norm, hidden, steps)
        for layer, step in zip(self.layers, steps, strict=True):
            hidden = layer(hidden, step)
        return self.norm(hidden) if self.is_last else hidden

    def prepared_for(
        self, memory: list[LayerMemory], backends: Mapping[int, AttentionBackend], *, adapts: bool = False
    ) -> PreparedLayers | None:
        """Return the layers as one kernel call, or None if this is not possible. `adapts`: for steps with adapters.

        They are prepared again if other layers are given or if parts of them were replaced.
        """
        last_norm, prepared = self.norm if self.is_last else None, self._prepared.get(adapts)
        if prepared is None or not prepared.serves(self.layers, last_norm, memory, backends):
            try:
                prepared = PreparedLayers(
                    self.layers, last_norm, self.rotary_of, self.scale_of, self.pages_of, self.spec.hidden_size,
                    self.placement, memory, backends,
                    0 if self.layer_inputs is None else self.layer_inputs.layers * self.layer_inputs.width,
                    adapts=adapts,
                )  # fmt: skip
                self.why_not_prepared = None
            except CannotPrepare as reason:
                prepared, self.why_not_prepared = None, str(reason)
            # A new dictionary: `with_layers` copies this object.
            self._prepared = {**self._prepared, adapts: prepared}
        return prepared

    def parts_were_replaced(self) -> None:
        """Forget the prepared layers.

        Must be called if a part of a layer that has run is replaced, since the old part would still be used otherwise.
        """
        self._prepared = {}

    def compute_logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """Return the logits of rows [L, hidden] for this rank's vocabulary shard: float32 [L, vocab_local].

        Padding ids get -inf. `adapters`: of these rows, or None if none of them has one.
        """
        return self.head(hidden, adapters)
