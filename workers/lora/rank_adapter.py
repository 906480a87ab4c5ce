"""Reader of an adapter's cut for one rank: the columns of A and the rows of B that its layers need."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.base.watched_reads import OnRead, ignore_progress
from oarlock.workers.layers.decoder_spec import is_in_stage
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_pair import AdapterMatrix, AdapterPair, Lines
from oarlock.workers.lora.adapter_slots import AdapterSlots, HostAdapter
from oarlock.workers.lora.low_rank import RankPair
from oarlock.workers.lora.target_modules import NOT_ADAPTED, check_adapter
from oarlock.workers.model_files.located import LocatedTensor
from oarlock.workers.quantization.method import StoredRows, WeightShard
from oarlock.workers.weights.reader import FileReader, first_not_finite, not_finite

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def read_adapter(adapter: Adapter, slots: AdapterSlots, on_read: OnRead = ignore_progress) -> HostAdapter:
    """Read this rank's cut of `adapter` into host memory. `on_read` is called after each piece of a tensor.

    Raises `StartupError` for a rank above the slots', for a module that the rank's model cannot adapt, for a file that
    was cut short, and for values that are not finite or too large for the model's dtype.
    """
    model = slots.model
    check_adapter(adapter, model.spec, slots.max_rank, slots.targets, model.placement.device.type)
    places = {
        part.name: (at, number) for at, shard in enumerate(slots.shards) for number, part in enumerate(shard.parts)
    }
    for pair in adapter.pairs:
        if pair.module not in places and not _is_elsewhere(pair, slots):
            raise StartupError(
                f"adapter {adapter.name!r} updates {pair.module}, which cannot be adapted here.",
                NOT_ADAPTED,
            )
    pairs = [pair for pair in adapter.pairs if pair.module in places]
    found: dict[int, list[RankPair]] = {}
    tensors = _Tensors(pairs, on_read)
    try:
        for pair in pairs:
            at, part = places[pair.module]
            found.setdefault(at, []).append(_cut(pair, slots.shards[at], part, model.placement.dtype, tensors))
    finally:
        tensors.close()
    return HostAdapter(adapter.digest, found)


def _is_elsewhere(pair: AdapterPair, slots: AdapterSlots) -> bool:
    """Return whether only other stages or ranks have the pair's module."""
    model = slots.model
    is_remote = pair.module.rpartition(".")[0] in model.remote_experts
    return is_remote or not is_in_stage(model.spec, f"{pair.module}.weight", model.stage)


class _Tensors:
    """Stored tensors, each read once and kept until its last use: all experts of a layer may share one."""

    def __init__(self, pairs: Sequence[AdapterPair], on_read: OnRead) -> None:
        self._files, self._on_read = FileReader(), on_read
        self._left = Counter(half.located for pair in pairs for half in (pair.a, pair.b))
        self._kept: dict[LocatedTensor, Tensor] = {}

    def take(self, matrix: AdapterMatrix) -> Tensor:
        """Return the whole stored tensor of half a pair. Raise `StartupError` if it cannot be read."""
        located = matrix.located
        whole = self._kept.pop(located, None)
        if whole is None:
            whole = self._read(matrix)
        self._left[located] -= 1
        if self._left[located]:
            self._kept[located] = whole
        return whole

    def _read(self, matrix: AdapterMatrix) -> Tensor:
        entry, path = matrix.located.entry, matrix.located.path
        stored = _DTYPES.get(entry.dtype)
        if stored is None:
            raise StartupError(
                f"{path}: tensor {matrix.name!r} is {entry.dtype}, which adapters cannot have here.",
                "Save the adapter in bfloat16, float16 or float32.",
            )
        whole = torch.empty(entry.shape, dtype=stored)
        self._files.fill(path, entry.begin, whole, matrix.name, self._on_read)
        return whole

    def close(self) -> None:
        """Close the file."""
        self._files.close()


def _cut(pair: AdapterPair, shard: WeightShard, part: int, dtype: torch.dtype, tensors: _Tensors) -> RankPair:
    """Read a pair and cut it for part `part` of `shard`. Values beyond the stored matrix, such as the padding
    of experts' widths, are zero."""
    rows: StoredRows = shard.parts[part]
    a, b = _half(pair.a, dtype, tensors), _half(pair.b, dtype, tensors)
    local_a = torch.zeros((pair.rank, shard.local_inputs), dtype=dtype)
    held = a[:, shard.first_input : shard.first_input + shard.local_inputs]
    local_a[:, : held.shape[1]] = held
    local_b = torch.zeros((pair.rank, rows.count), dtype=dtype)
    held = b[rows.first : rows.first + rows.count]
    local_b[:, : len(held)] = held.T
    return RankPair(part, pair.scale, local_a, local_b)


def _half(matrix: AdapterMatrix, dtype: torch.dtype, tensors: _Tensors) -> Tensor:
    """Return half of a pair: [rank, inputs] or [outputs, rank]."""
    whole = tensors.take(matrix)
    chosen = whole[_index(matrix.rows)][:, _index(matrix.columns)]
    values = (chosen.T if matrix.transposed else chosen).to(dtype)
    if (at := first_not_finite(values)) is not None:
        value = float(chosen.T[at] if matrix.transposed else chosen[at])
        raise not_finite(matrix.name, matrix.located, value, dtype)
    return values


def _index(lines: Lines) -> slice | Tensor:
    """Return the index of `lines` among the stored ones."""
    numbers = lines.numbers()
    if isinstance(numbers, range):
        return slice(numbers.start, numbers.stop, numbers.step)
    return torch.tensor(numbers)
