"""The pairs of one linear layer on a device, and the launches of their kernels (`kernels/triton/low_rank.py`).

Memory, slots and values are the same as of `LayerPairs`. Launches depend on the numbers of rows and slots only: which
slots adapt the layer, and with which rank, is in the device's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oarlock.workers.attention.blocks_by_slot import BLOCK_ROWS, BlocksBySlot
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.placement import Placement
from oarlock.workers.lora.low_rank import LayerPairs, RankPair
from oarlock.workers.quantization.method import WeightShard

_LEAST_SPAN = 512  # inputs of a program: fewer would not pay for the addition of their sums
_MOST_SPANS = 16


@dataclass(frozen=True, slots=True)
class LowRankTile:
    """Sizes of the tiles of both kernels, and their compile options. They depend on the layer and its dtype only."""

    values: int  # values of `A x` of a program
    inputs: int  # inputs of a step
    outputs: int  # outputs of a program of `expand_rows`
    rank: int  # values of `A x` that a step of `expand_rows` multiplies
    warps: int  # of `expand_rows`: ptxas spills a few registers of float32 if there are 4

    @staticmethod
    def of(width: int, max_rank: int, dtype: torch.dtype) -> "LowRankTile":
        """Return the tile of a layer with `width` values of `A x` for each row."""
        return LowRankTile(
            values=min(64, max(16, _power_of_2(width))),
            inputs=64 if dtype == torch.float32 else 128,
            outputs=64,
            rank=16 if dtype == torch.float32 else min(32, max(16, _power_of_2(max_rank))),
            warps=8 if dtype == torch.float32 else 4,
        )

    def shrink(self, max_rank: int, amd: str | None) -> dict[str, Any]:
        """Return the constants and the options of `shrink_rows`."""
        sizes = {"BLOCK_M": BLOCK_ROWS, "BLOCK_W": self.values, "BLOCK_K": self.inputs}
        return {"MAX_RANK": max_rank, **sizes, **_options(4, 3, amd)}

    def expand(self, max_rank: int, amd: str | None) -> dict[str, Any]:
        """Return the constants and the options of `expand_rows` that are alike in all calls."""
        sizes = {"BLOCK_M": BLOCK_ROWS, "BLOCK_N": self.outputs, "BLOCK_R": self.rank}
        return {"MAX_RANK": max_rank, **sizes, **_options(self.warps, 2, amd)}


class DevicePairs(LayerPairs):
    """`LayerPairs` on a device with Triton kernels."""

    def __init__(self, shard: WeightShard, slots: int, max_rank: int, placement: Placement) -> None:
        """Allocate memory for `slots` pairs of each part of `shard`, filled with zeros."""
        super().__init__(shard, slots, max_rank, placement)
        self.device_ranks = torch.zeros(slots, dtype=torch.int32, device=placement.device)
        self._width = len(shard.parts) * max_rank
        self.tile = tile = LowRankTile.of(self._width, max_rank, placement.dtype)
        steps = -(-shard.local_inputs // tile.inputs)
        spans = min(_MOST_SPANS, max(1, shard.local_inputs // _LEAST_SPAN))
        self._span = -(-steps // spans) * tile.inputs
        self._spans = -(-shard.local_inputs // self._span)
        self._tiles = self._tiles_of(self.outputs)
        self._gate_tiles = self._tiles_of(self.outputs[:1])

    @torch.inference_mode()
    def put(self, slot: int, pairs: Sequence[RankPair]) -> None:
        """Replace the pairs of `slot`, as `LayerPairs` describes, in the order of the device's other work."""
        super().put(slot, pairs)
        self.device_ranks[slot - 1] = int(self.ranks[slot - 1])

    def low_rank(self, x: Tensor, rows: BlocksBySlot) -> Tensor:
        """Return `A x` of all rows of `x` [T, inputs], by spans of inputs: float32 [spans, T, parts * max rank]."""
        kernel: Any = _kernels().shrink_rows  # calling a kernel compiles it; no annotation of its arguments
        x = x if x.stride(1) == 1 else x.contiguous()
        low = torch.empty((self._spans, len(x), self._width), dtype=torch.float32, device=x.device)
        kernel[(len(rows.slots), -(-self._width // self.tile.values), self._spans)](
            x, self.a, rows.order, rows.slots, self.device_ranks, low, rows.first, len(x), self._width, x.shape[1],
            x.stride(0), self._span, **self.tile.shrink(self.max_rank, availability.amd_architecture()),
        )  # fmt: skip
        return low

    def low_rank_of_ids(self, ids: Tensor, start: int, rows: BlocksBySlot) -> Tensor:
        """Return A's column of each of `ids` int64 [T]: [T, max rank], zeros for ids of other ranks.

        `start`: the first id of this rank.
        """
        kernel: Any = _kernels().take_columns
        low = torch.empty((len(ids), self.max_rank), dtype=self.a.dtype, device=ids.device)
        kernel[(len(rows.slots), -(-self.max_rank // self.tile.rank))](
            ids, self.a, rows.order, rows.slots, self.device_ranks, low, len(ids), start, self.a.shape[3],
            MAX_RANK=self.max_rank, BLOCK_M=BLOCK_ROWS, BLOCK_R=self.tile.rank, num_warps=4,
        )  # fmt: skip
        return low

    def finish(
        self,
        sums: Tensor,
        low: Tensor,
        rows: BlocksBySlot,
        dtype: torch.dtype,
        residual: Tensor | None = None,
        gate: str = "",
    ) -> Tensor:
        """Add the update to `sums` [T, outputs], then apply the gate or add `residual`: `dtype` [T, outputs].

        `low`: the result of `low_rank`, added over the ranks that share the inputs. `gate`: see `GatedMatmul`; the
        result then has half of the outputs. May reuse the memory of `sums`.
        """
        kernel: Any = _kernels().expand_rows
        assert sums.is_contiguous() and low.is_contiguous() and (residual is None or residual.stride(1) == 1)
        (count, outputs), in_place = sums.shape, sums.dtype == dtype and residual is None and not gate
        out = sums
        if not in_place:
            out = torch.empty((count, outputs // 2 if gate else outputs), dtype=dtype, device=sums.device)
        tiles = self._gate_tiles if gate else self._tiles
        kernel[(len(rows.slots), len(tiles))](
            sums, low, self.b, self.scales, rows.order, rows.slots, self.device_ranks, tiles,
            sums if residual is None else residual, out, rows.first, count, outputs, self._width, len(low),
            self.scales.shape[1], 0 if residual is None else residual.stride(0),
            GATE=gate, RESIDUAL=residual is not None, IN_PLACE=in_place,
            **self.tile.expand(self.max_rank, availability.amd_architecture()),
        )  # fmt: skip
        return out

    def _tiles_of(self, outputs: Sequence[int]) -> Tensor:
        """Return the tiles of parts with `outputs`: int32 [tiles, 3], the part, the first output, the part's end."""
        found, first = [], 0
        for part, count in enumerate(outputs):
            end = first + count
            found += [(part, at, end) for at in range(first, end, self.tile.outputs)]
            first = end
        return torch.tensor(found, dtype=torch.int32).to(self.b.device)


def _options(warps: int, stages: int, amd: str | None) -> dict[str, Any]:
    return {"PRECISION": availability.float32_precision(amd), **availability.options(warps, stages, amd)}


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _kernels() -> Any:
    from oarlock.workers.kernels.triton import low_rank  # Triton is only installed on some machines

    return low_rank
