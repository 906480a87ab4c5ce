"""The decoder that all families run: embedding, layers, final norm, output head; or the part of them that a pipeline
stage holds.

Keeps no state between calls: the step and the KV memory are arguments. Knows nothing of requests or sampling.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers import fused_layer
from oarlock.workers.layers.attention import Attention
from oarlock.workers.layers.decoder_spec import DecoderSpec, is_ignorable, is_in_stage, slices_of
from oarlock.workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from oarlock.workers.layers.fused_layer import CannotPrepare, PreparedLayers
from oarlock.workers.layers.linear import GatedMLP
from oarlock.workers.layers.norm import RMSNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.rotary import RotaryTable
from oarlock.workers.quantization.formats.form import WeightForms
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.weights.source import WeightSource

_STAND_INS = 256  # different rows


class _Part(Protocol):
    """A layer that owns weights."""

    @property
    def weight_bytes(self) -> int: ...

    def load(self, weights: WeightSource) -> None: ...


class DecoderLayer:
    """One pre-norm layer: attention, then MLP, each on a normed copy of the residual."""

    def __init__(self, name: str, spec: DecoderSpec, layer: int, place: Placement) -> None:
        size, eps, offset = spec.hidden_size, spec.rms_norm_eps, spec.norm_offset
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", size, eps, place, offset)
        self.attention = Attention(f"{name}.self_attn", spec, layer, place)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, place, offset)
        self.mlp = GatedMLP(f"{name}.mlp", spec, place)

    @property
    def parts(self) -> list[_Part]:
        return [self.attention_norm, *self.attention.parts, self.mlp_norm, *self.mlp.parts]

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: LayerKV,
        backend: AttentionBackend,
        plan: Any,
    ) -> Tensor:
        hidden = self.attention(self.attention_norm(hidden), hidden, cos, sin, batch, kv, backend, plan)
        return self.mlp(self.mlp_norm(hidden), hidden)  # [T, hidden]


class PostNormDecoderLayer:
    """[T, hidden] -> [T, hidden].

    Gemma's decoder layer: attention and MLP have a norm before and after, applied before the residual is added. The
    ordinary layer adds the residual inside the output product. Attributes have the same names.
    """

    def __init__(self, name: str, spec: DecoderSpec, layer: int, place: Placement) -> None:
        def norm(part: str) -> RMSNorm:
            return RMSNorm(f"{name}.{part}", spec.hidden_size, spec.rms_norm_eps, place, spec.norm_offset)

        self.attention_norm = norm("input_layernorm")
        self.attention = Attention(f"{name}.self_attn", spec, layer, place)
        self.attention_post_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(f"{name}.mlp", spec, place)
        self.mlp_post_norm = norm("post_feedforward_layernorm")

    @property
    def parts(self) -> list:
        before = [self.attention_norm, *self.attention.parts, self.attention_post_norm]
        return [*before, self.mlp_norm, *self.mlp.parts, self.mlp_post_norm]

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: LayerKV,
        backend: AttentionBackend,
        plan: Any,
    ) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), None, cos, sin, batch, kv, backend, plan)
        hidden = self.attention_post_norm(attended).add_(hidden)
        fed = self.mlp(self.mlp_norm(hidden), None)
        return self.mlp_post_norm(fed).add_(hidden)  # [T, hidden]


class Decoder:
    """One rank's shard of the model, or of the `stage` of it. It holds no weights until `load`."""

    def __init__(
        self,
        spec: DecoderSpec,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        quantization: WeightForms = NONE,
        stage: range | None = None,
    ) -> None:
        """`stage`: the layers of a pipeline stage; None: all."""
        self.spec = spec
        self.stage = stage = stage or range(spec.num_layers)
        self.is_first, self.is_last = stage.start == 0, stage.stop == spec.num_layers
        # On other devices libraries compute the sums over ranks, and slices would only cost time.
        slices = slices_of(spec, quantization) if device.type == "cpu" else 1
        self.place = place = Placement(tp, dtype, device, quantization, slices)
        vocab, hidden = spec.vocab_size, spec.hidden_size
        words = replace(place, quantization=quantization.of_head)
        self.embedding = VocabParallelEmbedding("model.embed_tokens", vocab, hidden, words, spec.embedding_scale)
        block = PostNormDecoderLayer if spec.post_norms else DecoderLayer
        self.layers = [block(f"model.layers.{i}", spec, i, place) for i in stage]
        self.norm = RMSNorm("model.norm", hidden, spec.rms_norm_eps, place, spec.norm_offset)
        self.head = VocabParallelHead("lm_head", vocab, hidden, words, spec.logit_softcap)
        ropes = [spec.rope_of(i) for i in stage]
        self.rotary = {rope: RotaryTable(rope, device) for rope in ropes}  # one, or two where windows have their own
        self.rotary_of = [list(self.rotary).index(rope) for rope in ropes]
        self._prepared: PreparedLayers | None = None
        self.why_not_prepared: str | None = None  # in the newest step
        self.joins_halves = fused_layer.joining_pays_off(device)
        self.attention_specs: list[AttentionSpec] = [block.attention.spec for block in self.layers]

    def with_layers(self, layers: list[int]) -> "Decoder":
        """A decoder of only these layers, sharing this one's weights: quicker, with the same kernels and shapes."""
        other = copy.copy(self)
        other.layers = [self.layers[layer] for layer in layers]
        other.rotary_of = [self.rotary_of[layer] for layer in layers]
        return other

    @property
    def vocab_start(self) -> int:
        """The first id of this rank's logits."""
        return self.head.start

    @property
    def vocab_local(self) -> int:
        """Ids in this rank's logits, the same on every rank; the last may be padding."""
        return self.head.local

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, over all ranks; a tied head counts once."""
        return self.spec.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on this rank, including a tied head's packed copy."""
        return sum(part.weight_bytes for part in self._parts()) + (self.head.weight_bytes if self.is_last else 0)

    def kv_spec(self, block_size: int, device: torch.device, cache_dtype: str = "auto") -> KVSpec:
        """The shape of this rank's KV memory. `cache_dtype`: a name of
        `oarlock.workers.attention.kv_format.FORMATS`."""
        first = self.attention_specs[0]
        layers, dtype = len(self.layers), self.place.dtype
        return KVSpec(layers, first.num_kv_heads, first.head_dim, block_size, dtype, device, cache_dtype)

    def load(self, weights: WeightSource, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slices, layer by layer. `on_progress` gets the share of bytes read, ending with 1.0."""
        total, done = self.weight_bytes, 0
        for part in self._parts():
            part.load(weights)
            done += part.weight_bytes
            on_progress(min(done / total, 0.999))
        if self.is_last and self.spec.tie_word_embeddings:
            self.head.tie(self.embedding)
        elif self.is_last:
            self.head.load(weights)
        weights.finish(self._may_stay_unused)
        self.place.staging.release()
        on_progress(1.0)

    def _may_stay_unused(self, name: str) -> bool:
        """A tensor of the checkpoint that another stage takes, or none."""
        if is_ignorable(self.spec, name) or not is_in_stage(self.spec, name, self.stage):
            return True
        return self.place.quantization.ignores(name)

    def _parts(self) -> Iterator[_Part]:
        """All layers that load weights, except the output head, which may share the embedding's."""
        if self.is_first or (self.is_last and self.spec.tie_word_embeddings):
            yield self.embedding
        for block in self.layers:
            yield from block.parts
        if self.is_last:
            yield self.norm

    def stand_in(self, token_ids: Tensor) -> Tensor | None:
        """Rows [T, hidden] in place of those from the stage before, for trials of one stage alone. Each depends on its
        entry of `token_ids`, int64 [T], alone. None on the first stage, which embeds."""
        if self.is_first:
            return None
        rows = torch.randn((_STAND_INS, self.spec.hidden_size), generator=torch.Generator().manual_seed(0))
        return rows.to(self.place.dtype)[token_ids.cpu() % _STAND_INS].to(self.place.device)

    def __call__(
        self,
        batch: ForwardBatch,
        kv: list[LayerKV],
        backend: AttentionBackend,
        plan: Any,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """One step -> [T, hidden], after the final norm; of a stage that is not the last, what goes to the next one.
        `plan`: what `backend.prepare(batch)` returned. `hidden`: of the stage before, may be overwritten; None on the
        first stage."""
        assert (hidden is None) == self.is_first, "the first stage embeds, the others get hidden states"
        longest = max(batch.context_lens)
        if hidden is None:
            hidden = self.embedding(batch.token_ids)  # [T, hidden]
        prepared = self.prepared_for(kv, backend)
        if prepared is not None:
            prepared(hidden, batch, [table.up_to(longest) for table in self.rotary.values()], plan)
            return self.norm(hidden) if self.is_last else hidden
        angles = [table(batch.positions, longest) for table in self.rotary.values()]  # once per step for all layers
        if self.joins_halves and self.is_last and fused_layer.can_join(self.layers):
            turns = [angles[which] for which in self.rotary_of]
            return fused_layer.run_joined(self.layers, self.norm, hidden, turns, batch, kv, backend, plan)
        for block, which, pages in zip(self.layers, self.rotary_of, kv, strict=True):
            hidden = block(hidden, *angles[which], batch, pages, backend, plan)
        return self.norm(hidden) if self.is_last else hidden

    def prepared_for(self, kv: list[LayerKV], backend: AttentionBackend) -> PreparedLayers | None:
        """The layers in the form of one call per half, prepared again if a part was replaced; None: not possible."""
        if self._prepared is None or not self._prepared.serves(self.layers, kv, backend):
            try:
                self._prepared = PreparedLayers(self.layers, self.rotary_of, self.place.tp, kv, backend)
                self.why_not_prepared = None
            except CannotPrepare as reason:
                self._prepared, self.why_not_prepared = None, str(reason)
        return self._prepared

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of a step's result [L, hidden] -> logits of this rank's vocabulary shard, float32 [L, vocab_local].

        Padding ids are -inf.
        """
        return self.head(hidden)
