"""Compiles the kernels of weights of 4 and 8 bits, and of batch-invariant products, for CUDA devices, without one.

    python -m tests.unit.workers.kernels.triton.weight_only_resources largest|all 80 90

Prints what `triton_resources` prints: of the forms that take the most, or of all.
"""

import json
import sys

import torch

from oarlock.workers.kernels.triton.matmul import merge, multiply, multiply_in_order, round_rows, write_out
from oarlock.workers.quantization.fixed_order import matmul_tile
from oarlock.workers.quantization.weight_only import BLOCKS, MERGED, StoredWeight, multiply_options
from tests.unit.workers.kernels.triton.triton_resources import WITH_FLOAT8, amd_of, resources

_TYPES = {"values": "*u8", "zeros": "*fp16", "factors": "*fp32", "partial": "*fp32", "ids": "*i64"}
_TYPES |= dict.fromkeys(("x", "out", "bias", "residual"), "*bf16")
_TYPES |= dict.fromkeys(("rows", "columns", "inputs", "units", "x_stride", "row_bytes", "span", "spans"), "i32")
_TYPES |= dict.fromkeys(("residual_stride", "first"), "i32")
_DIVISIBLE = ("columns", "inputs", "x_stride", "row_bytes", "span", "residual_stride")


def stored(bits: int, group: int, *, is_float: bool = False, zeros: bool = False) -> StoredWeight:
    """The form of a weight; only what kernels are compiled for is right."""
    scales = torch.empty(1, dtype=torch.float32 if is_float else torch.float16) if group else None
    none = torch.empty(1)
    return StoredWeight(none, scales, none if zeros else None, none, 4096, group or 4096, bits, is_float)


FORMS = {
    "int4 in groups of 32": stored(4, 32),
    "int4 in groups of 128 with zeros": stored(4, 128, zeros=True),
    "int4 in groups of 16": stored(4, 16),
    "int8": stored(8, 0),
    "int8 in groups of 32 with zeros": stored(8, 32, zeros=True),
    "float8": stored(8, 0, is_float=True),
    "float8 in groups of 128": stored(8, 128, is_float=True),
}


LARGEST = ("int4 in groups of 128 with zeros", "int8 in groups of 32 with zeros")


def in_order(kind: str) -> dict[str, dict[str, int]]:
    """Resources of the products whose rows have the same bits in every batch."""
    found = {}
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        tile, types = matmul_tile(dtype), _TYPES | {"x": name, "weight": name}
        found[f"{kind} {dtype} in order"] = resources(
            multiply_in_order,
            kind,
            tile.constants(),
            types,
            tile.options(amd_of(kind)),
            ("columns", "inputs", "x_stride", "span"),
        )
    return found


def main() -> None:
    found = {}
    of_all = sys.argv[1] == "all"
    for kind in sys.argv[2:]:
        found |= in_order(kind)
        for name, weight in FORMS.items():
            if not of_all and name not in LARGEST:
                continue
            constants = weight.constants()
            scales = "*fp32" if weight.is_float else "*fp16"
            for rows in BLOCKS if of_all else BLOCKS[-1:]:
                found[f"{kind} {name}, {rows} rows"] = resources(
                    multiply, kind, constants | {"BLOCK_M": rows}, _TYPES | {"scales": scales},
                    multiply_options(rows, amd_of(kind)), _DIVISIBLE,
                )  # fmt: skip
            if not of_all:
                continue
            found[f"{kind} {name}, written out"] = resources(
                write_out, kind, constants | {"IDS": True}, _TYPES | {"scales": scales}, {"num_warps": 4},
                _DIVISIBLE,
            )  # fmt: skip
        if kind in WITH_FLOAT8:  # the first that has the type
            found[f"{kind} rows as float8"] = resources(
                round_rows,
                kind,
                {"BLOCK": 2048},
                _TYPES | {"out": "*fp8e4nv", "scales": "*fp32"},
                {"num_warps": 8},
            )
        constants = {"BIAS": True, "RESIDUAL": True, "GATE": "gelu_tanh", "BLOCK": MERGED}
        found[f"{kind} merge"] = resources(merge, kind, constants, _TYPES, {"num_warps": 4}, _DIVISIBLE)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
