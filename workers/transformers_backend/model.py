"""A model that transformers' code computes, on one rank: the same protocol towards the runner as our own `Decoder`.

A step is one run of the class on a row [1, T] with the tokens of all sequences and their positions. Attention goes to
our pages (`attention.py`), recurrent state to our slots (`states.py`), linear layers and experts to our matmuls. The
class's code does the rest, so its scalings, norms and routers are what transformers computes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, KVSpec, LayerMemory
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.rows_by_slot import AdaptedRows
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu.description import describe_kernels
from oarlock.workers.layers.decoder_spec import DecoderSpec, slices_of
from oarlock.workers.layers.experts import Experts
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.memory_spec import PagesSpec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.tensor_names import AS_STORED
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.transformers_backend import attention
from oarlock.workers.transformers_backend.building import BuiltClass, OwnTensor, build, without_weights
from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.experts_source import stacked_names
from oarlock.workers.transformers_backend.linears import LinearPart
from oarlock.workers.transformers_backend.opening import open_class
from oarlock.workers.transformers_backend.reference import OwnForward
from oarlock.workers.transformers_backend.remembered import Successes
from oarlock.workers.transformers_backend.states import make_all_stateful
from oarlock.workers.transformers_backend.switch import ClassSwitch
from oarlock.workers.transformers_backend.weights import ClassWeights, ConvertedWeights, DummyClassWeights
from oarlock.workers.weights.source import DummyWeights, WeightSource

NO_KERNELS = "transformers' code computes the model"


class TransformersModel:
    """One rank's shard of a class that transformers computes. It holds no weights before `load`."""

    is_first = is_last = True  # it has no pipeline stages
    why_not_prepared: str | None = NO_KERNELS
    why_not_captured: str | None = NO_KERNELS

    def __init__(
        self,
        spec: DecoderSpec,
        description: ClassDescription,
        config: WorkerConfig,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        formats: WeightFormats,
    ) -> None:
        """Build the class without weights, and replace its large modules by parts of this rank."""
        self.spec, self.description = spec, description
        self.stage = range(spec.num_layers)
        self.groups = spec.groups
        slices = slices_of(spec, formats) if device.type == "cpu" else 1
        self.placement = Placement(tp, dtype, device, formats, slices)
        attention.register()
        self._directory = Path(config.model_path)
        self._opened = open_class(self._directory, description)
        self._built: BuiltClass = build(self._without_weights(), self.placement, description.own_linears)
        self._states = make_all_stateful(self._built.model, description.states, (LinearPart,))
        self._class = ClassSwitch(self._built.model)
        self.pages_of = [-1 if group is None else group for group in map(self._pages_group, self.stage)]
        self._layers: dict[int, AttentionSpec] = {
            call.layer: attention.attention_spec(call, tp.size) for call in description.attention
        }
        self.reference = self._reference(config)

    def _reference(self, config: WorkerConfig) -> OwnForward | None:
        """Return the class's own forward, to be compared with; None with weights that mean nothing."""
        if config.load_format == "dummy":
            return None
        place, successes = self.placement, None
        if place.tp.rank == 0:
            successes = Successes(self.description.architecture, config, partial(describe_kernels, place.device))
        of_class = self._opened, self.description, self._built.model, place.dtype
        return OwnForward(*of_class, self._directory, self._by_class_names, successes)

    def _without_weights(self) -> Any:
        return without_weights(self._opened.kind, self._opened.config, attention.IMPLEMENTATION, self.placement.dtype)

    def _pages_group(self, layer: int) -> int | None:
        return self.spec.group_of(layer, PagesSpec)

    @property
    def vocab_start(self) -> int:
        return self._built.head.start

    @property
    def vocab_local(self) -> int:
        return self._built.head.local

    @property
    def weight_bytes(self) -> int:
        own = sum(self._own_bytes(tensor) for tensor in self._built.own)
        return own + sum(part.weight_bytes for part in self._built.parts) + self._built.head.weight_bytes

    def _own_bytes(self, tensor: OwnTensor) -> int:
        return tensor.bytes_of_rank(self.placement.tp.size)

    def kv_specs(self, block_size: int, cache_dtype: str = "auto") -> list[KVSpec]:
        """See `RankModel.kv_specs`."""
        place, found = self.placement, []
        for number, (memory, layers) in enumerate(self.groups):
            if isinstance(memory, PagesSpec):
                sizes = len(layers), memory.heads_of_rank(place.tp.size), memory.key_width, block_size
                options = (place.dtype, place.device, cache_dtype)
                found.append(KVSpec(*sizes, *options, value_dim=memory.value_width, group=number))
        return found

    def load(self, weights: WeightSource, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slices, part by part. See `RankModel.load`."""
        built, converted = self._built, self._by_class_names(weights)
        total, done = self.weight_bytes, 0
        for part in built.parts:
            part.load(converted)
            done += part.weight_bytes
            on_progress(min(done / total, 0.999))
        for tensor in built.own:
            self._load_own(tensor, converted)
        if built.is_tied and built.embedding is not None:
            built.head.tie(built.embedding)
            built.head.load_bias(converted)
        else:
            built.head.load(converted)
        converted.finish(self._beyond_experts(converted).__contains__)
        self.placement.staging.release()
        on_progress(1.0)

    def _beyond_experts(self, weights: ClassWeights) -> set[str]:
        """Return the stored names of experts of which some are not read: an identity expert needs no weights."""
        mixtures = (one for one in self.description.experts if one.identities)
        names = (name for one in mixtures for name in stacked_names(one))
        return {stored for name in names for stored in weights.sources_of(name)}

    def _by_class_names(self, weights: WeightSource) -> ClassWeights:
        """Return `weights` by the names of the class's tensors."""
        if isinstance(weights, DummyWeights):
            return DummyClassWeights(weights)
        tensors = Checkpoint.open(self._directory, AS_STORED).tensors
        stored = {name: tensor.entry.shape for name, tensor in tensors.items()}
        wrapper = self._opened.wrapper_without_weights()
        return ConvertedWeights(self._without_weights(), weights, stored, wrapper=wrapper)

    def _load_own(self, tensor: OwnTensor, weights: WeightSource) -> None:
        tp = self.placement.tp
        shape = tensor.local_shape(tp.size)
        into = torch.empty(shape, dtype=tensor.dtype, device=self.placement.device)
        start = tp.rank * shape[0] if shape != tensor.shape else 0
        weights.take(tensor.name, into, shape=tensor.shape, start=start)
        tensor.stored.put(into)

    def __call__(
        self,
        batch: ForwardBatch,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
        plans: Mapping[int, Any],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run one step; return [T, hidden] as the class hands it to its output head. See `RankModel.__call__`."""
        assert hidden is None, "it has no pipeline stages"
        if batch.state is not None:
            of_layers = {layer: one.states for layer, one in enumerate(memory) if one.states is not None}
            self._states.begin_step(batch.state, of_layers)
        step = attention.RunningStep(batch, memory, backends, plans, self.pages_of, self._layers)
        attention.run_within(step)
        try:
            return self._class.hidden_of(batch.token_ids, batch.positions, self._states)
        finally:
            attention.run_within(None)

    def compute_logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """Return the logits of rows [L, hidden] for this rank's vocabulary shard: float32 [L, vocab_local]."""
        assert adapters is None, "the class's code has no adapters"
        return self._built.head.mask_padding(self._class.logits_of(hidden))

    def one_of_each_kind(self) -> list[int]:
        """Return all layers: the class's code runs them all."""
        return list(self.stage)

    def with_layers(self, layers: list[int]) -> "TransformersModel":
        """Return this model; `layers` are all layers."""
        assert layers == list(self.stage), "the class's code runs all layers"
        return self

    def stand_in(self, token_ids: Tensor) -> Tensor | None:
        """Return None: the model begins with its embedding."""
        return None

    def mixtures(self) -> Sequence[Experts]:
        """Return none: the class's code calls its experts."""
        return ()

    def summed_outputs(self) -> Sequence[RowParallelLinear]:
        """Return none: bits depend on the number of ranks."""
        return ()

    def why_not_rank_invariant(self, memory: list[LayerMemory], backends: Mapping[int, AttentionBackend]) -> str | None:
        """Return a reason: the class's linear layers add up whole rows on one rank, and parts of them on several."""
        return NO_KERNELS
