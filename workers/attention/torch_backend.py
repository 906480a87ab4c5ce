"""Attention on the CPU with torch operations: as few as possible, each over as many sequences as possible.

Decode, prefill and chunks have the same steps: gather the pages of some (sequence, KV head) pairs, multiply, mask,
softmax, multiply. The design follows from three properties of oneDNN's 16-bit batched matmuls, each checked by a test:

* An output row does not depend on the number of other rows, pairs or columns of weight zero. So a token's result has
  the same bits in decode and prefill, by itself or in a batch, in one chunk or many.
* They round scores to 16 bits, which is too coarse for models whose keys carry large biases. The same matmul with the
  rounded scores subtracted returns the rounding error, and the sum of both is exact to about 17 bits.
* Weight zero times NaN is NaN. So a page of values is cleared when its first slot is written, and columns beyond a
  sequence's pages, or of freed pages, read a page that stays zero.

If keys contain the values, the pages of keys are the pages of values. Quantized keys then have two parts with a scale
each, whose scores are added.
"""

from dataclasses import dataclass, field
from math import lcm, prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.platform.huge_pages import huge_page_empty
from oarlock.workers.protocol import NULL_BLOCK

# The number of columns (key positions, counted from position 0) is a multiple of this, so that the shapes of matmuls do
# not depend on the block size.
_COLUMNS = 32
# The first column of a sliding window is a multiple of this many tokens, so that the order of additions stays the same
# while the window moves.
_WINDOW_STEP = 128
# For matmuls with fewer elements, torch uses another kernel, which rounds differently.
_SMALL_MATMUL = 4096
# Limits of scratch memory in elements: gathered keys per call (exceeded if a single sequence is longer), and scores.
_MAX_KEYS = 1 << 20
_MAX_SCORES = 1 << 19
# Computing one more group of sequences takes about as long as gathering this many elements of keys.
_GROUP_COST = 100_000
_MAX_VIEWS = 256

# Keys or values [pairs, N, D], and their scales [pairs, N] if pages have scales.
_Numbers = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Mask:
    """Mask of the scores in columns `start` to `stop`. Other columns are not masked."""

    start: int
    stop: int
    masked: Tensor  # bool, broadcastable to [., ., ., stop - start]


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one query token each and contexts of similar length."""

    rows: slice | Tensor  # indices of their query rows
    size: int
    pages: Tensor  # int64 [size * kv_heads * P]   P pages for each (sequence, KV head)
    masks: list[_Mask]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Query rows of one sequence, and the columns that they attend to."""

    start: int
    stop: int
    first_column: int
    last_column: int
    masks: list[_Mask]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several query tokens."""

    pages: Tensor  # int64 [kv_heads * P]
    blocks: list[_Rows]


@dataclass(slots=True)
class _Plan:
    """Work units of a step: one list for each window or chunk, built by the first layer that has it."""

    tables: np.ndarray  # int32 [R, B]
    rows: np.ndarray  # int32 [S]   rows of `tables`
    query_lens: list[int]
    context_lens: list[int]
    units: dict[tuple[int | None, ...], tuple[list[_Decode], list[_Prefill]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Writes:
    """Page rows for a step's keys and values.

    Kept for all layers of one step, which is recognised by its slot mapping. The batch itself is not kept, because it
    may hold views of shared memory.
    """

    slots: Tensor  # int64 [T]
    rows: Tensor  # int64 [T * kv_heads]   indices into pages viewed as [blocks * kv_heads * block_size, row]
    fresh: Tensor  # int64   pages of values, viewed as [blocks * kv_heads, ...], whose first slot is written


class _Scratch:
    """Buffers that live as long as the backend: page faults of new buffers take longer than the arithmetic."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # every layer needs the same shapes

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        view = self._views.get((name, shape))
        if view is None:
            count = prod(shape)
            buffer = self._buffers.get(name)
            if len(self._views) >= _MAX_VIEWS or buffer is None or buffer.numel() < count:
                self._views.clear()  # views keep the smaller buffer alive
            if buffer is None or buffer.numel() < count:
                buffer = self._buffers[name] = torch.empty(count, dtype=dtype)
            view = self._views[name, shape] = buffer[:count].view(shape)
        return view


class TorchBackend:
    """Torch backend. Pages have the shape [blocks + 1, kv_heads, block_size, elements of a row]; the last page stays
    zero. Rows of keys and of values may have different widths."""

    name: ClassVar[str] = "torch"

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self._key_row, self._value_row = spec.key_format.elements, spec.value_elements
        self._column_step = lcm(_COLUMNS, spec.block_size)
        self._min_columns = _SMALL_MATMUL // min(*spec.key_format.widths, spec.value_width) + 1
        self._scratch = _Scratch()
        self._zero_page = -1
        self._writes: _Writes | None = None

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"it runs on the CPU, but the model is on {spec.device.type}"
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it supports float32, bfloat16 and float16, not {spec.dtype}"
        return None

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec
        self._zero_page = num_blocks
        pages, dtype = (num_blocks + 1, spec.num_kv_heads, spec.block_size), spec.kv_format.dtype(spec.dtype)
        keys, values = (*pages, self._key_row), (*pages, self._value_row)
        return [LayerKV(huge_page_empty(keys, dtype), huge_page_empty(values, dtype)) for _ in range(spec.num_layers)]

    def prepare(self, batch: ForwardBatch) -> _Plan:
        return _Plan(
            batch.block_tables[self.spec.group].numpy(), batch.rows.numpy(), batch.query_lens, batch.context_lens
        )

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, kv: LayerKV, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        writes = self._writes
        if writes is None or writes.slots is not batch.slots[self.spec.group]:
            writes = self._writes = self._writes_of(batch)
        size, key_row, value_row = self.spec.block_size, self._key_row, self._value_row
        pages = kv.k.view(-1, size * key_row) if v is None else kv.v.view(-1, size * value_row)
        if len(writes.fresh):
            pages.index_fill_(0, writes.fresh, 0)
        kv.k.view(-1, key_row).index_copy_(0, writes.rows, self.spec.key_format.rounded(k).reshape(-1, key_row))
        if v is not None:
            stored = self.spec.kv_format.rounded(v).reshape(-1, value_row)
            kv.v.view(-1, value_row).index_copy_(0, writes.rows, stored)

    def _writes_of(self, batch: ForwardBatch) -> _Writes:
        size, heads = self.spec.block_size, self.spec.num_kv_heads
        slots = batch.slots[self.spec.group]
        head = torch.arange(heads)
        pages = (slots // size).unsqueeze(1) * heads + head  # [T, kv_heads]
        rows = pages * size + (slots % size).unsqueeze(1)
        begins_page = (slots % size == 0) & (slots >= size)  # the null block never affects a result
        return _Writes(slots, rows.flatten(), pages[begins_page].flatten())

    # -- planning --------------------------------------------------------------------------------------------------

    def _units(self, plan: _Plan, layer: AttentionSpec) -> tuple[list[_Decode], list[_Prefill]]:
        key = (layer.sliding_window, layer.chunk, layer.num_heads)
        units = plan.units.get(key)
        if units is None:
            units = plan.units[key] = self._make_units(plan, layer)
        return units

    def _make_units(self, plan: _Plan, layer: AttentionSpec) -> tuple[list[_Decode], list[_Prefill]]:
        starts = np.cumsum([0, *plan.query_lens])
        query_lens = np.array(plan.query_lens)
        contexts = np.array(plan.context_lens)
        firsts = self._first_columns(contexts - query_lens, layer)  # [S]   position of column 0
        columns = self._padded(contexts - firsts)
        single = np.flatnonzero(query_lens == 1)
        decodes = [
            self._decode(plan, group, starts[group], contexts[group], firsts[group], columns[group], layer)
            for group in self._groups(single, columns)
        ]
        prefills = []
        for seq in np.flatnonzero(query_lens > 1):
            blocks = self._row_blocks(
                int(starts[seq]), int(query_lens[seq]), int(contexts[seq]), int(firsts[seq]), layer
            )
            one = slice(seq, seq + 1)
            count = max(block.last_column for block in blocks)
            prefills.append(_Prefill(self._pages(plan, one, contexts[one], firsts[one], count), blocks))
        return decodes, prefills

    def _first_columns(self, first_queries: np.ndarray, layer: AttentionSpec) -> np.ndarray:
        """Return the position of the first column to read, for sequences whose first query is at `first_queries`."""
        step = lcm(_WINDOW_STEP, self._column_step)
        return layer.first_visible(first_queries) // step * step

    def _padded(self, lengths):
        """Round `lengths`, in tokens, up to valid numbers of columns."""
        step = self._column_step
        return (np.maximum(lengths, self._min_columns) + step - 1) // step * step

    def _groups(self, seqs: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
        """Split `seqs` into groups that fit the scratch memory, and by length if that saves enough padding."""
        if not len(seqs):
            return []
        width = self.spec.num_kv_heads * self.spec.head_dim
        if columns[seqs].min() != columns[seqs].max():
            by_length = seqs[np.argsort(-columns[seqs], kind="stable")]
            lengths = columns[by_length]
            savings = (lengths[0] - lengths) * np.arange(len(lengths), 0, -1) * width
            cut = int(savings.argmax())
            if savings[cut] > _GROUP_COST:
                return self._groups(by_length[:cut], columns) + self._groups(by_length[cut:], columns)
        size = max(1, _MAX_KEYS // (int(columns[seqs].max()) * width))
        seqs = np.sort(seqs)
        return [seqs[start : start + size] for start in range(0, len(seqs), size)]

    def _pages(
        self, plan: _Plan, seqs: np.ndarray | slice, contexts: np.ndarray, firsts: np.ndarray, columns: int
    ) -> Tensor:
        """Return the pages of each (sequence, KV head) by position, or the zero page: int64 [n * H * P]."""
        size, heads = self.spec.block_size, self.spec.num_kv_heads
        wanted = (firsts // size)[:, None] + np.arange(columns // size)  # [n, P]
        held = wanted < (-(-contexts // size))[:, None]
        blocks = plan.tables[plan.rows[seqs, None], np.where(held, wanted, 0)].astype(np.int64)
        held &= blocks != NULL_BLOCK  # freed, because they precede the window
        blocks = np.where(held, blocks, self._zero_page)
        return torch.from_numpy((blocks[:, None, :] * heads + np.arange(heads)[None, :, None]).reshape(-1))

    def _decode(
        self,
        plan: _Plan,
        seqs: np.ndarray,
        rows: np.ndarray,
        contexts: np.ndarray,
        firsts: np.ndarray,
        columns: np.ndarray,
        layer: AttentionSpec,
    ) -> _Decode:
        count = int(columns.max())
        query = contexts - 1 - firsts  # [n]   the column of each sequence's query
        seen_from = layer.first_visible(contexts - 1) - firsts
        masks = _masks(query[:, None, None, None], seen_from[:, None, None, None], count)
        consecutive = rows[-1] - rows[0] == len(rows) - 1
        where = slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else torch.from_numpy(rows)
        return _Decode(where, len(rows), self._pages(plan, seqs, contexts, firsts, count), masks)

    def _row_blocks(self, start: int, query_len: int, context: int, first: int, layer: AttentionSpec) -> list[_Rows]:
        """Split a sequence's query rows so that the scores of each part fit the scratch memory."""
        blocks = []
        begin = context - query_len  # position of the next row
        while begin < context:
            low = int(self._first_columns(np.array(begin), layer))
            most = int(self._padded(np.array(context - low)))
            count = min(max(16, _MAX_SCORES // (layer.num_heads * most)), context - begin)
            columns = int(self._padded(np.array(begin + count - low)))
            query = np.arange(begin, begin + count)[None, :, None, None]
            row = start + begin - (context - query_len)
            masks = _masks(query - low, layer.first_visible(query) - low, columns)
            blocks.append(_Rows(row, row + count, low - first, low - first + columns, masks))
            begin += count
        return blocks

    # -- computing -------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, kv: LayerKV, plan: _Plan, layer: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        rows, heads, width = q.shape
        kv_heads, value_width = self.spec.num_kv_heads, self.spec.value_width
        num_queries_per_kv = heads // kv_heads
        out = torch.empty((rows, kv_heads, num_queries_per_kv, value_width), dtype=q.dtype)
        grouped = q.reshape(rows, kv_heads, num_queries_per_kv, width)
        of_heads = None if sinks is None else sinks.view(kv_heads, num_queries_per_kv, 1)
        of_rows = None if of_heads is None else of_heads.unsqueeze(1)
        decodes, prefills = self._units(plan, layer)
        for unit in decodes:
            k, v = self._gather(kv, unit.pages, unit.size * kv_heads)  # [n * H, N, D]
            shape = (unit.size, kv_heads, num_queries_per_kv, v[0].shape[1])
            if isinstance(unit.rows, slice):
                into = out[unit.rows].view(-1, num_queries_per_kv, value_width)
                some = grouped[unit.rows].reshape(-1, num_queries_per_kv, width)
                self._attend(some, k, v, layer, shape, unit.masks, of_heads, into)
            else:
                some = grouped.index_select(0, unit.rows)
                result = some.new_empty((*some.shape[:3], value_width))
                flat, into = (x.view(-1, *x.shape[2:]) for x in (some, result))
                self._attend(flat, k, v, layer, shape, unit.masks, of_heads, into)
                out.index_copy_(0, unit.rows, result)
        for unit in prefills:
            k, v = self._gather(kv, unit.pages, kv_heads)  # [H, N, D]
            for block in unit.blocks:
                count = block.stop - block.start
                columns = slice(block.first_column, block.last_column)
                some = (
                    grouped[block.start : block.stop]
                    .transpose(0, 1)
                    .reshape(kv_heads, count * num_queries_per_kv, width)
                )
                result = some.new_empty((*some.shape[:2], value_width))
                shape = (kv_heads, count, num_queries_per_kv, block.last_column - block.first_column)
                keys = [_cut(part, columns) for part in k]
                self._attend(some, keys, _cut(v, columns), layer, shape, block.masks, of_rows, result)
                result = result.view(kv_heads, count, num_queries_per_kv, value_width)
                out[block.start : block.stop] = result.transpose(0, 1)
        return out.view(rows, heads * value_width)

    def _gather(self, kv: LayerKV, pages: Tensor, pairs: int) -> tuple[list[_Numbers], _Numbers]:
        """Copy the parts of keys, and the values, of `pages` in order. The copies are valid until the next call."""
        spec = self.spec
        rows = self._gathered("k", kv.k, pages, pairs, self._key_row)
        keys = [spec.kv_format.values_and_scales(part, spec.dtype) for part in spec.key_format.parts(rows)]
        if spec.value_in_key:
            values, scales = keys[0]
            return keys, (values[..., : spec.value_width], scales)
        values = self._gathered("v", kv.v, pages, pairs, self._value_row)
        return keys, spec.kv_format.values_and_scales(values, spec.dtype)

    def _gathered(self, name: str, source: Tensor, pages: Tensor, pairs: int, row: int) -> Tensor:
        size = self.spec.block_size * row
        rows = self._scratch.take(name, (len(pages), size), source.dtype)
        torch.index_select(source.view(-1, size), 0, pages, out=rows)
        return rows.view(pairs, -1, row)

    def _attend(
        self,
        q: Tensor,  # [pairs, M, D]
        k: list[_Numbers],  # parts of D
        v: _Numbers,
        layer: AttentionSpec,
        shape: tuple[int, int, int, int],  # view of the scores [pairs, M, N] that the masks are broadcast to
        masks: list[_Mask],
        sinks: Tensor | None,  # broadcastable to `shape` with one column
        out: Tensor,  # [pairs, M, value width]
    ) -> None:
        pairs, rows, _ = q.shape
        values, value_scales = v
        flat = (pairs, rows, values.shape[1])
        parts = zip(q.split(self.spec.key_format.widths, 2), k, strict=True)
        scores, *others = [
            self._scaled_scores(*part, layer.scale, self._scratch.take(f"scores{number or ''}", flat, torch.float32))
            for number, part in enumerate(parts)
        ]
        for other in others:
            scores.add_(other)
        if layer.softcap is not None:
            scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
        view = scores.view(shape)
        for mask in masks:
            view[..., mask.start : mask.stop].masked_fill_(mask.masked, float("-inf"))
        if sinks is None:
            torch.softmax(scores, -1, out=scores)
        else:  # the sinks follow the other columns, so that they are added last for every number of columns
            column = sinks.expand(*shape[:3], 1).reshape(pairs, rows, 1)
            scores.copy_(torch.cat((scores, column), -1).softmax(-1)[..., :-1])
        if value_scales is not None:
            scores.mul_(value_scales.unsqueeze(1))
        if q.dtype == torch.float32:
            torch.bmm(scores, values, out=out)
        else:
            torch.bmm(self._scratch.take("high", flat, q.dtype).copy_(scores), values, out=out)

    def _scaled_scores(self, q: Tensor, k: _Numbers, scale: float, out: Tensor) -> Tensor:
        """Return the scores of one part of queries and keys, in `out` float32 [pairs, M, N]."""
        keys, scales = k
        scores = self._scores(q, keys.transpose(1, 2), scale, out)
        return scores if scales is None else scores.mul_(scales.unsqueeze(1))

    def _scores(self, q: Tensor, keys: Tensor, scale: float, scores: Tensor) -> Tensor:
        """Return scaled scores in `scores` float32 [pairs, M, N], with the rounding error of 16-bit matmuls added back
        (see above)."""
        flat = tuple(scores.shape)
        if q.dtype == torch.float32:
            return torch.baddbmm(scores, q, keys, beta=0, alpha=scale, out=scores)
        high = self._scratch.take("high", flat, q.dtype)
        lost = self._scratch.take("lost", flat, q.dtype)
        torch.baddbmm(high, q, keys, beta=0, alpha=scale, out=high)
        torch.baddbmm(high, q, keys, beta=-1, alpha=scale, out=lost)
        return scores.copy_(high).add_(lost)


def _cut(numbers: _Numbers, columns: slice) -> _Numbers:
    values, scales = numbers
    return values[:, columns], None if scales is None else scales[:, columns]


def _masks(query: np.ndarray, seen_from: np.ndarray, columns: int) -> list[_Mask]:
    """Return the masks of queries at columns `query` (any shape ending in 1) over `columns` columns.

    `seen_from`: of the same shape, the first column that each query sees. The masks cover only columns that at least
    one query must not attend to.
    """
    masks = []
    start = int(query.min()) + 1
    if start < columns:
        masks.append(_Mask(start, columns, torch.from_numpy(np.arange(start, columns) > query)))
    if (stop := int(seen_from.max())) > 0:
        masks.append(_Mask(0, stop, torch.from_numpy(np.arange(stop) < seen_from)))
    return masks
