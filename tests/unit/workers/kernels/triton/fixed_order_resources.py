"""Compiles the kernel of batch-invariant products for several kinds of CUDA device, without one.

    python -m tests.unit.workers.kernels.triton.fixed_order_resources 80 90

Prints what `triton_resources` prints.
"""

import json
import sys

import torch

from oarlock.workers.kernels.triton.products import multiply_in_order
from oarlock.workers.quantization.fixed_order import product_tile
from tests.unit.workers.kernels.triton.triton_resources import amd_of, resources

_NUMBERS = dict.fromkeys(("rows", "columns", "inputs", "x_stride", "span"), "i32")


def main(kinds: list[str]) -> None:
    found = {}
    for kind in kinds:
        for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
            tile, types = product_tile(dtype), _NUMBERS | {"x": name, "weight": name, "partial": "*fp32"}
            found[f"{kind} {dtype}"] = resources(
                multiply_in_order,
                kind,
                tile.constants(),
                types,
                tile.options(amd_of(kind)),
                ("columns", "inputs", "x_stride", "span"),
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
