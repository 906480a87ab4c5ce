"""Attention on CUDA devices by kernels in Triton, which read pages in place (`kernels/triton/paged_attention.py`).

Plans tiles of query tokens and how keys are split, and launches the kernels. Nothing is read back from the device.

With a fixed span (`KVSpec.fixed_span`) a row has the same bits in every batch: tiles of all queries have one shape, and
spans begin at multiples of a number of keys, counted from the sequence's first token. Blocks of keys do so anyway, and
keys or spans that a row does not see change nothing of it.
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
_LEAST_SPAN = 256  # keys: shorter ones cost more to merge than they gain
_WRITTEN = 16  # tokens that one program writes
_FIXED_SPANS = 16  # of the longest sequence, where they are fixed
_FIXED_SCRATCH = 128 << 20  # bytes; more tiles are computed one part after another
_WAVES = 2  # programs for each multiprocessor, before splitting keys gains no more


def power_of_2(count: int) -> int:
    """The smallest that is not below `count`."""
    return 1 << (count - 1).bit_length()


def fixed_span(max_model_len: int) -> int:
    """Keys of one program at every length of a sequence, for `KVSpec.fixed_span`: a multiple of all tiles' keys."""
    return max(_LEAST_SPAN, power_of_2(-(-max_model_len // _FIXED_SPANS)))


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tile sizes of a launch, chosen so that every kind of device since compute capability 8.0 has the registers and
    the shared memory."""

    rows: int
    keys: int  # of one step
    warps: int
    stages: int


def tile_shapes(head_dim: int, dtype: torch.dtype, form: str = "") -> tuple[TileShape, TileShape]:
    """Tile shapes for few query rows, and for many. `form`: of pages in 8 bits.

    float32 takes so many registers that large tiles gain nothing.
    """
    if dtype == torch.float32:
        small = TileShape(16, 32, 4 if head_dim <= 128 else 8, 3 if head_dim <= 64 else 2)
        return small, small
    if head_dim <= 128 and form == "int8":
        return TileShape(16, 32, 4, 3), TileShape(64, 32, 4, 2)
    if head_dim <= 128:
        stages = 2 if head_dim <= 64 else 3
        return TileShape(16, 64, 4, stages), TileShape(64, 64, 4, stages)
    return TileShape(16, 32, 4, 3), TileShape(64, 32, 8, 2)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one shape: one launch."""

    shape: TileShape
    seqs: Tensor  # int32 [tiles]
    first_rows: Tensor  # int32 [tiles]
    longest: int  # context, of all tiles' sequences


@dataclass(frozen=True, slots=True)
class Spans:
    """Division of the keys of a launch's tiles among programs."""

    keys: int  # of one program; at least, where they are live
    parts: int  # programs of one tile
    is_split: bool  # results are merged afterwards
    is_live: bool = False  # programs divide what there is, rather than beginning at multiples of `keys`


@dataclass(slots=True)
class TritonPlan:
    """A step's tiles, and scratch memory that its layers share."""

    batch: ForwardBatch
    tiles: list[Tiles]
    is_live: bool = False  # contexts change: those of the batch are bounds
    scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)


class TritonBackend:
    """Pages are `[blocks, kv_heads, elements of a page]`, as `kernels/triton/kv_pages.py` describes them."""

    name: ClassVar[str] = "triton"

    def __init__(self, spec: KVSpec) -> None:
        from oarlock.workers.kernels.triton import kv_pages, paged_attention  # Triton is on some machines only

        self.spec = spec
        self._fused: Any = kv_pages
        self._kernels: Any = paged_attention  # a kernel's call compiles it: no annotation describes its arguments
        self._form = spec.cache_dtype if spec.is_rounded else ""
        self.processors, self.native_fp8 = 1, False
        self.least_span = _LEAST_SPAN
        if spec.device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(spec.device).multi_processor_count
            self.native_fp8 = torch.cuda.get_device_capability(spec.device) >= (8, 9)
        self._fixed_scratch = None
        if spec.fixed_span is not None:  # one piece for all steps and graphs, which run one after another
            self._fixed_scratch = torch.empty(_FIXED_SCRATCH // 4, dtype=torch.float32, device=spec.device)

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        reason = availability.why_not(spec.device)
        if reason is not None:
            return reason
        if spec.dtype not in _TYPES:
            return f"it knows float32, float16 and bfloat16, not {spec.dtype}"
        if spec.head_dim > _MAX_HEAD:
            return f"it wants heads of up to {_MAX_HEAD} elements, not {spec.head_dim}"
        if spec.fixed_span is not None and spec.cache_dtype == "int8" and spec.dtype == torch.float16:
            return "with pages of int8 in float16, how many digits small weights lose depends on a block's other tokens"
        return None

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec
        shape = (num_blocks, spec.num_kv_heads, spec.block_size * spec.form.elements(spec.head_dim))

        def pages() -> Tensor:
            return torch.zeros(shape, dtype=spec.form.dtype(spec.dtype), device=spec.device)

        return [LayerKV(pages(), pages()) for _ in range(spec.num_layers)]

    @staticmethod
    def _pages(kv: LayerKV) -> tuple[Tensor, ...]:
        """Pages of keys and of values, and the same as 16 bits, in which scales are."""
        if kv.k.dtype != torch.uint8:
            return kv.k, kv.v, kv.k, kv.v
        return kv.k, kv.v, kv.k.view(torch.int16), kv.v.view(torch.int16)

    def prepare(self, batch: ForwardBatch) -> TritonPlan:
        return TritonPlan(batch, [])

    def prepare_decode(self, batch: ForwardBatch) -> TritonPlan:
        """Plans all steps of one token per sequence in the tensors of `batch`, with contexts of up to `context_lens`.

        As many programs share a sequence's keys as the bounds ask for; on the device each finds its part of them.
        """
        return TritonPlan(batch, [], is_live=True)

    def write(self, kv: LayerKV, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        spec = self.spec
        assert k.stride(2) == v.stride(2) == 1 and k.stride(1) == v.stride(1) == spec.head_dim
        self._kernels.write_kv[(-(-batch.num_tokens // _WRITTEN), spec.num_kv_heads)](
            k, v, *self._pages(kv), batch.slot_mapping, batch.num_tokens, k.stride(0), v.stride(0),
            KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim, BLOCK_SIZE=spec.block_size,
            BLOCK_T=_WRITTEN, BLOCK_D=power_of_2(spec.head_dim), FORM=self._form,
        )  # fmt: skip

    def rotate_and_write(
        self, kv: LayerKV, qkv: Tensor, norm: tuple[Tensor, float] | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Rotates queries and keys and writes keys and values, as `FusedBackend` describes."""
        spec = self.spec
        rows, heads, width = qkv.shape[0], qkv.shape[1] - 2 * spec.num_kv_heads, spec.head_dim
        assert qkv.stride(2) == 1 and qkv.stride(1) == width and cos.is_contiguous() and sin.is_contiguous()
        q = torch.empty((rows, heads, width), dtype=qkv.dtype, device=qkv.device)
        weight, eps = norm or (cos, 0.0)
        self._fused.rotate_and_write[(rows, heads + 2 * spec.num_kv_heads)](
            qkv, q, *self._pages(kv), batch.slot_mapping, cos, sin, weight, eps, qkv.stride(0),
            HEADS=heads, KV_HEADS=spec.num_kv_heads, HEAD_DIM=width, ROTARY=cos.shape[-1], BLOCK_SIZE=spec.block_size,
            BLOCK_D=power_of_2(width), NORM=norm is not None, num_warps=1, FORM=self._form,
        )  # fmt: skip
        return q

    def attend(self, q: Tensor, kv: LayerKV, plan: TritonPlan, layer: AttentionSpec) -> Tensor:
        rows, heads, width = q.shape
        assert q.stride(2) == 1 and q.stride(1) == width
        out = torch.empty((rows, heads * width), dtype=q.dtype, device=q.device)
        out[plan.batch.num_tokens :] = 0.0  # rows that pad the batch
        if not plan.tiles:
            plan.tiles = self._tiles(plan.batch, heads // self.spec.num_kv_heads)
        for tiles in plan.tiles:
            self._launch(q, kv, plan, layer, tiles, out)
        return out

    def _tiles(self, batch: ForwardBatch, group: int) -> list[Tiles]:
        """Short queries in small tiles, long ones in large ones."""
        lengths, contexts = np.array(batch.query_lens), np.array(batch.context_lens)
        # A group of query heads that is larger than a tile gets a tile of its size.
        small, large = (
            replace(shape, rows=max(shape.rows, power_of_2(group)))
            for shape in tile_shapes(self.spec.head_dim, self.spec.dtype, self._form)
        )
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
            ends = np.cumsum(counts)
            number = np.arange(ends[-1]) - np.repeat(ends - counts, counts)  # of each tile within its sequence
            both = np.stack([np.repeat(seqs, counts), number * queries]).astype(np.int32)
            moved = torch.from_numpy(both).to(batch.seq_lens.device, non_blocking=True)
            found.append(Tiles(shape, moved[0], moved[1], int(contexts[seqs].max())))
        return found

    def spans(self, programs: int, longest: int, window: int | None, rows: int, keys: int) -> tuple[int, int]:
        """Number of keys that one program reads, and number of programs that share a tile's `longest` context.

        Enough to occupy the device, by its multiprocessors and the length of the contexts: a rule that looks at the
        number of sequences alone leaves most of it idle when a few of them are long.
        """
        seen = longest if window is None else min(longest, window + rows)
        parts = max(1, min(-(-_WAVES * self.processors // programs), seen // self.least_span))
        if parts == 1:
            return longest, 1
        span = -(-seen // (parts * keys)) * keys
        return span, -(-longest // span)

    def _launch(
        self, q: Tensor, kv: LayerKV, plan: TritonPlan, layer: AttentionSpec, tiles: Tiles, out: Tensor
    ) -> None:
        spec, shape_of = self.spec, tiles.shape
        programs = len(tiles.seqs) * spec.num_kv_heads
        if spec.fixed_span is not None:
            parts = -(-tiles.longest // spec.fixed_span)
            bytes_each = 4 * parts * spec.num_kv_heads * shape_of.rows * (spec.head_dim + 2)
            at_once = max(1, _FIXED_SCRATCH // bytes_each)
            for first in range(0, len(tiles.seqs), at_once):
                some = slice(first, first + at_once)
                part = replace(tiles, seqs=tiles.seqs[some], first_rows=tiles.first_rows[some])
                self._compute(q, kv, plan, layer, part, out, Spans(spec.fixed_span, parts, is_split=True))
            return
        span, parts = self.spans(programs, tiles.longest, layer.sliding_window, shape_of.rows, shape_of.keys)
        if plan.is_live:
            span = -(-self.least_span // shape_of.keys) * shape_of.keys
        self._compute(q, kv, plan, layer, tiles, out, Spans(span, parts, parts > 1, plan.is_live and parts > 1))

    def _compute(
        self, q: Tensor, kv: LayerKV, plan: TritonPlan, layer: AttentionSpec, tiles: Tiles, out: Tensor, spans: Spans
    ) -> None:
        spec, batch = self.spec, plan.batch
        group = layer.num_heads // layer.num_kv_heads
        partial_out, partial_stats = self._scratch(plan, spans, tiles, out)
        window = layer.sliding_window or 0
        shape = {
            "KV_HEADS": spec.num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_M": tiles.shape.rows,
            "BLOCK_N": tiles.shape.keys,
            "BLOCK_D": max(16, power_of_2(spec.head_dim)),
            "WINDOW": window > 0,
            "LIVE": spans.is_live,
        }
        where = (batch.query_start_loc, batch.seq_lens, tiles.seqs, tiles.first_rows)
        tables = batch.block_tables
        self._kernels.attend[(len(tiles.seqs), spec.num_kv_heads, spans.parts)](
            q, *self._pages(kv), out, partial_out, partial_stats, tables, batch.rows, *where,
            q.stride(0), tables.stride(0), layer.scale, layer.softcap or 0.0, window, spans.keys,
            BLOCK_SIZE=spec.block_size, SOFTCAP=layer.softcap is not None, SPANS=spans.is_split,
            num_warps=tiles.shape.warps, num_stages=tiles.shape.stages, NATIVE_FP8=self.native_fp8,
            FORM=self._form, **shape,
        )  # fmt: skip
        if spans.is_split:
            self._kernels.merge_spans[(len(tiles.seqs), spec.num_kv_heads, tiles.shape.rows // group * group)](
                partial_out, partial_stats, out, *where, window, spans.keys, spans.parts, **shape
            )

    def _scratch(self, plan: TritonPlan, spans: Spans, tiles: Tiles, out: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the results of spans; any tensors where they are not split."""
        if not spans.is_split:
            return out, out
        shape = (spans.parts, len(tiles.seqs), self.spec.num_kv_heads, tiles.shape.rows)
        if self._fixed_scratch is not None:
            results = prod(shape) * self.spec.head_dim
            return self._fixed_scratch[:results], self._fixed_scratch[results : results + 2 * prod(shape)]
        if shape not in plan.scratch:
            results = torch.empty((*shape, self.spec.head_dim), dtype=torch.float32, device=out.device)
            plan.scratch[shape] = results, torch.empty((*shape, 2), dtype=torch.float32, device=out.device)
        return plan.scratch[shape]
