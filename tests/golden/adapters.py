"""Adapters with random values for any model, and the models that they are merged into, in float64."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, KVSpec
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.layers.decoder_spec import tensors_of
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_pair import AdapterMatrix, AdapterPair
from oarlock.workers.lora.adapter_slots import AdapterSlots
from oarlock.workers.lora.rank_adapter import read_adapter
from oarlock.workers.model_files.located import LocatedTensor, TensorEntry
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.weights.source import WeightSource
from tests.golden.paged_run import PagedRun

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True)
class Update:
    """The update of one module: `scale * b @ a` is added to its weight."""

    module: str
    scale: float
    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    is_table: bool = False  # of an embedding: its inputs are tokens, and its weight has a row for each

    @property
    def merged(self) -> Tensor:
        """What is added to the weight: float64, of its shape."""
        update = self.scale * self.b.double() @ self.a.double()
        return update.T if self.is_table else update


def random_updates(
    model: Decoder, rank: int, seed: int, keep: Callable[[str], bool] = lambda name: True
) -> list[Update]:
    """Draw an update of every module of `model`, on one rank, that `keep` accepts; as large as its weights."""
    draw, found = torch.Generator().manual_seed(seed), []
    shapes = {tensor.name: tensor.shape for tensor in tensors_of(model.spec)}
    for shard in AdapterSlots(model, 1, 1).shards:
        for part in shard.parts:
            own = 1 + (rank - 1) * (len(found) % 3) // 2  # ranks differ
            is_table = part.name == model.embedding.name
            outputs, inputs = shapes[f"{part.name}.weight"][:: -1 if is_table else 1]
            a = torch.randn((own, inputs), generator=draw) * (1.0 if is_table else inputs**-0.5)
            b = torch.randn((outputs, own), generator=draw)
            if keep(part.name):
                found.append(
                    Update(
                        part.name, 0.05 + 0.1 * (len(found) % 5), a.bfloat16().float(), b.bfloat16().float(), is_table
                    )
                )
    return found


def write_adapter(path: Path, updates: Sequence[Update], dtype: torch.dtype = torch.float32) -> Adapter:
    """Write the tensors to `path`, a safetensors file, and describe them."""
    halves = [{f"{one.module}.a": one.a, f"{one.module}.b": one.b} for one in updates]
    tensors = {name: half.to(dtype) for pair in halves for name, half in pair.items()}
    save_file(tensors, path)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))

    def matrix(name: str) -> AdapterMatrix:
        entry = TensorEntry(_NAMES[dtype], tuple(header[name]["shape"]), *header[name]["data_offsets"])
        return AdapterMatrix.whole(name, LocatedTensor(path, entry))

    pairs = [
        AdapterPair(one.module, len(one.a), one.scale, matrix(f"{one.module}.a"), matrix(f"{one.module}.b"))
        for one in updates
    ]
    adapter = Adapter(path.stem, path.parent, tuple(pairs), path.stat().st_size)
    vars(adapter)["digest"] = path.stem  # several adapters are in one directory, which has no digest
    return adapter


def adapted_run(decoder: Decoder, adapters: Iterable[Adapter], max_rank: int = 8, slots: int = 4) -> PagedRun:
    """Return a run of `decoder` with number n of `adapters` in slot n + 1."""
    memory = AdapterSlots(decoder, slots, max_rank)
    for number, adapter in enumerate(adapters):
        memory.put(read_adapter(adapter, memory), number + 1)
    return PagedRun(decoder, fastest)


def fastest(spec: KVSpec) -> AttentionBackend:
    """Return the backend with kernels if it has any for these pages, else the reference."""
    return (CppBackend if CppBackend.why_not(spec) is None else ReferenceBackend)(spec)


class MergedWeights:
    """`WeightSource` of a model that updates are merged into, in float64 before one rounding."""

    def __init__(self, weights: WeightSource, updates: Iterable[Update]) -> None:
        self._weights = weights
        self._updates = {f"{one.module}.weight": one for one in updates}

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._weights.shape_of(name)

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        self._weights.finish(ignorable)
        assert not self._updates, f"not merged: {list(self._updates)}"

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        exact = torch.empty(into.shape, dtype=torch.float64)
        self._weights.take(name, exact, shape=shape, dim=dim, start=start)
        if name in self._updates:
            one = self._updates.pop(name)
            exact += one.merged.narrow(dim, start, into.shape[dim])
        into.copy_(exact)
