"""Tiles of query tokens, and the division of their keys among programs, for backends of Triton kernels.

A tile is computed by one program for each KV head, or by several that share its keys. This module plans tiles and the
rule by which keys are divided; the kernels do the rest. Nothing is read back from the device.

With a fixed span (`KVSpec.fixed_span`) a row has the same bits in every batch: the tiles of all queries have one shape,
and spans begin at multiples of a number of keys, counted from the sequence's first token. Blocks of keys always begin
so, and keys or spans that a row does not see do not change its result.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.kernels.triton import availability

_LEAST_SPAN = 256  # keys per program; merging shorter spans costs more than it gains
_FIXED_SPANS = 16  # spans of the longest sequence if the span is fixed
_FIXED_SCRATCH = 128 << 20  # bytes; if tiles need more, they are computed in several launches
NO_WINDOW = 1 << 30  # more keys than any sequence has
_PLANNED_AT_ONCE = 128  # tiles per iteration of `plan_spans`
MERGED_AT_ONCE = 16  # results of programs per step of `merge_spans`: 64 registers if values have 512 elements
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


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one shape, for one launch."""

    shape: TileShape
    group: int  # query heads of a token that are rows of one tile
    blocks: int  # such groups: KV heads, or parts of the query heads of the only KV head
    seqs: Tensor  # int32 [tiles]
    first_rows: Tensor  # int32 [tiles]
    ends: np.ndarray  # int64 [tiles]   keys that each tile's last token sees; upper bounds if lengths are live
    first_positions: np.ndarray  # int64 [tiles]
    queries: tuple[int, int] | None = None  # shortest and longest query, if tiles are found on the device

    @property
    def tokens(self) -> int:
        """Query tokens of a tile."""
        return self.shape.rows // self.group

    def some(self, part: slice) -> "Tiles":
        seqs, rows, ends, first = self.seqs[part], self.first_rows[part], self.ends[part], self.first_positions[part]
        return replace(self, seqs=seqs, first_rows=rows, ends=ends, first_positions=first)


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
    # tiles by the number of query heads, in which layers of a group may differ
    tiles: dict[int, list[Tiles]] = field(default_factory=dict)
    is_live: bool = False  # context lengths change; the batch has upper bounds
    prompts: int = 0  # upper bound of queries longer than one token, if query lengths change too; 0: they do not
    # plans by the length of a window or chunk, whether it is a chunk's, and the query heads
    planned: dict[tuple[int, bool, int], list[Planned]] = field(default_factory=dict)


class TiledBackend(ABC):
    """Base of backends whose kernels compute tiles: plans, and the order of launches."""

    def __init__(self, spec: KVSpec) -> None:
        from oarlock.workers.kernels.triton import key_spans  # Triton is not installed everywhere

        self.spec = spec
        self._planning: Any = key_spans  # a call of a kernel compiles it: no annotation describes its arguments
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

    @abstractmethod
    def _tile_shapes(self, heads: int) -> tuple[TileShape, TileShape]:
        """Return the tile shapes for short queries and for long queries of `heads` query heads."""

    @abstractmethod
    def _group(self, heads: int, shape: TileShape) -> int:
        """Return the query heads of a token, out of `heads`, that are rows of one tile of `shape`."""

    @abstractmethod
    def _compute(
        self, q: Tensor, kv: LayerKV, batch: ForwardBatch, layer: AttentionSpec, part: Planned, out: Tensor,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        """Launch the programs of `part`: results to `out`, or to `part.partial` if several programs share a tile."""

    def stored_keys(self, kv: LayerKV, batch: ForwardBatch) -> Tensor:
        """Return the keys of the step's tokens in pages that are not rounded: [T, num_kv_heads, head_dim]."""
        assert not self.spec.is_rounded, "rounded pages are not read back"
        slots, size = batch.slots[self.spec.group], self.spec.block_size
        return kv.k.unflatten(2, (size, -1))[slots // size, :, slots % size]

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

    def attend(
        self, q: Tensor, kv: LayerKV, plan: TritonPlan, layer: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        rows, heads, width = q.shape
        assert q.stride(2) == 1 and q.stride(1) == width and layer.scale > 0
        out = torch.empty((rows, heads * self.spec.value_width), dtype=q.dtype, device=q.device)
        out[plan.batch.num_tokens :] = 0.0  # padding rows
        if heads not in plan.tiles:
            plan.tiles[heads] = self._tiles(plan, heads)
        window = layer.chunk or layer.sliding_window or NO_WINDOW
        key = window, layer.chunk is not None, heads
        if key not in plan.planned:
            plan.planned[key] = [part for one in plan.tiles[heads] for part in self._planned(plan, one, window, layer)]
        for part in plan.planned[key]:
            if part.layer == layer.layer:
                if part.tiles.queries is not None:
                    _find(plan.batch, part.tiles, part.tiles.tokens)
                self._divide(plan.batch, part, window, is_chunk=layer.chunk is not None)
            self._compute(q, kv, plan.batch, layer, part, out, sinks)
            if part.shares.is_split:
                self._merge(part, out, sinks)
        return out

    def _tiles(self, plan: TritonPlan, heads: int) -> list[Tiles]:
        """Return small tiles for short queries, and large tiles for long queries."""
        batch = plan.batch
        lengths, contexts = np.array(batch.query_lens), np.array(batch.context_lens)
        small, large = self._tile_shapes(heads)
        if plan.prompts:
            return self._unknown_tiles(plan, small, large, heads)
        if self.spec.fixed_span is not None:
            large = small
        is_short = lengths <= small.rows // self._group(heads, small)
        found = []
        for shape, here in ((small, is_short), (large, ~is_short)):
            seqs = np.flatnonzero(here & (lengths > 0))
            if not len(seqs):
                continue
            group = self._group(heads, shape)
            queries = shape.rows // group
            counts = -(-lengths[seqs] // queries)
            of_seq, behind = np.repeat(seqs, counts), np.cumsum(counts)
            rows = (np.arange(behind[-1]) - np.repeat(behind - counts, counts)) * queries  # within the sequence
            first = contexts[of_seq] - lengths[of_seq] + rows
            ends = np.minimum(first + queries, contexts[of_seq])
            moved = torch.from_numpy(_aligned(of_seq, rows)).to(batch.seq_lens.device, non_blocking=True)
            found.append(Tiles(shape, group, heads // group, moved[0], moved[1], ends, first))
        return found

    def _unknown_tiles(self, plan: TritonPlan, small: TileShape, large: TileShape, heads: int) -> list[Tiles]:
        """Return empty tensors for the tiles of a step whose queries the host need not know; `_find` fills them."""
        batch, groups = plan.batch, [self._group(heads, shape) for shape in (small, large)]
        short = small.rows // groups[0]
        most = batch.num_tokens // (large.rows // groups[1]) + plan.prompts
        kinds = (small, (1, short), min(batch.num_seqs, batch.num_tokens)), (large, (short + 1, batch.num_tokens), most)
        found = []
        for group, (shape, queries, count) in zip(groups, kinds, strict=True):
            ends = np.full(count, max(batch.context_lens))
            room = torch.empty((2, -(-count // 4) * 4), dtype=torch.int32, device=batch.seq_lens.device)
            found.append(Tiles(shape, group, heads // group, room[0], room[1], ends, ends - 1, queries))
        return found

    def _planned(self, plan: TritonPlan, tiles: Tiles, window: int, layer: AttentionSpec) -> list[Planned]:
        """Return one launch, or several if spans are fixed and their results would exceed the scratch memory."""
        spec, at_once = self.spec, len(tiles.ends)
        if spec.fixed_span is not None:
            bytes_each = 4 * tiles.blocks * tiles.shape.rows * (spec.value_width + 2)
            at_once = max(1, _FIXED_SCRATCH // (bytes_each * -(-int(tiles.ends.max()) // spec.fixed_span)))
        found = []
        for first in range(0, len(tiles.ends), at_once):
            part = tiles.some(slice(first, first + at_once))
            shares = self.shares(part, window, is_live=plan.is_live, is_chunk=layer.chunk is not None)
            numbers, device = self._planning.PLANNED, tiles.seqs.device
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
        wanted = -(-_WAVES * self.processors // tiles.blocks)
        extra = max(1, min(wanted, int((seen // least).sum())))
        if is_live:  # lengths are only known up to the bounds
            is_split = int(seen.max()) > least and extra > 1
            return Shares(least if is_split else NO_WINDOW, extra, count + extra if is_split else count, is_split)
        span = max(least, -(-int((-(-seen // extra)).sum()) // keys) * keys)
        parts = -(-seen // span)
        return Shares(least, extra, int(parts.sum()), bool((parts > 1).any()))

    def _divide(self, batch: ForwardBatch, part: Planned, window: int, *, is_chunk: bool = False) -> None:
        self._planning.plan_spans[(1,)](
            part.tiles.seqs, part.tiles.first_rows, batch.query_start_loc, batch.seq_lens, batch.rows, part.programs,
            part.of_tiles, window, part.shares.least, part.shares.extra, len(part.tiles.ends), part.shares.num_programs,
            part.tiles.tokens, part.tiles.shape.keys, FIXED=self.spec.fixed_span is not None,
            CHUNKED=is_chunk, SIZE=_PLANNED_AT_ONCE,
        )  # fmt: skip

    def _merge(self, part: Planned, out: Tensor, sinks: Tensor | None) -> None:
        """Merge the results of the programs that share a tile."""
        assert part.partial is not None
        tiles, width = part.tiles, self.spec.value_width
        self._planning.merge_spans[(len(tiles.ends), tiles.blocks, tiles.tokens * tiles.group)](
            *part.partial, out, out if sinks is None else sinks, part.programs, part.of_tiles, len(tiles.ends),
            part.shares.num_programs, tiles.shape.rows, KV_HEADS=tiles.blocks, GROUP=tiles.group, HEAD_DIM=width,
            BLOCK_D=max(16, power_of_2(width)), SINKS=sinks is not None,
            AT_ONCE=MERGED_AT_ONCE if self.spec.fixed_span is None else 1,
        )  # fmt: skip

    def _scratch(self, shares: Shares, tiles: Tiles, *, is_live: bool) -> tuple[Tensor, Tensor]:
        """Return memory for the results of spans. A graph keeps its memory alive."""
        rows = prod((shares.num_programs, tiles.blocks, tiles.shape.rows))
        results, size = rows * self.spec.value_width, rows * (self.spec.value_width + 2)
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
