"""Compiles the Triton kernels for several kinds of CUDA device, without one, and prints what they take of each.

    python -m tests.unit.workers.kernels.triton.triton_resources model|int8|fp8 80 90

The last two: attention over pages of 8 bits; the first: everything else. One line of JSON: for each kind and shape the
bytes of shared memory, the registers of a thread, and the bytes of stack that a thread spills to.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oarlock.workers.attention.triton_backend import power_of_2, tile_shapes
from oarlock.workers.kernels.triton.elementwise import add_and_norm_row, gate_row, warps
from oarlock.workers.kernels.triton.kv_pages import rotate_and_write
from oarlock.workers.kernels.triton.paged_attention import attend

HEADS = {torch.bfloat16: (64, 128, 256), torch.float32: (64, 128)}
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_NUMBERS = {
    "q_stride": "i32", "table_stride": "i32", "scale": "fp32", "softcap": "fp32", "window": "i32", "span": "i32",
    "qkv_stride": "i32", "eps": "fp32", "post_eps": "fp32",
}  # fmt: skip
_DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def attention(capability: int, dtype: torch.dtype, head_dim: int, many: bool, form: str = "") -> dict[str, int]:
    """Resources of the tile for few query rows or for many, with every option on. `form`: of pages of 8 bits."""
    shape = tile_shapes(head_dim, dtype, form)[many]
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "BLOCK_M": shape.rows,
        "BLOCK_N": shape.keys, "BLOCK_D": power_of_2(head_dim), "SOFTCAP": True, "WINDOW": True, "SPANS": True,
        "LIVE": True, "FORM": form, "NATIVE_FP8": capability >= 89,
    }  # fmt: skip
    types = dict.fromkeys(("q", "out"), _TYPES[dtype]) | dict.fromkeys(("partial_out", "partial_stats"), "*fp32")
    types |= _pages(dtype, form)
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return resources(attend, capability, constants, types, options)


def _pages(dtype: torch.dtype, form: str) -> dict[str, str]:
    pages = dict.fromkeys(("k_pages", "v_pages"), "*u8" if form else _TYPES[dtype])
    return pages | dict.fromkeys(("k_scales", "v_scales"), "*i16")


def rotation(capability: int, dtype: torch.dtype, head_dim: int, form: str = "") -> dict[str, int]:
    constants = {
        "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "ROTARY": head_dim, "BLOCK_SIZE": 16,
        "BLOCK_D": power_of_2(head_dim), "NORM": True, "FORM": form,
    }  # fmt: skip
    types = dict.fromkeys(("qkv", "q"), _TYPES[dtype]) | {"slot_mapping": "*i64"} | _pages(dtype, form)
    types |= dict.fromkeys(("cos", "sin", "weight"), "*fp32")
    return resources(rotate_and_write, capability, constants, types, {"num_warps": 1})


def norm(capability: int, size: int) -> dict[str, int]:
    """Resources of the kernel with both norms."""
    types = dict.fromkeys(("residual", "total", "normed"), "*bf16")
    types |= dict.fromkeys(("x", "post_weight", "weight"), "*fp32")
    constants = {"SIZE": size, "BLOCK": power_of_2(size), "POST": True}
    return resources(add_and_norm_row, capability, constants, types, {"num_warps": warps(power_of_2(size))})


def activation(capability: int) -> dict[str, int]:
    constants = {"WIDTH": 14336, "BLOCK": 1024, "GELU": True}
    return resources(gate_row, capability, constants, dict.fromkeys(("y", "out"), "*bf16"), {"num_warps": 4})


def resources(
    kernel: Any,
    capability: int,
    constants: dict[str, Any],
    types: dict[str, str],
    options: dict[str, int],
    divisible: Sequence[str] = (),
) -> dict[str, int]:
    """`types`: of what is not a pointer to int32. `divisible`: numbers that 16 divides, as it does all addresses."""
    names, types = kernel.arg_names, types | _NUMBERS
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in divisible
    }
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [str(_DUMP), "--dump-resource-usage", file.name]
        listed = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", listed)[1]) for name in ("REG", "STACK"))
    return {"shared": compiled.metadata.shared, "registers": registers, "stack": stack}


def in_the_models_type(capability: int) -> dict[str, dict[str, int]]:
    found = {
        f"{capability} {dtype} {head_dim} {'many' if many else 'few'}": attention(capability, dtype, head_dim, many)
        for dtype, widths in HEADS.items()
        for head_dim in widths
        for many in (False, True)
    }
    found[f"{capability} 256 rotation"] = rotation(capability, torch.bfloat16, 256)  # the most registers
    found |= {f"{capability} norm of {size}": norm(capability, size) for size in (896, 4096, 16384)}
    found[f"{capability} activation"] = activation(capability)
    return found


def with_pages_of(form: str, capability: int) -> dict[str, dict[str, int]]:
    """`form`: int8 or fp8."""
    found = {f"{capability} 256 rotation": rotation(capability, torch.bfloat16, 256, form)}
    for head_dim, many in ((64, True), (128, False), (128, True), (256, True)):
        name = f"{capability} {head_dim} {'many' if many else 'few'}"
        found[name] = attention(capability, torch.bfloat16, head_dim, many, form)
    return found


def main(form: str, capabilities: list[str]) -> None:
    found = {}
    for capability in map(int, capabilities):
        found |= in_the_models_type(capability) if form == "model" else with_pages_of(form, capability)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
