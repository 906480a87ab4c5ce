"""An encoder on one rank: embeddings, layers, and a head where it makes scores.

Keeps no state between calls, and no keys or values: a step has each text whole.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.embedding import VocabParallelEmbedding
from oarlock.workers.layers.norm import LayerNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.rotary import RotaryTable
from oarlock.workers.layers.sharding import slices_for
from oarlock.workers.models.encoders.classifier import Classifier
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.models.encoders.layers import EncoderLayer
from oarlock.workers.models.encoders.registry import is_ignorable
from oarlock.workers.weights.source import WeightSource


class _Part(Protocol):
    """A layer that owns weights."""

    @property
    def weight_bytes(self) -> int: ...

    def load(self, weights: WeightSource) -> None: ...


class _Table:
    """A small embedding that every rank has whole: ids int64 [T] -> [T, hidden]."""

    def __init__(self, name: str, rows: int, hidden: int, place: Placement) -> None:
        self.name, self.shape, self.place = name, (rows, hidden), place

    @property
    def weight_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.place.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        self.weight = self.place.empty(*self.shape)
        weights.take(f"{self.name}.weight", self.weight, shape=self.shape)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)


class Encoder:
    """One rank's shard. It holds no weights until `load`."""

    def __init__(self, spec: EncoderSpec, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        # On other devices libraries compute the sums over ranks, and slices would only cost time.
        slices = slices_for(spec.num_heads, spec.num_heads, spec.intermediate_size) if device.type == "cpu" else 1
        self.place = place = Placement(tp, dtype, device, slices=slices)
        names, hidden, before = spec.names, spec.hidden_size, spec.prefix
        self.words = VocabParallelEmbedding(before + names.words, spec.vocab_size, hidden, place)
        self.positions = self.types = None
        if (first := spec.first_position) is not None:
            self.positions = _Table(before + names.positions, first + spec.max_positions, hidden, place)
        if spec.num_token_types:
            self.types = _Table(before + names.types, spec.num_token_types, hidden, place)
        self.embedding_norm = LayerNorm(before + names.embedding_norm, hidden, spec.norm_eps, spec.norm_bias, place)
        self.layers = [EncoderLayer(spec, layer, place) for layer in range(spec.num_layers)]
        self.final_norm = self.classifier = None
        if names.final_norm:
            self.final_norm = LayerNorm(before + names.final_norm, hidden, spec.norm_eps, spec.norm_bias, place)
        if spec.classifier is not None:
            self.classifier = Classifier(spec, spec.classifier, place)
        self.rotary = {rope: RotaryTable(rope, device) for rope in spec.ropes}

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self._parts())

    def load(self, weights: WeightSource, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slices. `on_progress` gets the share of bytes read, ending with 1.0."""
        total, done = self.weight_bytes, 0
        for part in self._parts():
            part.load(weights)
            done += part.weight_bytes
            on_progress(min(done / total, 0.999))
        weights.finish(lambda name: is_ignorable(self.spec, name))
        self.place.staging.release()
        on_progress(1.0)

    def _parts(self) -> Iterator[_Part]:
        tables = (self.words, self.positions, self.types, self.embedding_norm)
        yield from (part for part in tables if part is not None)
        for layer in self.layers:
            yield from layer.parts
        yield from (part for part in (self.final_norm, self.classifier) if part is not None)

    def __call__(self, token_ids: Tensor, positions: Tensor, types: Tensor, lens: Sequence[int]) -> Tensor:
        """One step -> [T, hidden]. All int64 [T]: ids, positions within each text, and which of two texts a token
        belongs to, 0 or 1. `lens`: tokens of each text."""
        hidden = self.words(token_ids).float()  # [T, hidden]
        if self.types is not None:
            hidden += self.types(types).float()
        if self.positions is not None and self.spec.first_position is not None:
            hidden += self.positions(positions + self.spec.first_position).float()
        hidden = self.embedding_norm(hidden)
        turns = {rope: table(positions, max(lens)) for rope, table in self.rotary.items()}
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, lens, turns[self.spec.ropes[number]] if turns else None)
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def classify(self, hidden: Tensor) -> Tensor:
        """Hidden states of one text [n, hidden] -> float32 [labels]."""
        assert self.classifier is not None
        return self.classifier(hidden)
