"""Compiles the kernels of LoRA adapters for CUDA devices, without one.

    python -m tests.unit.workers.kernels.triton.low_rank_resources all|usual 80 90

Prints what `triton_resources` prints, for a low rank and a high one, or only for the low one. Tiles of ranks above 32
are alike.
"""

import json
import sys
from typing import Any

import torch

from oarlock.workers.attention.blocks_by_slot import BLOCK_ROWS
from oarlock.workers.kernels.triton.low_rank import expand_rows, shrink_rows, take_columns
from oarlock.workers.lora.device_pairs import LowRankTile
from tests.unit.workers.kernels.triton.triton_resources import amd_of, resources

_NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_NUMBERS = ("first", "rows", "width", "inputs", "x_stride", "span", "start", "local", "outputs", "spans", "parts")
_DIVISIBLE = ("width", "inputs", "x_stride", "span", "outputs", "residual_stride")


def of_layer(kind: str, dtype: torch.dtype, max_rank: int, parts: int) -> dict[str, dict[str, int]]:
    """Return the resources of a layer's kernels: of the usual calls if `dtype` is bfloat16, else of the largest."""
    tile, amd, name = LowRankTile.of(max_rank * parts, max_rank, dtype), amd_of(kind), _NAMES[dtype]
    types: dict[str, Any] = dict.fromkeys((*_NUMBERS, "residual_stride"), "i32")
    types |= dict.fromkeys(("x", "a", "b", "residual", "out"), name)
    types |= dict.fromkeys(("low", "sums", "scales"), "*fp32") | {"ids": "*i64"}
    title = f"{kind} {dtype} rank {max_rank}, {parts} parts"
    shrink, expand = tile.shrink(max_rank, amd), tile.expand(max_rank, amd)
    found = {f"{title} shrink": resources(shrink_rows, kind, {}, types, shrink, _DIVISIBLE)}
    for gate, is_added, in_place in (("gelu_tanh", False, False), ("", True, False), ("", False, True)):
        if parts == 2 or not gate:
            call = {"GATE": gate, "RESIDUAL": is_added, "IN_PLACE": in_place}
            own = types | ({"out": "*fp32"} if in_place else {})
            kinds = f"{gate}{' residual' * is_added}{' in place' * in_place}"
            found[f"{title} expand {kinds}"] = resources(expand_rows, kind, call, own, expand, _DIVISIBLE)
    sizes = {"MAX_RANK": max_rank, "BLOCK_M": BLOCK_ROWS, "BLOCK_R": tile.rank}
    found[f"{title} columns"] = resources(take_columns, kind, sizes, types | {"low": name}, {"num_warps": 4})
    return found


def main(layers: str, kinds: list[str]) -> None:
    chosen = [(torch.bfloat16, 8, 1)]
    if layers == "all":
        chosen += [(torch.bfloat16, 64, 2), (torch.float32, 64, 2)]
    found = {}
    for kind in kinds:
        for dtype, max_rank, parts in chosen:
            found |= of_layer(kind, dtype, max_rank, parts)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
