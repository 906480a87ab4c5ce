"""Reader of slices of a GGUF model's tensors into a rank's memory, either dequantised or as integers in groups.

Like `WeightReader` it reads ahead in pieces of a few mebibytes, and refuses a tensor that holds a NaN or an infinity. A
block of a type holds `elements` neighbours of a row in `size` bytes (`BlockType`). The byte layouts are ggml's
(ggml-common.h, and dequantize_row_* in ggml-quants.c), with one function here for each type.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_header import BY_NAME, FLOATS, GROUP_LAYOUTS, SERVED
from oarlock.workers.model_files.gguf_model import GGUFCheckpoint, GGUFTransform, Tiles, type_not_served
from oarlock.workers.model_files.located import LocatedTensor
from oarlock.workers.weights import float4
from oarlock.workers.weights.reader import CheckpointReader, WeightReader, first_not_finite, not_finite
from oarlock.workers.weights.source import DummyWeights, WeightSource, check_slice, wrong_shape


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a weight: weight[n, k] = values[n, k] * scales[n, k // group] + offsets[n, k // group]."""

    values: Tensor  # int8 [N, K]
    scales: Tensor  # float32 [N, ceil(K / group)]
    offsets: Tensor | None  # float32, the same shape
    group: int

    @staticmethod
    def empty(rows: int, inputs: int, group: int, *, offsets: bool) -> "Groups":
        """Allocate groups without initialising them, except for offsets, which are zero."""
        scales = torch.empty((rows, -(-inputs // group)))
        values = torch.empty((rows, inputs), dtype=torch.int8)
        return Groups(values, scales, torch.zeros_like(scales) if offsets else None, group)

    def rows(self, first: int, count: int) -> "Groups":
        """Return a view of `count` rows from `first` on."""
        part = slice(first, first + count)
        return Groups(
            self.values[part], self.scales[part], None if self.offsets is None else self.offsets[part], self.group
        )

    def inputs(self, count: int) -> "Groups":
        """Return a view of the first `count` inputs, which end with a group."""
        groups = slice(-(-count // self.group))
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return Groups(self.values[:, :count], self.scales[:, groups], offsets, self.group)

    def clear(self) -> None:
        """Set all values, scales and offsets to zero."""
        for part in (self.values, self.scales, self.offsets):
            if part is not None:
                part.zero_()

    def dequantised(self) -> Tensor:
        """Return the weight as float32 [N, K]."""
        group_of = torch.arange(self.values.shape[1]) // self.group
        weight = self.values.float() * self.scales[:, group_of]
        return weight if self.offsets is None else weight.add_(self.offsets[:, group_of])


def unpacked(kind: str, raw: Tensor) -> Groups:
    """Unpack rows of blocks, uint8 [N, bytes of a row]."""
    rows = len(raw)
    values, scales, offsets = _UNPACK[kind](raw.reshape(-1, BY_NAME[kind].size))
    offsets = None if offsets is None else offsets.reshape(rows, -1)
    return Groups(values.reshape(rows, -1), scales.reshape(rows, -1), offsets, GROUP_LAYOUTS[kind].group)


def _half(raw: Tensor, start: int) -> Tensor:
    """Return the float16 at byte `start` of each block: float32 [B, 1]."""
    return raw[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Unpack uint8 [B, n] to [B, 2 * n]: the lower halves of all bytes, then the upper halves."""
    return torch.cat((raw & 15, raw >> 4), 1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return bit k of each four bytes, as 16 or 0: uint8 [B, 4] -> [B, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (raw.unsqueeze(2) >> shifts & 1).view(len(raw), 32) << 4


def _signed(values: Tensor, zero: int) -> Tensor:
    """Return uint8 values minus `zero`, as int8."""
    return values.view(torch.int8) - zero


def _q4_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    return _signed(_nibbles(raw[:, 2:]), 8), _half(raw, 0), None


def _q4_1(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _half(raw, 0)
    return _signed(_nibbles(raw[:, 4:]), 8), scales, _half(raw, 2) + 8 * scales


def _q5_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    return _signed(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), 16), _half(raw, 0), None


def _q5_1(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _signed(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), 0), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    return raw[:, 2:].contiguous().view(torch.int8), _half(raw, 0), None


def _scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight pairs of 6-bit values in 12 bytes: uint8 [B, 12] -> float32 [B, 8] twice."""
    scale, minimum, both = raw.view(-1, 3, 4).unbind(1)
    scales = torch.cat((scale & 63, (both & 15) | (scale >> 2 & 48)), 1)
    minima = torch.cat((minimum & 63, (both >> 4) | (minimum >> 2 & 48)), 1)
    return scales.float(), minima.float()


def _q4_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales, minima = _scales_and_minima(raw[:, 4:16].contiguous())
    scales = _half(raw, 0) * scales
    values = _nibbles(raw[:, 16:].reshape(-1, 32)).view(-1, 256)  # 32 bytes are two groups of 32
    return _signed(values, 8), scales, 8 * scales - _half(raw, 2) * minima


def _q5_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales, minima = _scales_and_minima(raw[:, 4:16].contiguous())
    lower = _nibbles(raw[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    groups = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = (raw[:, 16:48].unsqueeze(1) >> groups & 1) << 4  # bit g of byte k belongs to value k of group g
    return _signed((lower | fifth).view(-1, 256), 0), _half(raw, 0) * scales, -_half(raw, 2) * minima


def _q6_k(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    lower = _nibbles(raw[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)  # each half of a block: four times 32 values
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    upper = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * _half(raw, 208)
    return _signed((lower | upper).view(-1, 256), 32), scales, None


def _mxfp4(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    scales = float4.scales_of(raw[:, :1]).masked_fill_(raw[:, :1] == float4.NOT_A_NUMBER, float("nan"))
    return float4.twice(_nibbles(raw[:, 1:])), scales, None


# uint8 [B, size of a block] -> values int8 [B, elements], scales float32 [B, groups], offsets the same or None
_UNPACK: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


CHUNK_BYTES = 4 << 20  # bytes of a file per read
_READS_AHEAD = 3
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFReader(CheckpointReader):
    """`WeightSource` over GGUF files."""

    _checkpoint: GGUFCheckpoint
    _use_another = "Use a file that llama.cpp's converter wrote; adapters must be merged first."

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        """See `WeightSource`. Blocks are dequantised in float32 and rounded to `into`'s dtype."""
        found = self._found(name, shape)
        check_slice(name, into, shape, dim, start)
        rows = (start, into.shape[0]) if dim == 0 else (0, shape[0])
        layout, kind = self._checkpoint.layout(name), found.entry.dtype
        cut = (start, into.shape[1]) if dim == 1 else (0, shape[1] if len(shape) > 1 else 0)
        columns = _stored_inputs(layout, *cut)
        for first, raw in self._rows(name, found, *rows):
            stored = raw.view(_DTYPES[kind]) if kind in FLOATS else unpacked(kind, raw).dequantised()
            if len(shape) == 2:
                stored = stored[:, columns]
            part = into[first : first + len(raw)]
            part.copy_(_value(layout, stored).view(part.shape))
            if self._check_finite and (index := first_not_finite(part)) is not None:
                raise not_finite(name, found, stored[index].item(), part.dtype)
            self._on_read()

    def take_groups(
        self, name: str, into: Groups, *, shape: Sequence[int], first_row: int = 0, first_input: int = 0
    ) -> None:
        """Fill `into` with rows and inputs of a tensor [N, K] of blocks, from `first_row` and `first_input` on.

        The group of `into` divides the group of the tensor's type, and `first_input`.
        """
        found = self._found(name, shape)
        inputs = into.values.shape[1]
        columns = _stored_inputs(self._checkpoint.layout(name), first_input, inputs)
        groups = slice(first_input // into.group, first_input // into.group + into.scales.shape[1])
        if not isinstance(columns, slice):
            starts = columns[:: into.group]
            assert all(starts % into.group == 0), f"{name}: groups are cut"
            groups = starts // into.group
        for first, raw in self._rows(name, found, first_row, len(into.values)):
            whole, part = unpacked(found.entry.dtype, raw), into.rows(first, len(raw))
            assert whole.group % into.group == 0 and first_input % into.group == 0, f"{name}: groups are cut"
            part.values.copy_(whole.values[:, columns])
            for kept, stored in ((part.scales, whole.scales), (part.offsets, whole.offsets)):
                if kept is not None and stored is not None:
                    kept.copy_(stored.repeat_interleave(whole.group // into.group, 1)[:, groups])
                    if self._check_finite and (index := first_not_finite(kept)) is not None:
                        raise not_finite(name, found, kept[index].item(), torch.float32)
            self._on_read()

    def _file_of(self, name: str) -> Path:
        return self._checkpoint.tensors[name].path

    def _find(self, name: str) -> LocatedTensor:
        found = self._checkpoint.find(name)
        if found is None:
            raise StartupError(
                f"the GGUF model described in {self._checkpoint.directory} holds no tensor {name!r}, which it needs.",
                "Use a file that holds the whole model.",
            )
        return found

    def _found(self, name: str, shape: Sequence[int]) -> LocatedTensor:
        found = self._find(name)
        if found.entry.shape != tuple(shape):
            raise wrong_shape(name, found.path.name, found.entry.shape, shape)
        if found.entry.dtype not in SERVED:
            raise type_not_served(name, found)
        self._taken.add(name)
        return found

    def _rows(self, name: str, found: LocatedTensor, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield stored rows `first` to `first + count` in Hugging Face's order, piece by piece.

        Each item is (row of the slice, uint8 [n, bytes of a row]). A vector has one row for each value.
        """
        entry, order = found.entry, self._checkpoint.layout(name)
        row_bytes = (entry.end - entry.begin) // found.stored_shape[0]
        at_once = max(1, CHUNK_BYTES // row_bytes)
        if order.interleaved_heads:  # whole heads, whose rows are permuted
            at_once = max(order.head_dim, at_once // order.head_dim * order.head_dim)
            assert first % order.head_dim == 0 and count % order.head_dim == 0, f"{name}: a slice cuts a head"
        running: deque[tuple[int, Tensor, Future[None]]] = deque()
        try:
            for offset, stored, rows in _runs(found, order.tiles, first, count, at_once):
                raw = torch.empty((rows, row_bytes), dtype=torch.uint8)
                begin = entry.begin + stored * row_bytes
                running.append((offset, raw, self._files.read(found.path, begin, raw, name)))
                if len(running) > _READS_AHEAD:
                    yield _finished(*running.popleft(), first, order)
            while running:
                yield _finished(*running.popleft(), first, order)
        finally:
            wait([done for _, _, done in running])  # the reads write to memory that is ours only until this returns


def _runs(
    found: LocatedTensor, tiles: Tiles | None, first: int, count: int, at_once: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (offset, stored row, number of rows) of pieces of at most `at_once` rows that are stored one after another,
    for rows `first` to `first + count` in Hugging Face's order."""
    offset = 0
    while offset < count:
        row, rows = first + offset, min(at_once, count - offset)
        if tiles is not None:
            row, together = tiles.stored(row)
            rows = min(rows, together)
        if found.step > 1:
            group, inside = divmod(row, found.block)
            row, rows = group * found.step + found.first + inside, min(rows, found.block - inside)
        yield offset, row, rows
        offset += rows


def _stored_inputs(layout: GGUFTransform, first: int, count: int) -> slice | Tensor:
    """Return the stored columns of inputs `first` to `first + count` in Hugging Face's order."""
    tiles = layout.tiles_of_inputs
    if tiles is None:
        return slice(first, first + count)
    return torch.tensor([tiles.stored(column)[0] for column in range(first, first + count)])


def _value(layout: GGUFTransform, stored: Tensor) -> Tensor:
    """Return Hugging Face's values of `stored`."""
    if layout.is_decay:
        return torch.log(-stored.double()).float()
    return stored.float() - layout.added if layout.added else stored


def _finished(offset: int, raw: Tensor, done: "Future[None]", first: int, order: GGUFTransform) -> tuple[int, Tensor]:
    done.result()
    heads = min(len(raw), max(0, order.interleaved_heads * order.head_dim - first - offset))
    if heads:
        pairs = raw[:heads].view(-1, order.head_dim // 2, 2, raw.shape[1])
        raw[:heads] = pairs.transpose(1, 2).reshape(heads, -1)
    return offset, raw


def weight_source(
    checkpoint: Checkpoint, *, check_finite: bool, on_read: Callable[[], None]
) -> WeightReader | GGUFReader:
    """Return a `WeightSource` to be closed, or used as a context manager. `on_read`: see `WeightReader`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return GGUFReader(checkpoint, check_finite=check_finite, on_read=on_read)
    return WeightReader(checkpoint, check_finite=check_finite, on_read=on_read)


def load_weights(
    load: Callable[[WeightSource, Callable[[float], None]], None],
    checkpoint: Checkpoint | None,
    *,
    seed: int,
    check_finite: bool,
    on_progress: Callable[[float], None],
) -> None:
    """Call a model's `load` with the weights of `checkpoint`; None: dummy weights of `seed`.

    `on_progress` gets the share loaded so far, even if it has not changed: each call is a sign of progress.
    """
    done = 0.0

    def report(fraction: float) -> None:
        nonlocal done
        done = fraction
        on_progress(fraction)

    if checkpoint is None:
        load(DummyWeights(seed), report)
        return
    with weight_source(checkpoint, check_finite=check_finite, on_read=lambda: on_progress(done)) as weights:
        load(weights, report)
