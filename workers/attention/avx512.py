"""Attention on processors with AVX-512: the C++ kernel reads pages in place, at any mix of query lengths.

Calls the kernel and counts its tiles. The computation, and why the rest of the batch cannot change a row's bits, are
described in `kernels/cpu/attention.cpp`.
"""

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from workers.attention.forward_batch import ForwardBatch
from workers.kernels.cpu import library

_GROUP = 16  # positions that lie side by side in a page
_TILE_ROWS = 12
_MAX_HEAD = 256
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(slots=True)
class _Plan:
    """The arrays of one step that the kernel reads. They must live until the step is done."""

    tables: np.ndarray  # int32 [S, B]
    query_start_loc: np.ndarray  # int32 [S + 1]
    seq_lens: np.ndarray  # int32 [S]
    tile_starts: dict[int, np.ndarray]  # heads per KV head -> int32 [S + 1]


class Avx512Backend:
    """Pages are allocated as `[blocks, kv_heads, block_size, head_dim]`; the kernel has its own order inside a page."""

    name: ClassVar[str] = "avx512"

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.type = _TYPES[spec.dtype]
        kernels = library.library()
        pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        self._attend = kernels.oarlock_attend
        self._attend.argtypes = [*[pointer] * 8, *[number] * 9, real, real, ctypes.c_int]
        self._attend.restype = None
        self._write = kernels.oarlock_write
        self._write.argtypes = [*[pointer] * 5, *[number] * 6, ctypes.c_int]
        self._write.restype = None

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"it computes on the CPU and the model is on {spec.device.type}"
        if spec.dtype not in _TYPES:
            return f"it knows float32, bfloat16 and float16, not {spec.dtype}"
        if spec.block_size % _GROUP:
            return f"it wants a block size that is a multiple of {_GROUP}, not {spec.block_size}"
        if spec.head_dim % _GROUP or spec.head_dim > _MAX_HEAD:
            return f"it wants heads of up to {_MAX_HEAD} elements in multiples of {_GROUP}, not {spec.head_dim}"
        return None if library.provides("oarlock_attend") else library.why_not() or "the kernel needs AVX512-BF16"

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        return [
            LayerKV(torch.zeros(shape, dtype=spec.dtype), torch.zeros(shape, dtype=spec.dtype))
            for _ in range(spec.num_layers)
        ]

    def prepare(self, batch: ForwardBatch) -> _Plan:
        return _Plan(batch.block_tables.numpy(), batch.query_start_loc.numpy(), batch.seq_lens.numpy(), {})

    def write(self, kv: LayerKV, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        spec = self.spec
        slots = batch.slot_mapping
        assert k.stride(2) == v.stride(2) == 1 and k.stride(1) == v.stride(1) == spec.head_dim and slots.is_contiguous()
        self._write(
            k.data_ptr(), v.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(), slots.data_ptr(), len(slots),
            k.stride(0), v.stride(0), spec.num_kv_heads, spec.head_dim, spec.block_size, self.type,
        )  # fmt: skip

    def attend(self, q: Tensor, kv: LayerKV, plan: _Plan, layer: AttentionSpec) -> Tensor:
        rows, heads, width = q.shape
        spec = self.spec
        assert q.stride(2) == 1 and q.stride(1) == width
        num_queries_per_kv = heads // spec.num_kv_heads
        starts = plan.tile_starts.get(num_queries_per_kv)
        if starts is None:
            starts = plan.tile_starts[num_queries_per_kv] = _tile_starts(plan.query_start_loc, num_queries_per_kv)
        out = torch.empty((rows, heads * width), dtype=q.dtype)
        self._attend(
            q.data_ptr(), out.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(), plan.tables.ctypes.data,
            plan.query_start_loc.ctypes.data, plan.seq_lens.ctypes.data, starts.ctypes.data,
            len(plan.seq_lens), plan.tables.shape[1], q.stride(0), heads * width, heads, spec.num_kv_heads, width,
            spec.block_size, layer.sliding_window or 0, layer.scale, layer.softcap or 0.0, self.type,
        )  # fmt: skip
        return out


def _tile_starts(query_start_loc: np.ndarray, num_queries_per_kv: int) -> np.ndarray:
    """Number of tiles of all sequences before each one, and of all together last: int32 [S + 1]."""
    tiles = -(-np.diff(query_start_loc) * num_queries_per_kv // _TILE_ROWS)
    return np.concatenate([[0], np.cumsum(tiles)]).astype(np.int32)
