"""Offsets of the arrays in a step's bytes and in its answer's, decided by the lengths that stand in the header.

Behind the header the arrays follow one another, each at a multiple of 64 bytes, so that the lengths are all that both
sides must agree on. Steps that follow one another mostly have the same lengths: offsets are kept by them. Imports
numpy, not torch. Does not know what arrays mean.
"""

import math
import struct
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from oarlock.workers.kv_offload import DIGEST_BYTES
from oarlock.workers.sampling_parameters import PENALTIES, ROWS

_ALIGN = 64
_KEPT = 256  # layouts of each kind; a few KiB each


class StepShape(NamedTuple):
    """Lengths of the arrays of a step or of its answer, in the order of the header. The letters are those of
    `oarlock.workers.protocol`."""

    num_seqs: int = 0  # S
    num_tokens: int = 0  # T
    num_table_entries: int = 0  # N
    num_rows: int = 0  # L
    num_biases: int = 0  # M
    num_penalized: int = 0  # P
    num_history_ids: int = 0  # H
    num_masks: int = 0  # G
    num_mask_words: int = 0  # W
    num_drafting: int = 0  # D
    num_histories: int = 0  # F
    num_copies: int = 0  # C
    num_pooled: int = 0  # Q
    num_pooled_values: int = 0  # X


# magic, step id, the shape, the largest number of top logprobs of an answer, a mark; then a checksum of all before it
HEADER = struct.Struct(f"<IQ{len(StepShape._fields)}Ii?")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = HEADER.size + CHECKSUM.size

_I4, _U4, _I8, _F4, _U1 = (np.dtype(code) for code in ("<i4", "<u4", "<i8", "<f4", "|u1"))
_Array = tuple[str, np.dtype, tuple[int, ...]]  # name, dtype and shape


class _Place(NamedTuple):
    """One array that is not empty."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of all arrays in a buffer."""

    num_bytes: int  # header included
    places: tuple[_Place, ...]  # in the buffer's order, without the empty ones
    empty: dict[str, np.ndarray]  # the others, each of its dtype and shape

    def views(self, buffer: memoryview) -> dict[str, np.ndarray]:
        """Arrays by name; those that are not empty are views of `buffer`."""
        views = self.empty.copy()
        for name, dtype, shape, count, offset in self.places:
            flat = np.frombuffer(buffer, dtype, count, offset)
            views[name] = flat if len(shape) == 1 else flat.reshape(shape)
        return views

    def write(self, buffer: memoryview, source: object, without: str = "") -> None:
        """Copy each array from the attribute of `source` that has its name, but for the array `without`."""
        for name, dtype, shape, count, offset in self.places:
            if name != without:
                flat = np.frombuffer(buffer, dtype, count, offset)
                flat[...] = getattr(source, name) if len(shape) == 1 else getattr(source, name).ravel()

    def span(self, name: str) -> tuple[int, int]:
        """Begin and end of an array in the buffer, in bytes; (0, 0) if it is empty."""
        for place in self.places:
            if place.name == name:
                return place.offset, place.offset + aligned(place.count * place.dtype.itemsize)
        return 0, 0


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return (num_bytes + _ALIGN - 1) // _ALIGN * _ALIGN


@lru_cache(_KEPT)
def step_layout(shape: StepShape) -> Layout:
    """The layout of a step."""
    return _layout(_step_arrays(shape))


@lru_cache(_KEPT)
def output_layout(shape: StepShape, num_top: int) -> Layout:
    """The layout of an answer with `num_top` top logprobs in each row; -1: without logprobs."""
    return _layout(_output_arrays(shape, num_top))


def _layout(arrays: list[_Array]) -> Layout:
    places: list[_Place] = []
    empty: dict[str, np.ndarray] = {}
    offset = aligned(HEADER_BYTES)
    for name, dtype, shape in arrays:
        count = math.prod(shape)
        if count:
            places.append(_Place(name, dtype, shape, count, offset))
            offset += aligned(count * dtype.itemsize)
        else:
            empty[name] = _empty(shape, dtype)
    return Layout(offset, tuple(places), empty)


@lru_cache(_KEPT)
def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without elements, the same for all that have this shape."""
    return np.empty(shape, dtype)


def _ints(names: str, count: int, dtype: np.dtype = _I4) -> list[_Array]:
    """Arrays of `count` numbers each, by the words of `names`."""
    return [(name, dtype, (count,)) for name in names.split()]


_floats = partial(_ints, dtype=_F4)


def _step_arrays(shape: StepShape) -> list[_Array]:
    rows = shape.num_rows
    return [
        *_ints("token_ids positions", shape.num_tokens),
        ("slot_mapping", _I8, (shape.num_tokens,)),
        *_ints("query_start_loc", shape.num_seqs + 1),
        *_ints("seq_lens rows", shape.num_seqs),
        *_ints("table_rows table_columns table_blocks", shape.num_table_entries),
        *_ints("logits_indices target_ids sample_positions", rows),
        *((row.column, np.dtype(row.dtype), (rows,)) for row in ROWS),
        ("seeds", _I8, (rows,)),
        *_ints("num_logprobs", rows),
        *_ints("bias_rows bias_ids", shape.num_biases),
        *_floats("bias_values", shape.num_biases),
        *_ints("penalty_rows", shape.num_penalized),
        *((row.column, np.dtype(row.dtype), (shape.num_penalized,)) for row in PENALTIES),
        *_ints("history_rows", shape.num_histories),
        *_ints("history_starts", shape.num_histories + 1),
        *_ints("history_ids history_counts", shape.num_history_ids),
        *_ints("mask_rows", shape.num_masks),
        ("mask_bits", _U4, (shape.num_masks, shape.num_mask_words)),
        *_ints("num_drafts", shape.num_drafting),
        *_ints("pool_seqs pool_kinds pool_lens pool_second pool_num_ids", shape.num_pooled),
        *_ints("pool_ids", shape.num_pooled_values),
        ("kv_copies", _I4, (shape.num_copies, 3)),
        ("kv_digests", _U1, (shape.num_copies, DIGEST_BYTES)),
    ]


def _output_arrays(shape: StepShape, num_top: int) -> list[_Array]:
    rows = shape.num_rows
    arrays: list[_Array] = [("token_ids", _I4, (rows,)), ("finite", _U1, (rows,))]
    if num_top >= 0:
        arrays += [*_floats("logprobs", rows), *_ints("ranks", rows)]
        arrays += [("top_ids", _I4, (rows, num_top)), ("top_logprobs", _F4, (rows, num_top))]
    if shape.num_drafting:
        arrays.append(("num_accepted", _I4, (shape.num_drafting,)))
    if shape.num_pooled:
        arrays += [("pooled_lens", _I4, (shape.num_pooled,)), ("pooled", _F4, (shape.num_pooled_values,))]
    return arrays
