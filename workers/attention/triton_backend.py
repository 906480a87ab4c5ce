"""Attention on GPUs by Triton kernels that read pages in place (`kernels/triton/paged_attention.py`).

This module plans tiles of query tokens and the rule by which their keys are split; the kernels do the rest. Nothing is
read back from the device.

With a fixed span (`KVSpec.fixed_span`) a row has the same bits in every batch: the tiles of all queries have one shape,
and spans begin at multiples of a number of keys, counted from the sequence's first token. Blocks of keys always begin
so, and keys or spans that a row does not see do not change its result.
"""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.kernels.triton import availability

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD = 256
_LEAST_SPAN = 256  # keys per program; merging shorter spans costs more than it gains
_WRITTEN = 16  # tokens written by one program
_FIXED_SPANS = 16  # spans of the longest sequence if the span is fixed
_FIXED_SCRATCH = 128 << 20  # bytes; if tiles need more, they are computed in several launches
NO_WINDOW = 1 << 30  # more keys than any sequence has
_PLANNED_AT_ONCE = 128  # tiles per iteration of `plan_spans`
_WAVES = 4  # programs per multiprocessor; dividing keys further gains nothing


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def fixed_span(max_model_len: int) -> int:
    """Return the keys per program for `KVSpec.fixed_span`, for every sequence length: a multiple of all tiles' keys."""
    return max(_LEAST_SPAN, power_of_2(-(-max_model_len // _FIXED_SPANS)))


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tile sizes of a launch, chosen to fit the registers and the shared memory of all devices since compute capability
    8.0."""

    rows: int
    keys: int  # keys per iteration
    warps: int
    stages: int


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


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one shape, for one launch."""

    shape: TileShape
    seqs: Tensor  # int32 [tiles]
    first_rows: Tensor  # int32 [tiles]
    ends: np.ndarray  # int64 [tiles]   keys that each tile's last token sees; upper bounds if lengths are live
    first_positions: np.ndarray  # int64 [tiles]
    queries: tuple[int, int] | None = None  # shortest and longest query, if tiles are found on the device

    def some(self, part: slice) -> "Tiles":
        seqs, rows, ends, first = self.seqs[part], self.first_rows[part], self.ends[part], self.first_positions[part]
        return Tiles(self.shape, seqs, rows, ends, first, self.queries)


@dataclass(frozen=True, slots=True)
class Shares:
    """Division of the keys of a launch's tiles among programs; computed by `plan_spans`."""

    least: int  # least number of keys per program
    extra: int  # programs in addition to one per tile; the keys of all tiles are divided by it
    num_programs: int  # number of programs
    is_split: bool  # True: programs may share a tile, and their results are merged


@dataclass(frozen=True, slots=True)
class Planned:
    """Division of one launch on the device, with scratch memory. All layers with the same window or chunk share it."""

    tiles: Tiles
    shares: Shares
    layer: int  # first of these layers; it computes the division in each step
    programs: Tensor  # int32 [PLANNED, num_programs]
    of_tiles: Tensor  # int32 [2, tiles]
    partial: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class TritonPlan:
    """A step's tiles, and the data that its layers share."""

    batch: ForwardBatch
    # tiles by the number of query heads for each KV head, in which layers of a group may differ
    tiles: dict[int, list[Tiles]] = field(default_factory=dict)
    is_live: bool = False  # context lengths change; the batch has upper bounds
    prompts: int = 0  # upper bound of queries longer than one token, if query lengths change too; 0: they do not
    # plans by the length of a window or chunk, whether it is a chunk's, and the query heads for each KV head
    planned: dict[tuple[int, bool, int], list[Planned]] = field(default_factory=dict)


class TritonBackend:
    """Triton backend. Pages have the shape [blocks, kv_heads, elements of a page]; see `kernels/triton/kv_pages.py`."""

    name: ClassVar[str] = "triton"

    def __init__(self, spec: KVSpec) -> None:
        from oarlock.workers.kernels.triton import kv_pages, paged_attention  # Triton is not installed everywhere

        self.spec = spec
        self._fused: Any = kv_pages
        self._kernels: Any = paged_attention  # a call of a kernel compiles it: no annotation describes its arguments
        self._kv_format = spec.cache_dtype if spec.is_rounded else ""
        self._amd = availability.amd_architecture()
        self.processors, self.native_fp8, self.is_wide = 1, False, False
        self.least_span = _LEAST_SPAN
        if spec.device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(spec.device).multi_processor_count
            capability = torch.cuda.get_device_capability(spec.device)
            self.native_fp8 = self._amd is None and capability >= (8, 9)
            self.is_wide = self._amd is None and capability[0] in (9, 10)
        self._live_scratch = None  # shared by all graphs, which run one after another
        self._fixed_scratch = None
        if spec.fixed_span is not None:  # shared by all steps and graphs, which run one after another
            self._fixed_scratch = torch.empty(_FIXED_SCRATCH // 4, dtype=torch.float32, device=spec.device)

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        reason = availability.why_not(spec.device)
        if reason is not None:
            return reason
        if spec.dtype not in _TYPES:
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

    def prepare(self, batch: ForwardBatch) -> TritonPlan:
        return TritonPlan(batch)

    def prepare_decode(self, batch: ForwardBatch) -> TritonPlan:
        """Plan all steps of one token per sequence in the tensors of `batch`, with contexts of up to `context_lens`.

        The number of programs that share a sequence's keys follows from these bounds. On the device each program finds
        its part of the keys.
        """
        return TritonPlan(batch, is_live=True)

    def prepare_prompts(self, batch: ForwardBatch, most: int) -> TritonPlan:
        """Plan all steps in the tensors of `batch`, with queries of any length and contexts of up to `context_lens`.

        At most `most` queries are longer than one token. The tiles are computed on the device.
        """
        assert self.spec.fixed_span is None, "its tiles have one shape"
        return TritonPlan(batch, is_live=True, prompts=most)

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

    def attend(
        self, q: Tensor, kv: LayerKV, plan: TritonPlan, layer: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        rows, heads, width = q.shape
        assert q.stride(2) == 1 and q.stride(1) == width and layer.scale > 0
        out = torch.empty((rows, heads * width), dtype=q.dtype, device=q.device)
        out[plan.batch.num_tokens :] = 0.0  # padding rows
        group = heads // self.spec.num_kv_heads
        if group not in plan.tiles:
            plan.tiles[group] = self._tiles(plan, group)
        window = layer.chunk or layer.sliding_window or NO_WINDOW
        key = window, layer.chunk is not None, group
        if key not in plan.planned:
            plan.planned[key] = [part for one in plan.tiles[group] for part in self._planned(plan, one, window, layer)]
        for part in plan.planned[key]:
            if part.layer == layer.layer:
                if part.tiles.queries is not None:
                    _find(plan.batch, part.tiles, part.tiles.shape.rows // group)
                self._divide(plan.batch, part, window, group, is_chunk=layer.chunk is not None)
            self._compute(q, kv, plan.batch, layer, part, out, sinks)
        return out

    def _tiles(self, plan: TritonPlan, group: int) -> list[Tiles]:
        """Return small tiles for short queries, and large tiles for long queries."""
        batch = plan.batch
        lengths, contexts = np.array(batch.query_lens), np.array(batch.context_lens)
        # If a group of query heads is larger than a tile, the tile gets the size of the group.
        small, large = (
            replace(shape, rows=max(shape.rows, power_of_2(group)))
            for shape in tile_shapes(self.spec.head_dim, self.spec.dtype, self._kv_format, wide=self.is_wide)
        )
        if plan.prompts:
            return self._unknown_tiles(plan, small, large, group)
        if self.spec.fixed_span is not None:
            large = small
        is_short = lengths * group <= small.rows
        found = []
        for shape, here in ((small, is_short), (large, ~is_short)):
            seqs = np.flatnonzero(here & (lengths > 0))
            if not len(seqs):
                continue
            queries = shape.rows // group
            counts = -(-lengths[seqs] // queries)
            of_seq, behind = np.repeat(seqs, counts), np.cumsum(counts)
            rows = (np.arange(behind[-1]) - np.repeat(behind - counts, counts)) * queries  # within the sequence
            first = contexts[of_seq] - lengths[of_seq] + rows
            ends = np.minimum(first + queries, contexts[of_seq])
            moved = torch.from_numpy(_aligned(of_seq, rows)).to(batch.seq_lens.device, non_blocking=True)
            found.append(Tiles(shape, moved[0], moved[1], ends, first))
        return found

    def _unknown_tiles(self, plan: TritonPlan, small: TileShape, large: TileShape, group: int) -> list[Tiles]:
        """Return empty tensors for the tiles of a step whose queries the host need not know; `_find` fills them."""
        batch, short = plan.batch, small.rows // group
        most = batch.num_tokens // (large.rows // group) + plan.prompts
        kinds = (small, (1, short), min(batch.num_seqs, batch.num_tokens)), (large, (short + 1, batch.num_tokens), most)
        found = []
        for shape, queries, count in kinds:
            ends = np.full(count, max(batch.context_lens))
            room = torch.empty((2, -(-count // 4) * 4), dtype=torch.int32, device=batch.seq_lens.device)
            found.append(Tiles(shape, room[0], room[1], ends, ends - 1, queries))
        return found

    def _planned(self, plan: TritonPlan, tiles: Tiles, window: int, layer: AttentionSpec) -> list[Planned]:
        """Return one launch, or several if spans are fixed and their results would exceed the scratch memory."""
        spec, at_once = self.spec, len(tiles.ends)
        if spec.fixed_span is not None:
            bytes_each = 4 * spec.num_kv_heads * tiles.shape.rows * (spec.head_dim + 2)
            at_once = max(1, _FIXED_SCRATCH // (bytes_each * -(-int(tiles.ends.max()) // spec.fixed_span)))
        found = []
        for first in range(0, len(tiles.ends), at_once):
            part = tiles.some(slice(first, first + at_once))
            shares = self.shares(part, window, is_live=plan.is_live, is_chunk=layer.chunk is not None)
            numbers, device = self._kernels.PLANNED, tiles.seqs.device
            found.append(
                Planned(
                    part,
                    shares,
                    layer.layer,
                    torch.empty((numbers, shares.num_programs), dtype=torch.int32, device=device),
                    torch.empty((2, len(part.ends)), dtype=torch.int32, device=device),
                    self._scratch(shares, part, is_live=plan.is_live) if shares.is_split else None,
                )
            )
        return found

    def shares(self, tiles: Tiles, window: int, *, is_live: bool, is_chunk: bool = False) -> Shares:
        """Divide the keys of `tiles` by the number of programs that occupy the device.

        The division is based on all keys of all tiles, so that many programs share a long context among short ones. If
        it were based on the number of sequences or on the longest, most of the device would be idle if few are long.
        """
        keys, count = tiles.shape.keys, len(tiles.ends)
        first = np.maximum(tiles.first_positions - window + 1, 0) // keys * keys
        if is_chunk:
            first = (tiles.first_positions - tiles.first_positions % window) // keys * keys
        if is_live:  # the first key of a window may be anywhere in a block of keys, and of a chunk nearer
            first = np.maximum(tiles.ends - (window + tiles.shape.rows + keys), 0)
        seen = tiles.ends - first  # [tiles]
        if self.spec.fixed_span is not None:
            span = self.spec.fixed_span
            parts = -(-tiles.ends // span) if is_live else -(-tiles.ends // span) - first // span
            return Shares(span, 1, int(parts.sum()), is_split=True)
        least = -(-self.least_span // keys) * keys
        wanted = -(-_WAVES * self.processors // self.spec.num_kv_heads)
        extra = max(1, min(wanted, int((seen // least).sum())))
        if is_live:  # lengths are only known up to the bounds
            is_split = int(seen.max()) > least and extra > 1
            return Shares(least if is_split else NO_WINDOW, extra, count + extra if is_split else count, is_split)
        span = max(least, -(-int((-(-seen // extra)).sum()) // keys) * keys)
        parts = -(-seen // span)
        return Shares(least, extra, int(parts.sum()), bool((parts > 1).any()))

    def _divide(self, batch: ForwardBatch, part: Planned, window: int, group: int, *, is_chunk: bool = False) -> None:
        self._kernels.plan_spans[(1,)](
            part.tiles.seqs, part.tiles.first_rows, batch.query_start_loc, batch.seq_lens, batch.rows, part.programs,
            part.of_tiles, window, part.shares.least, part.shares.extra, len(part.tiles.ends), part.shares.num_programs,
            part.tiles.shape.rows // group, part.tiles.shape.keys, FIXED=self.spec.fixed_span is not None,
            CHUNKED=is_chunk, SIZE=_PLANNED_AT_ONCE,
        )  # fmt: skip

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
        group, shape = layer.num_heads // layer.num_kv_heads, tiles.shape
        partial_out, partial_stats = part.partial or (out, out)
        of_heads = out if sinks is None else sinks
        sizes = {
            "KV_HEADS": spec.num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_D": max(16, power_of_2(spec.head_dim)),
            "SINKS": sinks is not None,
        }
        tables = batch.block_tables[spec.group]
        self._kernels.attend[(num_programs, spec.num_kv_heads)](
            q, *self._pages(kv), out, partial_out, partial_stats, of_heads, tables, part.programs, q.stride(0),
            tables.stride(0), layer.scale, layer.softcap or 0.0, layer.chunk or layer.sliding_window or 0, num_programs,
            BLOCK_SIZE=spec.block_size, BLOCK_M=shape.rows, BLOCK_N=shape.keys, SOFTCAP=layer.softcap is not None,
            WINDOW=layer.sliding_window is not None, CHUNKED=layer.chunk is not None,
            FIXED=spec.fixed_span is not None, NATIVE_FP8=self.native_fp8,
            FORMAT=self._kv_format, PRECISION=availability.float32_precision(self._amd),
            **availability.options(shape.warps, shape.stages, self._amd), **sizes,
        )  # fmt: skip
        if part.shares.is_split:
            self._kernels.merge_spans[(len(tiles.ends), spec.num_kv_heads, shape.rows // group * group)](
                partial_out, partial_stats, out, of_heads, part.programs, part.of_tiles, len(tiles.ends), num_programs,
                shape.rows, **sizes,
            )  # fmt: skip

    def _scratch(self, shares: Shares, tiles: Tiles, *, is_live: bool) -> tuple[Tensor, Tensor]:
        """Return memory for the results of spans. A graph keeps its memory alive."""
        rows = prod((shares.num_programs, self.spec.num_kv_heads, tiles.shape.rows))
        results, size = rows * self.spec.head_dim, rows * (self.spec.head_dim + 2)
        memory = self._live_scratch if is_live else None
        if self._fixed_scratch is not None:
            memory = self._fixed_scratch
        if memory is None or len(memory) < size:
            memory = torch.empty(size, dtype=torch.float32, device=tiles.seqs.device)
            if is_live:
                self._live_scratch = memory
        return memory[:results], memory[results:size]


def _find(batch: ForwardBatch, tiles: Tiles, tokens: int) -> None:
    """Compute the tiles, of `tokens` each, of the step in the tensors of `batch`.

    Unneeded tiles begin after all queries. No values are copied from the host except launch arguments; `torch.where`
    would copy one.
    """
    assert tiles.queries is not None
    starts = batch.query_start_loc
    lengths = starts[1:] - starts[:-1]  # int32 [S]
    is_here = (lengths >= tiles.queries[0]) & (lengths <= tiles.queries[1])
    counts = (lengths + tokens - 1) // tokens * is_here
    behind = counts.cumsum(0)  # int64 [S]
    number = torch.arange(len(tiles.seqs), device=starts.device)
    seqs = torch.searchsorted(behind, number, right=True).clamp_(max=len(lengths) - 1)
    rows = (number - (behind - counts).index_select(0, seqs)) * tokens
    tiles.seqs.copy_(seqs)
    tiles.first_rows.copy_(rows.masked_fill_(number >= behind[-1], NO_WINDOW))


def _aligned(*arrays: np.ndarray) -> np.ndarray:
    """Stack arrays of equal length as int32 rows, each of which begins at a multiple of 16 bytes."""
    rows = np.zeros((len(arrays), -(-len(arrays[0]) // 4) * 4), np.int32)
    rows[:, : len(arrays[0])] = arrays
    return rows
