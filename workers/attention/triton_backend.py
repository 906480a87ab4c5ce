"""Attention on GPUs by Triton kernels that read pages in place (`kernels/triton/paged_attention.py`).

`triton_tiles.py` plans the tiles of query tokens; this module knows their shapes, the pages and the launches.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.triton_tiles import Planned, TiledBackend, TileShape, power_of_2
from oarlock.workers.kernels.triton import availability

TYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD = 256
_WRITTEN = 16  # tokens written by one program


def tile_shapes(
    head_dim: int, dtype: torch.dtype, kv_format: str = "", *, wide: bool = False
) -> tuple[TileShape, TileShape]:
    """Return the tile shapes for few query rows, and for many.

    `kv_format`: format of 8-bit pages. `wide`: matmuls read their operands from shared memory (compute capabilities 9
    and 10), which leaves registers for wider tiles.

    With few rows, reading the keys takes all the time. More stages keep more reads in flight, and one stage waits for
    block tables. float32 needs so many registers that large tiles gain nothing.
    """
    if dtype == torch.float32:
        small = TileShape(16, 32, 4 if head_dim <= 64 else 8, 3 if head_dim <= 64 else 2)
        return small, small
    if head_dim <= 128 and kv_format == "int8":
        return TileShape(16, 32, 4, 3), TileShape(64, 32, 4, 2)
    if head_dim <= 128:
        return TileShape(16, 64, 4, 5), TileShape(128, 64 if wide else 32, 8, 3)
    return TileShape(16, 32, 4, 3), TileShape(64, 16 if wide and kv_format == "int8" else 32, 8, 2)


class TritonBackend(TiledBackend):
    """Triton backend. Pages have the shape [blocks, kv_heads, elements of a page]; see `kernels/triton/kv_pages.py`."""

    name: ClassVar[str] = "triton"

    def __init__(self, spec: KVSpec) -> None:
        from oarlock.workers.kernels.triton import kv_pages, paged_attention  # Triton is not installed everywhere

        super().__init__(spec)
        self._fused: Any = kv_pages
        self._kernels: Any = paged_attention  # a call of a kernel compiles it: no annotation describes its arguments

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        reason = availability.why_not(spec.device)
        if reason is not None:
            return reason
        if spec.dtype not in TYPES:
            return f"it supports float32, float16 and bfloat16, not {spec.dtype}"
        if spec.value_in_key:
            return "its kernels read values from pages of their own"
        if spec.value_width != spec.head_dim:
            return f"it needs keys and values of one width, not {spec.head_dim} and {spec.value_width}"
        if spec.head_dim > _MAX_HEAD:
            return f"it needs heads of at most {_MAX_HEAD} elements, not {spec.head_dim}"
        if spec.fixed_span is not None and spec.cache_dtype == "int8" and spec.dtype == torch.float16:
            return "in int8 pages with float16, the precision of a token depends on the other tokens of its block"
        return None

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec
        shape = (num_blocks, spec.num_kv_heads, spec.block_size * spec.kv_format.elements(spec.head_dim))

        def pages() -> Tensor:
            return torch.zeros(shape, dtype=spec.kv_format.dtype(spec.dtype), device=spec.device)

        return [LayerKV(pages(), pages()) for _ in range(spec.num_layers)]

    @staticmethod
    def _pages(kv: LayerKV) -> tuple[Tensor, ...]:
        """Return the pages of keys and of values, and views of them as 16-bit elements for the scales."""
        if kv.k.dtype != torch.uint8:
            return kv.k, kv.v, kv.k, kv.v
        return kv.k, kv.v, kv.k.view(torch.int16), kv.v.view(torch.int16)

    def write(self, kv: LayerKV, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        spec = self.spec
        assert v is not None, "values have pages of their own"
        assert k.stride(2) == v.stride(2) == 1 and k.stride(1) == v.stride(1) == spec.head_dim
        self._kernels.write_kv[(-(-batch.num_tokens // _WRITTEN), spec.num_kv_heads)](
            k, v, *self._pages(kv), batch.slots[spec.group], batch.num_tokens, k.stride(0), v.stride(0),
            KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim, BLOCK_SIZE=spec.block_size,
            BLOCK_T=_WRITTEN, BLOCK_D=power_of_2(spec.head_dim), FORMAT=self._kv_format,
        )  # fmt: skip

    def rotate_and_write(
        self,
        kv: LayerKV,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        *,
        norms_last: bool = False,
        pairs_neighbours: bool = False,
        query_scale: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries and keys, and write keys and values, as `FusedBackend` describes."""
        spec = self.spec
        rows, heads, width = qkv.shape[0], qkv.shape[1] - 2 * spec.num_kv_heads, spec.head_dim
        assert qkv.stride(2) == 1 and qkv.stride(1) == width and cos.is_contiguous() and sin.is_contiguous()
        q = torch.empty((rows, heads, width), dtype=qkv.dtype, device=qkv.device)
        weight, eps = norm or (cos, 0.0)
        self._fused.rotate_and_write[(rows, heads + 2 * spec.num_kv_heads)](
            qkv, q, *self._pages(kv), batch.slots[spec.group], cos, sin, weight,
            cos if query_scale is None else query_scale, eps, qkv.stride(0),
            HEADS=heads, KV_HEADS=spec.num_kv_heads, HEAD_DIM=width, ROTARY=cos.shape[-1], BLOCK_SIZE=spec.block_size,
            BLOCK_D=power_of_2(width), NORM=norm is not None, NORMS_LAST=norms_last, NEIGHBOURS=pairs_neighbours,
            SCALED=query_scale is not None, num_warps=1, FORMAT=self._kv_format,
        )  # fmt: skip
        return q

    def _tile_shapes(self, heads: int) -> tuple[TileShape, TileShape]:
        """Return the shapes for few rows and for many. A tile has the rows of at least one token."""
        spec, least = self.spec, power_of_2(heads // self.spec.num_kv_heads)
        shapes = tile_shapes(spec.head_dim, spec.dtype, self._kv_format, wide=self.is_wide)
        small, large = (replace(shape, rows=max(shape.rows, least)) for shape in shapes)
        return small, large

    def _group(self, heads: int, shape: TileShape) -> int:
        return heads // self.spec.num_kv_heads

    def _compute(
        self,
        q: Tensor,
        kv: LayerKV,
        batch: ForwardBatch,
        layer: AttentionSpec,
        part: Planned,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        spec, tiles, num_programs = self.spec, part.tiles, part.shares.num_programs
        shape, tables = tiles.shape, batch.block_tables[spec.group]
        partial_out, partial_stats = part.partial or (out, out)
        self._kernels.attend[(num_programs, spec.num_kv_heads)](
            q, *self._pages(kv), out, partial_out, partial_stats, out if sinks is None else sinks, tables,
            part.programs, q.stride(0), tables.stride(0), layer.scale, layer.softcap or 0.0,
            layer.chunk or layer.sliding_window or 0, num_programs,
            KV_HEADS=spec.num_kv_heads, GROUP=tiles.group, HEAD_DIM=spec.head_dim,
            BLOCK_D=max(16, power_of_2(spec.head_dim)), BLOCK_SIZE=spec.block_size, BLOCK_M=shape.rows,
            BLOCK_N=shape.keys, SOFTCAP=layer.softcap is not None, SINKS=sinks is not None,
            WINDOW=layer.sliding_window is not None, CHUNKED=layer.chunk is not None,
            FIXED=spec.fixed_span is not None, NATIVE_FP8=self.native_fp8,
            FORMAT=self._kv_format, PRECISION=availability.float32_precision(self._amd),
            **availability.options(shape.warps, shape.stages, self._amd),
        )  # fmt: skip
