"""Compiles the kernels of a mixture's experts for several kinds of device, without one.

    python -m tests.unit.workers.kernels.triton.expert_resources largest|all 80 90

Prints what `triton_resources` prints: of the largest blocks of two forms of weights, or of all.
"""

import json
import sys
from typing import Any

import torch

from oarlock.workers.kernels.triton.experts import add_experts, multiply_experts, sort_pairs
from oarlock.workers.quantization.triton_experts import BLOCKS, options
from tests.unit.workers.kernels.triton.triton_resources import amd_of, resources
from tests.unit.workers.kernels.triton.weight_only_resources import stored

_NUMBERS = (
    "blocks",
    "pairs",
    "columns",
    "inputs",
    "slice_inputs",
    "groups",
    "x_stride",
    "row_bytes",
    "first",
    "tokens",
)
_TYPES = dict.fromkeys(_NUMBERS, "i32") | dict.fromkeys(("alpha", "limit"), "fp32")
_TYPES |= {"x": "*bf16", "bias": "*bf16", "factors": "*fp32", "zeros": "*fp16", "partial": "*fp32", "weights": "*fp32"}
_TYPES |= {"pair_factors": "*fp32"}
_DIVISIBLE = ("columns", "inputs", "slice_inputs", "x_stride", "row_bytes")
_DENSE = {"BITS": 16, "FLOAT": False, "UNIT": 32, "GROUP_UNITS": 0, "ZEROS": False, "UNITS": 2}


def _constants(bits: int, group: int, **form: bool) -> dict[str, Any]:
    return {name: value for name, value in stored(bits, group, **form).constants().items() if name != "BLOCK_N"}


# Form -> constants, and types of values and scales.
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "bfloat16": (_DENSE, "*bf16", "*bf16"),
    "int4 in groups of 32 with zeros": (_constants(4, 32, zeros=True), "*u8", "*fp16"),
    "MXFP4": (_constants(4, 32, is_float=True), "*u8", "*u8"),
    "int8": (_constants(8, 0), "*u8", "*fp16"),
    "float8 in groups of 128": (_constants(8, 128, is_float=True), "*u8", "*fp32"),
}


def main(formats: str, kinds: list[str]) -> None:
    found = {}
    for kind in kinds:
        for name in FORMS if formats == "all" else list(FORMS)[:2]:
            constants, values, scales = FORMS[name]
            types = _TYPES | {"values": values, "scales": scales}
            for block in BLOCKS if formats == "all" else BLOCKS[-1:]:
                chosen = options(block, torch.bfloat16, amd_of(kind), is_packed=name != "bfloat16")
                for activation, out in (("clamped_swiglu", "*bf16"), ("", "*fp32")):
                    settings = {"TOP_K": 8, "ACTIVATION": activation, "BIAS": True, "FACTORS": True, "BLOCK_M": block}
                    found[f"{kind} {name}, {block} pairs {activation}"] = resources(
                        multiply_experts, kind, constants | settings, types | {"out": out}, chosen, _DIVISIBLE
                   
                    )  # fmt: skip
        sizes = {"EXPERTS": 128, "E_POW": 256, "BLOCK_M": 16, "SIZE": 1024}
        found[f"{kind} sort"] = resources(sort_pairs, kind, sizes, _TYPES, {"num_warps": 8})
        sizes = {"EXPERTS": 128, "TOP_K": 8, "GROUP": 0, "WEIGHTED": True, "BLOCK": 1024}
        found[f"{kind} sum"] = resources(add_experts, kind, sizes, _TYPES | {"out": "*fp32"}, {"num_warps": 4})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
