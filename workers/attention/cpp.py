"""Attention on the CPU: the C++ kernel reads pages in place, for any mix of query lengths and every ISA level.

This module calls the kernel. `kernels/cpu/csrc/attention/attention.cpp` describes the computation, and why the other
rows of the batch cannot change a row's bits; `attention.h` describes the layout of pages.
"""

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.structures import CAttentionLayer, CAttentionStep
from oarlock.workers.platform.huge_pages import huge_page_empty

_GROUP = 16  # positions that are stored together in a page
_MAX_HEAD = 576
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ROUNDED = {"int8": 1, "fp8": 2}  # `Pages` of `attention.h`


@dataclass(frozen=True, slots=True)
class CppPlan:
    """A step in the kernel's format, and the tensors that it points to, which must live until the step is done."""

    step: CAttentionStep
    tensors: tuple[Tensor, ...]


class CppBackend:
    """C++ attention backend. Pages have the shape [blocks, kv_heads, block_size, elements of a key or value], but the
    kernel uses its own order within a page. If keys contain the values, pages of values have no elements."""

    name: ClassVar[str] = "cpp"

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.type = _TYPES[spec.dtype]
        self._layers: dict[AttentionSpec, CAttentionLayer] = {}
        self.pages = _ROUNDED.get(spec.cache_dtype, 0)
        heads = spec.num_kv_heads
        self._pages = CAttentionLayer(
            heads,
            heads,
            spec.head_dim,
            spec.value_width,
            spec.block_size,
            0,
            0,
            1.0,
            0.0,
            self.pages,
            spec.value_in_key,
        )
        self.kernels = kernels = library.library(spec.dtype)
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._attend = kernels.oarlock_attend
        self._attend.argtypes = [
            pointer, pointer, pointer, number, pointer, number, pointer, pointer, pointer, ctypes.c_int,
        ]  # fmt: skip
        self._attend.restype = None
        self._write = kernels.oarlock_write_kv
        self._write.argtypes = [
            pointer, pointer, number, pointer, number, pointer, pointer, pointer, number, ctypes.c_int,
        ]  # fmt: skip
        self._write.restype = None

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"it runs on the CPU, but the model is on {spec.device.type}"
        if spec.dtype not in _TYPES:
            return f"it supports float32, bfloat16 and float16, not {spec.dtype}"
        if spec.block_size % _GROUP:
            return f"it needs a block size that is a multiple of {_GROUP}, not {spec.block_size}"
        for width in (spec.head_dim, spec.value_width):
            if width % _GROUP or width > _MAX_HEAD:
                return f"it needs heads of at most {_MAX_HEAD} elements in multiples of {_GROUP}, not {width}"
        return None if library.why_not(spec.dtype) is None else "the C++ kernels are not loaded"

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec
        shape, dtype = (num_blocks, spec.num_kv_heads, spec.block_size), spec.kv_format.dtype(spec.dtype)
        of_keys, of_values = spec.key_format.elements, spec.value_elements
        return [
            LayerKV(huge_page_empty((*shape, of_keys), dtype), huge_page_empty((*shape, of_values), dtype))
            for _ in range(spec.num_layers)
        ]

    def prepare(self, batch: ForwardBatch) -> CppPlan:
        tables, rows = batch.block_tables[self.spec.group].contiguous(), batch.rows.contiguous()
        starts, lens = batch.query_start_loc.contiguous(), batch.seq_lens.contiguous()
        assert tables.dtype == rows.dtype == starts.dtype == lens.dtype == torch.int32
        addresses = tables.data_ptr(), rows.data_ptr(), starts.data_ptr(), lens.data_ptr()
        return CppPlan(CAttentionStep(*addresses, rows.shape[0], tables.shape[1]), (tables, rows, starts, lens))

    def layer(self, layer: AttentionSpec) -> CAttentionLayer:
        """Return the kernel's structure for `layer`, which is made once."""
        made = self._layers.get(layer)
        if made is None:
            made = self._layers[layer] = CAttentionLayer(
                layer.num_heads, self.spec.num_kv_heads, layer.head_dim, self.spec.value_width, self.spec.block_size,
                layer.sliding_window or 0, layer.chunk or 0, layer.scale, layer.softcap or 0.0, self.pages,
                self.spec.value_in_key,
            )  # fmt: skip
        return made

    def write(self, kv: LayerKV, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        spec = self.spec
        slots = batch.slots[spec.group]
        assert k.stride(2) == 1 and k.stride(1) == spec.head_dim and slots.is_contiguous()
        assert (v is None) == spec.value_in_key
        assert v is None or (v.stride(2) == 1 and v.stride(1) == spec.value_width)
        values = (None, 0) if v is None else (v.data_ptr(), v.stride(0))
        self._write(
            ctypes.byref(self._pages), k.data_ptr(), k.stride(0), *values, kv.k.data_ptr(), kv.v.data_ptr(),
            slots.data_ptr(), len(slots), self.type,
        )  # fmt: skip

    def attend(
        self, q: Tensor, kv: LayerKV, plan: CppPlan, layer: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        (rows, heads, width), columns = q.shape, q.shape[1] * self.spec.value_width
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous())
        assert q.stride(2) == 1 and q.stride(1) == width
        out = torch.empty((rows, columns), dtype=q.dtype)
        self._attend(
            ctypes.byref(plan.step), ctypes.byref(self.layer(layer)), q.data_ptr(), q.stride(0), out.data_ptr(),
            columns, kv.k.data_ptr(), kv.v.data_ptr(), None if sinks is None else sinks.data_ptr(), self.type,
        )  # fmt: skip
        return out
