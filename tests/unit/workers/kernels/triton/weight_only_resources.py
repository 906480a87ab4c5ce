"""Compiles the kernels of weights of 4 and 8 bits for several kinds of CUDA device, without one.

    python -m tests.unit.workers.kernels.triton.weight_only_resources largest|all 80 90

Prints what `triton_resources` prints: of the forms that take the most, or of all.
"""

import json
import sys

import torch

from oarlock.workers.kernels.triton.products import merge, multiply, round_rows, write_out
from oarlock.workers.quantization.weight_only import MERGED, MOST_ROWS, StoredWeight, multiply_options
from tests.unit.workers.kernels.triton.triton_resources import resources

_TYPES = {"values": "*u8", "zeros": "*fp16", "factors": "*fp32", "partial": "*fp32", "ids": "*i64"}
_TYPES |= dict.fromkeys(("x", "out", "bias", "residual"), "*bf16")
_TYPES |= dict.fromkeys(("rows", "columns", "inputs", "units", "x_stride", "row_bytes", "span", "spans"), "i32")
_TYPES |= dict.fromkeys(("residual_stride", "first"), "i32")
_DIVISIBLE = ("columns", "inputs", "x_stride", "row_bytes", "span", "residual_stride")


def stored(bits: int, group: int, *, is_float8: bool = False, zeros: bool = False) -> StoredWeight:
    """The form of a weight; only what kernels are compiled for is right."""
    scales = torch.empty(1, dtype=torch.float32 if is_float8 else torch.float16) if group else None
    none = torch.empty(1)
    return StoredWeight(none, scales, none if zeros else None, none, 4096, group or 4096, bits, is_float8)


FORMS = {
    "int4 in groups of 32": stored(4, 32),
    "int4 in groups of 128 with zeros": stored(4, 128, zeros=True),
    "int4 in groups of 16": stored(4, 16),
    "int8": stored(8, 0),
    "int8 in groups of 32 with zeros": stored(8, 32, zeros=True),
    "float8": stored(8, 0, is_float8=True),
    "float8 in groups of 128": stored(8, 128, is_float8=True),
}


LARGEST = ("int4 in groups of 128 with zeros", "int8 in groups of 32 with zeros")


def main() -> None:
    found = {}
    of_all = sys.argv[1] == "all"
    for capability in map(int, sys.argv[2:]):
        for name, weight in FORMS.items():
            if not of_all and name not in LARGEST:
                continue
            constants = weight.constants()
            scales = "*fp32" if weight.is_float8 else "*fp16"
            for rows in (16, MOST_ROWS) if of_all else (MOST_ROWS,):
                found[f"{capability} {name}, {rows} rows"] = resources(
                    multiply, capability, constants | {"BLOCK_M": rows}, _TYPES | {"scales": scales},
                    multiply_options(rows), _DIVISIBLE,
                )  # fmt: skip
            if not of_all:
                continue
            found[f"{capability} {name}, written out"] = resources(
                write_out, capability, constants | {"IDS": True}, _TYPES | {"scales": scales}, {"num_warps": 4},
                _DIVISIBLE,
            )  # fmt: skip
        if capability >= 89:  # the first that has the type
            found[f"{capability} rows as float8"] = resources(
                round_rows,
                capability,
                {"BLOCK": 2048},
                _TYPES | {"out": "*fp8e4nv", "scales": "*fp32"},
                {"num_warps": 8},
            )
        constants = {"BIAS": True, "RESIDUAL": True, "GATE": "gelu_tanh", "BLOCK": MERGED}
        found[f"{capability} merge"] = resources(merge, capability, constants, _TYPES, {"num_warps": 4}, _DIVISIBLE)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
