"""Attention on the CPU from torch's own operations: few of them, each over as many sequences as possible.

Knows pages, query heads folded onto their KV head, and how much scratch memory one call may use. Does not know models.

One recipe serves decode, prefill and chunks: gather the pages of some (sequence, KV head) lanes, multiply, mask,
softmax, multiply. Three facts about oneDNN's 16-bit batched products, each held by a test, shape it:

* A row of a product does not depend on how many rows, lanes or (zero-weighted) columns stand beside it. So a token's
  result is the same bits whether it was decoded or prefilled, alone or in company, in one chunk or many.
* They round scores to 16 bits, too coarse for models whose keys carry large biases. The same product with the rounded
  scores subtracted returns what rounding lost, and the sum of both is good to about 17 bits.
* Weight zero times NaN is NaN. A value page is therefore cleared when its first slot is written, and columns beyond a
  sequence's pages, or whose pages were freed, read a page that is never written: what others left cannot leak.
"""

from dataclasses import dataclass, field
from math import lcm, prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from workers.attention.forward_batch import ForwardBatch
from workers.protocol import NULL_BLOCK

# Columns come in multiples of this many tokens, counted from position 0: whatever the block size, a sequence sees the
# same products.
_COLUMNS = 32
# A sliding window starts at a multiple of this many tokens, so that the order of additions does not move with it.
_WINDOW_STEP = 128
# Smaller products than this take another kernel in torch, with other rounding.
_SMALL_PRODUCT = 4096
# Scratch bounds: elements of gathered keys per call (unless one sequence alone is longer), and elements of scores.
_MAX_KEYS = 1 << 20
_MAX_SCORES = 1 << 19
# One more group of sequences costs about as much dispatch as this many gathered key elements cost time.
_GROUP_COST = 100_000
_MAX_VIEWS = 256


@dataclass(frozen=True, slots=True)
class _Hide:
    """Boolean `mask` over the score columns `start` to `stop`; everything outside is visible."""

    start: int
    stop: int
    mask: Tensor  # bool, broadcastable to [., ., ., stop - start]


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one query token each and about equal contexts."""

    rows: slice | Tensor  # which of the T rows
    size: int
    pages: Tensor  # int64 [size * kv_heads * P]   lanes are (sequence, KV head)
    hides: list[_Hide]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some query rows of one sequence and the columns they can see."""

    start: int
    stop: int
    first_column: int
    last_column: int
    hides: list[_Hide]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several query tokens."""

    pages: Tensor  # int64 [kv_heads * P]
    blocks: list[_Rows]


@dataclass(slots=True)
class _Plan:
    """Units of work, made when the first layer of each window length asks."""

    tables: np.ndarray  # int32 [S, B]
    query_lens: list[int]
    context_lens: list[int]
    units: dict[tuple[int | None, int], tuple[list[_Decode], list[_Prefill]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Writes:
    """Where a step's keys and values go. Kept for the layers of one step, recognised by its slot mapping: the batch
    itself may hold views of memory that must not be kept."""

    slots: Tensor  # int64 [T]
    rows: Tensor  # int64 [T * kv_heads]   rows of the pages taken as [blocks * kv_heads * block_size, head_dim]
    fresh: Tensor  # int64   value pages whose first slot is written, as rows of [blocks * kv_heads, block_size * D]


class _Scratch:
    """Buffers that live as long as the backend: fresh ones cost more in page faults than the arithmetic on them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # 24 layers ask for the same shapes

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        view = self._views.get((name, shape))
        if view is None:
            count = prod(shape)
            buffer = self._buffers.get(name)
            if len(self._views) >= _MAX_VIEWS or buffer is None or buffer.numel() < count:
                self._views.clear()  # they would keep the smaller buffer alive
            if buffer is None or buffer.numel() < count:
                buffer = self._buffers[name] = torch.empty(count, dtype=dtype)
            view = self._views[name, shape] = buffer[:count].view(shape)
        return view


class TorchBackend:
    """Pages are `[blocks + 1, kv_heads, block_size, head_dim]`; the last one stays zero."""

    name: ClassVar[str] = "torch"

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self._column_step = lcm(_COLUMNS, spec.block_size)
        self._min_columns = _SMALL_PRODUCT // spec.head_dim + 1
        self._scratch = _Scratch()
        self._zero_page = -1
        self._writes: _Writes | None = None

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"it computes on the CPU and the model is on {spec.device.type}"
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it knows float32, bfloat16 and float16, not {spec.dtype}"
        return None

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec
        self._zero_page = num_blocks
        shape = (num_blocks + 1, spec.num_kv_heads, spec.block_size, spec.head_dim)
        return [
            LayerKV(torch.zeros(shape, dtype=spec.dtype), torch.zeros(shape, dtype=spec.dtype))
            for _ in range(spec.num_layers)
        ]

    def prepare(self, batch: ForwardBatch) -> _Plan:
        return _Plan(batch.block_tables.numpy(), batch.query_lens, batch.context_lens)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, kv: LayerKV, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        writes = self._writes
        if writes is None or writes.slots is not batch.slot_mapping:
            writes = self._writes = self._writes_of(batch)
        width = self.spec.head_dim
        if len(writes.fresh):
            kv.v.view(-1, self.spec.block_size * width).index_fill_(0, writes.fresh, 0)
        kv.k.view(-1, width).index_copy_(0, writes.rows, k.reshape(-1, width))
        kv.v.view(-1, width).index_copy_(0, writes.rows, v.reshape(-1, width))

    def _writes_of(self, batch: ForwardBatch) -> _Writes:
        size, heads = self.spec.block_size, self.spec.num_kv_heads
        slots = batch.slot_mapping
        head = torch.arange(heads)
        lanes = (slots // size).unsqueeze(1) * heads + head  # [T, kv_heads]
        rows = lanes * size + (slots % size).unsqueeze(1)
        begins_page = (slots % size == 0) & (slots >= size)  # the null block is never read for a result
        return _Writes(slots, rows.flatten(), lanes[begins_page].flatten())

    # -- planning --------------------------------------------------------------------------------------------------

    def _units(self, plan: _Plan, layer: AttentionSpec) -> tuple[list[_Decode], list[_Prefill]]:
        key = (layer.sliding_window, layer.num_heads)
        units = plan.units.get(key)
        if units is None:
            units = plan.units[key] = self._make_units(plan, layer)
        return units

    def _make_units(self, plan: _Plan, layer: AttentionSpec) -> tuple[list[_Decode], list[_Prefill]]:
        starts = np.cumsum([0, *plan.query_lens])
        query_lens = np.array(plan.query_lens)
        contexts = np.array(plan.context_lens)
        firsts = self._first_columns(contexts - query_lens, layer.sliding_window)  # [S]   position of column 0
        columns = self._padded(contexts - firsts)
        single = np.flatnonzero(query_lens == 1)
        decodes = [
            self._decode(plan.tables[group], starts[group], contexts[group], firsts[group], columns[group], layer)
            for group in self._groups(single, columns)
        ]
        prefills = []
        for seq in np.flatnonzero(query_lens > 1):
            blocks = self._row_blocks(
                int(starts[seq]), int(query_lens[seq]), int(contexts[seq]), int(firsts[seq]), layer
            )
            one = slice(seq, seq + 1)
            count = max(block.last_column for block in blocks)
            prefills.append(_Prefill(self._pages(plan.tables[one], contexts[one], firsts[one], count), blocks))
        return decodes, prefills

    def _first_columns(self, first_queries: np.ndarray, window: int | None) -> np.ndarray:
        """The first position worth reading, for sequences whose first query stands at `first_queries`."""
        if window is None:
            return np.zeros_like(first_queries)
        step = lcm(_WINDOW_STEP, self._column_step)
        return np.maximum(first_queries - window + 1, 0) // step * step

    def _padded(self, lengths):
        """Numbers of columns that hold `lengths` tokens."""
        step = self._column_step
        return (np.maximum(lengths, self._min_columns) + step - 1) // step * step

    def _groups(self, seqs: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
        """Cut `seqs` into groups of similar length, each small enough for the scratch; at most a split per saving."""
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

    def _pages(self, tables: np.ndarray, contexts: np.ndarray, firsts: np.ndarray, columns: int) -> Tensor:
        """Pages of (sequence, KV head) lanes in reading order, the zero page where a sequence has none: [n * H * P]."""
        size, heads = self.spec.block_size, self.spec.num_kv_heads
        wanted = (firsts // size)[:, None] + np.arange(columns // size)  # [n, P]
        held = wanted < (-(-contexts // size))[:, None]
        blocks = np.take_along_axis(tables.astype(np.int64), np.where(held, wanted, 0), axis=1)
        held &= blocks != NULL_BLOCK  # freed, being outside the window
        blocks = np.where(held, blocks, self._zero_page)
        return torch.from_numpy((blocks[:, None, :] * heads + np.arange(heads)[None, :, None]).reshape(-1))

    def _decode(
        self,
        tables: np.ndarray,
        rows: np.ndarray,
        contexts: np.ndarray,
        firsts: np.ndarray,
        columns: np.ndarray,
        layer: AttentionSpec,
    ) -> _Decode:
        count = int(columns.max())
        query = contexts - 1 - firsts  # [n]   the column of each sequence's query
        hides = _hides(query[:, None, None, None], count, layer.sliding_window)
        consecutive = rows[-1] - rows[0] == len(rows) - 1
        where = slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else torch.from_numpy(rows)
        return _Decode(where, len(rows), self._pages(tables, contexts, firsts, count), hides)

    def _row_blocks(self, start: int, query_len: int, context: int, first: int, layer: AttentionSpec) -> list[_Rows]:
        """Cut a sequence's query rows so that the scores of one cut stay within the scratch."""
        blocks = []
        begin = context - query_len  # position of the next row
        while begin < context:
            low = int(self._first_columns(np.array(begin), layer.sliding_window))
            most = int(self._padded(np.array(context - low)))
            count = min(max(16, _MAX_SCORES // (layer.num_heads * most)), context - begin)
            columns = int(self._padded(np.array(begin + count - low)))
            query = np.arange(begin, begin + count)[None, :, None, None] - low
            row = start + begin - (context - query_len)
            hides = _hides(query, columns, layer.sliding_window)
            blocks.append(_Rows(row, row + count, low - first, low - first + columns, hides))
            begin += count
        return blocks

    # -- computing -------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, kv: LayerKV, plan: _Plan, layer: AttentionSpec) -> Tensor:
        rows, heads, width = q.shape
        lanes = self.spec.num_kv_heads
        group = heads // lanes
        out = torch.empty((rows, lanes, group, width), dtype=q.dtype)
        folded = q.reshape(rows, lanes, group, width)
        decodes, prefills = self._units(plan, layer)
        for unit in decodes:
            k, v = self._gather(kv, unit.pages, unit.size * lanes)  # [n * H, N, D]
            shape = (unit.size, lanes, group, k.shape[1])
            if isinstance(unit.rows, slice):
                into = out[unit.rows].view(-1, group, width)
                self._lanes(folded[unit.rows].reshape(-1, group, width), k, v, layer, shape, unit.hides, into)
            else:
                some = folded.index_select(0, unit.rows)
                result = torch.empty_like(some)
                self._lanes(some.view(-1, group, width), k, v, layer, shape, unit.hides, result.view(-1, group, width))
                out.index_copy_(0, unit.rows, result)
        for unit in prefills:
            k, v = self._gather(kv, unit.pages, lanes)  # [H, N, D]
            for block in unit.blocks:
                count = block.stop - block.start
                columns = slice(block.first_column, block.last_column)
                some = folded[block.start : block.stop].transpose(0, 1).reshape(lanes, count * group, width)
                result = torch.empty_like(some)
                shape = (lanes, count, group, block.last_column - block.first_column)
                self._lanes(some, k[:, columns], v[:, columns], layer, shape, block.hides, result)
                out[block.start : block.stop] = result.view(lanes, count, group, width).transpose(0, 1)
        return out.view(rows, heads * width)

    def _gather(self, kv: LayerKV, pages: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
        """Copies of the pages, in order, as [lanes, N, D]; valid until the next call."""
        size, width = self.spec.block_size, self.spec.head_dim
        shape = (len(pages), size * width)
        k = self._scratch.take("k", shape, kv.k.dtype)
        v = self._scratch.take("v", shape, kv.v.dtype)
        torch.index_select(kv.k.view(-1, size * width), 0, pages, out=k)
        torch.index_select(kv.v.view(-1, size * width), 0, pages, out=v)
        return k.view(lanes, -1, width), v.view(lanes, -1, width)

    def _lanes(
        self,
        q: Tensor,  # [lanes, M, D]
        k: Tensor,  # [lanes, N, D]
        v: Tensor,  # [lanes, N, D]
        layer: AttentionSpec,
        shape: tuple[int, int, int, int],  # the scores [lanes, M, N] as the masks see them
        hides: list[_Hide],
        out: Tensor,  # [lanes, M, D]
    ) -> None:
        lanes, rows, _ = q.shape
        flat = (lanes, rows, k.shape[1])
        scores = self._scores(q, k.transpose(1, 2), layer.scale, flat)
        if layer.softcap is not None:
            scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
        view = scores.view(shape)
        for hide in hides:
            view[..., hide.start : hide.stop].masked_fill_(hide.mask, float("-inf"))
        torch.softmax(scores, -1, out=scores)
        if q.dtype == torch.float32:
            torch.bmm(scores, v, out=out)
        else:
            torch.bmm(self._scratch.take("high", flat, q.dtype).copy_(scores), v, out=out)

    def _scores(self, q: Tensor, keys: Tensor, scale: float, flat: tuple[int, int, int]) -> Tensor:
        """Scaled float32 scores [lanes, M, N]; see the module's second fact."""
        scores = self._scratch.take("scores", flat, torch.float32)
        if q.dtype == torch.float32:
            return torch.baddbmm(scores, q, keys, beta=0, alpha=scale, out=scores)
        high = self._scratch.take("high", flat, q.dtype)
        lost = self._scratch.take("lost", flat, q.dtype)
        torch.baddbmm(high, q, keys, beta=0, alpha=scale, out=high)
        torch.baddbmm(high, q, keys, beta=-1, alpha=scale, out=lost)
        return scores.copy_(high).add_(lost)


def _hides(query: np.ndarray, columns: int, window: int | None) -> list[_Hide]:
    """What queries at columns `query` (any shape ending in 1) may not see of `columns` columns: the future, and what
    lies before the window. Only the columns where queries differ, or where all are blind, are listed."""
    hides = []
    start = int(query.min()) + 1
    if start < columns:
        hides.append(_Hide(start, columns, torch.from_numpy(np.arange(start, columns) > query)))
    if window is not None and (stop := int(query.max()) - window + 1) > 0:
        hides.append(_Hide(0, stop, torch.from_numpy(np.arange(stop) <= query - window)))
    return hides
