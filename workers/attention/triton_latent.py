"""Latent attention on GPUs by Triton kernels (`kernels/triton/latent_attention.py`): a row of a token is the key of all
query heads, and its first elements are the value.

`triton_tiles.py` plans the tiles of query tokens; this module knows their shapes, the pages and the launches. Query
heads that do not fit into one tile are divided into groups, which read the same rows.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.triton_backend import TYPES
from oarlock.workers.attention.triton_tiles import Planned, TiledBackend, TileShape, power_of_2
from oarlock.workers.kernels.triton import availability

_MAX_RANK, _MAX_OTHERS = 512, 64  # elements of a row: of its value, and besides it
_WRITTEN = 4  # tokens written by one program
_CHUNK = 32  # elements of a latent that are multiplied at a time in float32


def latent_tile_shapes(
    dtype: torch.dtype, kv_format: str = "", *, wide: bool = False, amd: bool = False
) -> tuple[TileShape, ...]:
    """Return the tile shapes, ascending in the number of rows. They fit rows of 512 + 64 elements.

    `kv_format`: format of 8-bit pages, whose conversion takes registers. `wide`: matmuls read their operands from
    shared memory (compute capabilities 9 and 10). `amd`: devices of AMD, whose registers suffice for few rows.
    """
    if dtype == torch.float32:
        return (TileShape(16, 16 if kv_format else 32, 8, 1),)
    if amd:
        return (TileShape(16, 32, 4, 2),)
    if kv_format:
        return TileShape(16, 32, 8, 3), TileShape(32, 32, 8, 3)
    shapes = TileShape(16, 32, 4, 3), TileShape(32, 32, 8, 3)
    return (*shapes, TileShape(64, 32, 8, 3)) if wide else shapes


def latent_constants(spec: KVSpec, shape: TileShape, heads: int, group: int) -> dict[str, Any]:
    """Return the sizes for which `attend_latent` is compiled, for tiles of `group` out of `heads` query heads."""
    return row_constants(spec) | {
        "BLOCKS": heads // group, "GROUP": group, "BLOCK_M": shape.rows, "BLOCK_N": shape.keys,
        "CHUNK": _CHUNK if spec.dtype == torch.float32 else 0,
    }  # fmt: skip


def row_constants(spec: KVSpec) -> dict[str, Any]:
    """Return the sizes of rows and pages, for which all kernels are compiled."""
    rank, others = spec.value_width, spec.head_dim - spec.value_width
    return {
        "RANK": rank, "ROPE": others, "BLOCK_SIZE": spec.block_size, "BLOCK_D": max(16, power_of_2(rank)),
        "BLOCK_R": max(16, power_of_2(others)), "FORMAT": spec.cache_dtype if spec.is_rounded else "",
    }  # fmt: skip


class LatentTritonBackend(TiledBackend):
    """Triton backend of latent attention. Pages have the shape [blocks, 1, elements of a page]; see
    `kernels/triton/latent_pages.py`."""

    name: ClassVar[str] = "triton"

    def __init__(self, spec: KVSpec) -> None:
        from oarlock.workers.kernels.triton import latent_attention, latent_pages  # Triton is not installed everywhere

        super().__init__(spec)
        self._kernels: Any = latent_attention  # a call of a kernel compiles it: no annotation describes its arguments
        self._writing: Any = latent_pages

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        reason = availability.why_not(spec.device)
        if reason is not None:
            return reason
        if spec.dtype not in TYPES:
            return f"it supports float32, float16 and bfloat16, not {spec.dtype}"
        rank, others = spec.value_width, spec.head_dim - spec.value_width
        if not spec.value_in_key or spec.num_kv_heads != 1:
            return "it needs one row for all heads that contains their value"
        if rank > _MAX_RANK or not 0 < others <= _MAX_OTHERS:
            return f"it needs rows of up to {_MAX_RANK} + {_MAX_OTHERS} elements, not {rank} + {others}"
        if spec.fixed_span is not None and spec.cache_dtype == "int8" and spec.dtype == torch.float16:
            return "in int8 pages with float16, the precision of a token depends on the other tokens of its block"
        return None

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec
        shape = num_blocks, 1, spec.block_size * spec.key_format.elements
        dtype, device = spec.kv_format.dtype(spec.dtype), spec.device
        return [
            LayerKV(
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros((num_blocks, 1, spec.block_size, 0), dtype=dtype, device=device),
            )
            for _ in range(spec.num_layers)
        ]

    @staticmethod
    def _pages(kv: LayerKV) -> tuple[Tensor, Tensor]:
        """Return the pages, and a view of them as 16-bit elements for the scales."""
        return kv.k, kv.k if kv.k.dtype != torch.uint8 else kv.k.view(torch.int16)

    def write(self, kv: LayerKV, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        assert v is None and k.shape[1] == 1 and k.stride(2) == 1, "the value is in the row"
        self._writing.write_rows[(-(-batch.num_tokens // _WRITTEN),)](
            k, *self._pages(kv), batch.slots[self.spec.group], batch.num_tokens, k.stride(0), BLOCK_T=_WRITTEN,
            **row_constants(self.spec),
        )  # fmt: skip

    def norm_rotate_and_write(
        self,
        kv: LayerKV,
        q: Tensor,
        rows: Tensor,
        norm: tuple[Tensor, float],
        angles: tuple[Tensor, Tensor] | None,
        batch: ForwardBatch,
        *,
        pairs_neighbours: bool,
    ) -> Tensor:
        """Norm and rotate rows, write them, and rotate queries, as `FusedLatentBackend` describes."""
        tokens, heads, width = q.shape
        assert q.stride(2) == rows.stride(1) == 1 and q.stride(1) == width
        queries = torch.empty((tokens, heads, self.spec.head_dim), dtype=q.dtype, device=q.device)
        cos, sin = angles or (norm[0], norm[0])
        assert cos.is_contiguous() and sin.is_contiguous()
        constants = row_constants(self.spec)
        self._writing.norm_rotate_and_write[(tokens, heads + 1)](
            q, rows, queries, *self._pages(kv), batch.slots[self.spec.group], cos, sin, *norm, q.stride(0),
            rows.stride(0), HEADS=heads, NOPE=width - constants["ROPE"], ROTARY=cos.shape[-1] if angles else 0,
            NEIGHBOURS=pairs_neighbours, num_warps=1, **constants,
        )  # fmt: skip
        return queries

    def _tile_shapes(self, heads: int) -> tuple[TileShape, TileShape]:
        """Return the smallest shape with the rows of one token, if any has, and the largest shape."""
        shapes = latent_tile_shapes(self.spec.dtype, self._kv_format, wide=self.is_wide, amd=self._amd is not None)
        return next((shape for shape in shapes if shape.rows >= heads), shapes[-1]), shapes[-1]

    def _group(self, heads: int, shape: TileShape) -> int:
        """Return the largest divisor of `heads` that fits into a tile."""
        return max(count for count in range(1, shape.rows + 1) if heads % count == 0)

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
        assert sinks is None and layer.softcap is None, "latent attention has neither sinks nor a softcap"
        assert layer.chunk is None and layer.sliding_window is None, "latent attention sees all tokens before a query"
        tiles, num_programs, tables = part.tiles, part.shares.num_programs, batch.block_tables[self.spec.group]
        partial_out, partial_stats = part.partial or (out, out)
        self._kernels.attend_latent[(num_programs, tiles.blocks)](
            q, *self._pages(kv), out, partial_out, partial_stats, tables, part.programs, q.stride(0),
            tables.stride(0), layer.scale, num_programs, NATIVE_FP8=self.native_fp8,
            PRECISION=availability.float32_precision(self._amd),
            **latent_constants(self.spec, tiles.shape, layer.num_heads, tiles.group),
            **availability.options(tiles.shape.warps, tiles.shape.stages, self._amd),
        )  # fmt: skip
