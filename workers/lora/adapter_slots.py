"""A rank's memory for adapters: fixed slots, filled from copies of adapters in host memory.

`AdapterSlots` finds the layers of the rank that adapters may update, and allocates memory for every slot once, so that
its bytes are known before. A `HostAdapter` is an adapter's cut for this rank, read once (`rank_adapter.py`); putting it
into a slot only copies memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import StepRows
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_shard
from oarlock.workers.layers.experts import ExpertStack
from oarlock.workers.layers.linear import (
    ColumnParallelLinear,
    GatedParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from oarlock.workers.lora.adapted_experts import AdaptedExperts
from oarlock.workers.lora.adapted_layers import AdaptedEmbedding
from oarlock.workers.lora.adapted_modules import EMBEDDING, HEAD
from oarlock.workers.lora.cpp_layers import column_layer, expert_stack, row_layer
from oarlock.workers.lora.device_layers import DeviceColumnLayer, DeviceEmbedding, DeviceRowLayer
from oarlock.workers.lora.device_pairs import DevicePairs
from oarlock.workers.lora.low_rank import LayerPairs, RankPair, pair_bytes
from oarlock.workers.lora.target_modules import Targets, is_chosen
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.quantization.method import StoredRows, WeightShard

_ColumnLayers = QKVParallelLinear | ColumnParallelLinear | GatedParallelLinear


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """One adapter's pairs on a rank, in host memory, by the index of a matrix in `AdapterSlots.shards`."""

    digest: str
    pairs: Mapping[int, Sequence[RankPair]]

    def pinned(self) -> "HostAdapter":
        """Return a copy in pinned memory. Copies from there to a device run while the host continues."""

        def copy(half: Tensor) -> Tensor:
            return torch.empty(half.shape, dtype=half.dtype, pin_memory=True).copy_(half)

        pairs = {
            index: [replace(pair, a=copy(pair.a), b=copy(pair.b)) for pair in held]
            for index, held in self.pairs.items()
        }
        return replace(self, pairs=pairs)


class AdapterSlots:
    """Memory of `slots` adapters of up to `max_rank` for a decoder whose weights are loaded. Slots count from 1."""

    def __init__(self, model: Decoder, slots: int, max_rank: int, targets: Targets = None) -> None:
        """Allocate the memory, and make the model's layers read it.

        `targets`: the modules that adapters may update (`target_modules.py`); None: all.
        """
        self.model, self.num_slots, self.max_rank, self.targets = model, slots, max_rank, targets
        self.shards: list[WeightShard] = []  # shard of each matrix that can be adapted
        self.pairs: list[LayerPairs] = []
        self.digests: dict[int, str] = {}  # slot -> digest of its adapter
        self._experts: list[AdaptedExperts] = []
        kind = DevicePairs if availability.can_serve(model.placement.device) else LayerPairs
        for layer, shards in adapted_layers(model, targets):
            own = [kind(shard, slots, max_rank, model.placement) for shard in shards]
            self.shards += shards
            self.pairs += own
            adapted = _attach(layer, own, model)
            self._experts += [adapted] if isinstance(adapted, AdaptedExperts) else []
        model.parts_were_replaced()

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(pairs.num_bytes for pairs in self.pairs)

    def put(self, adapter: HostAdapter, slot: int) -> None:
        """Copy an adapter into `slot`, whose previous adapter no request of this or a later step may use."""
        assert 1 <= slot <= self.num_slots, f"slot {slot} of {self.num_slots}"
        for index, pairs in enumerate(self.pairs):
            held = adapter.pairs.get(index, ())
            if held or slot in pairs.used:
                pairs.put(slot, held)
        self.digests[slot] = adapter.digest
        self._note_slots()

    def clear(self, slot: int) -> None:
        """Remove the adapter in `slot`, if there is one. The memory stays."""
        for pairs in self.pairs:
            if slot in pairs.used:
                pairs.put(slot, ())
        self.digests.pop(slot, None)
        self._note_slots()

    def _note_slots(self) -> None:
        """Note which slots have an adapter of experts, after a change of a slot."""
        for experts in self._experts:
            experts.note_slots()


def slot_bytes(model: Decoder, max_rank: int, targets: Targets = None) -> int:
    """Return the bytes of one slot on this rank, also known before the weights are loaded."""
    item = model.placement.dtype.itemsize
    found = adapted_layers(model, targets)
    return sum(pair_bytes(shard, max_rank, item) for _, shards in found for shard in shards)


def adapted_layers(model: Decoder, targets: Targets) -> Iterator[tuple[object, list[WeightShard]]]:
    """Yield the rank's layers that adapters of `targets` may update, each with the shards of its pairs."""
    for layer in model.parts:
        if isinstance(layer, VocabParallelHead):
            shards, modules = [vocab_shard(layer)], [HEAD]  # its matrix may be the embedding's
        elif isinstance(layer, _ColumnLayers | RowParallelLinear):
            shards = [layer.weight_shard]
            modules = [part.name for part in layer.weight_shard.parts]
        elif isinstance(layer, ExpertStack):
            shards = layer.shards
            modules = [part.name for shard in shards[:2] for part in shard.parts]  # experts are alike
        elif isinstance(layer, VocabParallelEmbedding) and layer is model.embedding and model.is_first:
            shards, modules = [_of_tokens(layer)], [EMBEDDING]
        else:
            continue
        if is_chosen(modules, targets):
            yield layer, shards


def _of_tokens(layer: VocabParallelEmbedding) -> WeightShard:
    """Return the shard of an embedding's pair: its inputs are tokens, its outputs are the hidden values."""
    rows = (StoredRows(layer.name, layer.hidden, 0, layer.hidden),)
    return WeightShard(rows, layer.vocab_size, min(layer.start, layer.vocab_size), layer.local)


def _attach(layer: object, pairs: list[LayerPairs], model: Decoder) -> object:
    """Make `layer` read `pairs` in steps with adapters. Return its computation in such steps."""
    rows = model.step_rows
    if pairs and isinstance(pairs[0], DevicePairs):
        return _attach_kernels(layer, pairs[0], rows)
    if isinstance(layer, RowParallelLinear):
        return row_layer(layer, pairs[0], rows)
    if isinstance(layer, _ColumnLayers | VocabParallelHead):
        return column_layer(layer, pairs[0], rows)
    if isinstance(layer, ExpertStack):  # a rank may have no expert, and so no pairs
        return expert_stack(layer, pairs, rows)
    assert isinstance(layer, VocabParallelEmbedding)
    layer.adapted = AdaptedEmbedding(layer, pairs[0], rows)
    return layer.adapted


def _attach_kernels(layer: object, pairs: DevicePairs, rows: StepRows) -> object:
    """Do the same on a device with Triton kernels."""
    if isinstance(layer, RowParallelLinear):
        layer.adapted = DeviceRowLayer(layer, pairs, rows)
    elif isinstance(layer, _ColumnLayers | VocabParallelHead):
        layer.adapted = DeviceColumnLayer(layer, pairs, rows)
    else:
        assert isinstance(layer, VocabParallelEmbedding), f"no kernel adapts a {type(layer).__name__}"
        layer.adapted = DeviceEmbedding(layer, pairs, rows)
    return layer.adapted
