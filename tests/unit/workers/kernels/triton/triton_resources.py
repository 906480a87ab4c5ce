"""Compiles the Triton kernels for several kinds of CUDA device, without one, and prints what they take of each.

    python -m tests.unit.workers.kernels.triton.triton_resources model|int8|fp8 80 90

The last two: attention over pages of 8 bits; the first: everything else. A kind is a compute kind, or the name of
an AMD architecture such as gfx942. One line of JSON: for each kind and shape the bytes of shared memory, the columns of
tensor memory, the registers of a thread, the bytes of stack that a thread spills to, and the number of loads in loops
that are waited for.
"""

import json
import os
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

from oarlock.workers.attention.triton_backend import tile_shapes
from oarlock.workers.attention.triton_tiles import power_of_2
from oarlock.workers.kernels.triton import availability
from oarlock.workers.kernels.triton.elementwise import activate_row, add_and_norm_row, gate_row, warps
from oarlock.workers.kernels.triton.kv_pages import rotate_and_write
from oarlock.workers.kernels.triton.paged_attention import attend

HEADS = {torch.bfloat16: (64, 128, 256), torch.float32: (64, 128)}
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_NUMBERS = {
    "q_stride": "i32", "table_stride": "i32", "scale": "fp32", "softcap": "fp32", "window": "i32",
    "num_programs": "i32", "qkv_stride": "i32", "eps": "fp32", "post_eps": "fp32",
}  # fmt: skip
# Kind -> bytes of shared memory that one program may take.
LIMITS = {
    "80": 163 << 10, "86": 99 << 10, "89": 99 << 10, "90": 227 << 10, "100": 227 << 10, "120": 99 << 10,
    "gfx942": 64 << 10, "gfx1100": 64 << 10,
}  # fmt: skip
TENSOR_COLUMNS = 512  # of the tensor memory of compute capability 10.0, which one program may take
WIDE = ("90", "100")  # as `tile_shapes` has it
WITH_FLOAT8 = ("89", "90", "100", "120")
_DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def amd_of(kind: str) -> str | None:
    """The AMD architecture that `kind` names, if it is one."""
    return kind if kind.startswith("gfx") else None


def of_program(name: str, *arguments: str) -> dict[str, dict[str, int]]:
    """Resources that a program of this folder prints, outside of Triton's interpreter.

    Asserts that they fit into each kind of device: shared memory, tensor memory and registers suffice, so that no more
    than two registers are spilled; on gfx1100 some are.
    """
    program = [sys.executable, "-m", f"tests.unit.workers.kernels.triton.{name}", *arguments]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = json.loads(subprocess.run(program, env=kept, capture_output=True, text=True, check=True).stdout)
    for what, taken in found.items():
        kind = what.split()[0]
        assert taken["shared"] <= LIMITS[kind], what
        assert taken["columns"] <= TENSOR_COLUMNS, what
        assert taken["registers"] <= (512 if kind == "gfx942" else 256), what
        assert taken["stack"] <= 8 or kind == "gfx1100", what
    return found


def attention(
    kind: str, dtype: torch.dtype, head_dim: int, many: bool, form: str = "", *, has_all: bool = True
) -> dict[str, int]:
    """Resources of the tile for few query rows or for many, with every option on. `form`: of pages of 8 bits."""
    shape, amd = tile_shapes(head_dim, dtype, form, wide=kind in WIDE)[many], amd_of(kind)
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "BLOCK_M": shape.rows,
        "BLOCK_N": shape.keys, "BLOCK_D": power_of_2(head_dim), "SOFTCAP": has_all, "WINDOW": has_all,
        "CHUNKED": has_all, "SINKS": has_all, "FIXED": False, "FORMAT": form, "NATIVE_FP8": kind in WITH_FLOAT8,
        "PRECISION": availability.float32_precision(amd),
    }  # fmt: skip
    types = dict.fromkeys(("q", "out"), _TYPES[dtype]) | dict.fromkeys(
        ("partial_out", "partial_stats", "sinks"), "*fp32"
    )
    types |= _pages(dtype, form)
    options = availability.options(shape.warps, shape.stages, amd)
    return resources(attend, kind, constants, types, options, ("q_stride",))


def _pages(dtype: torch.dtype, form: str) -> dict[str, str]:
    pages = dict.fromkeys(("k_pages", "v_pages"), "*u8" if form else _TYPES[dtype])
    return pages | dict.fromkeys(("k_scales", "v_scales"), "*i16")


def rotation(kind: str, dtype: torch.dtype, head_dim: int, form: str = "") -> dict[str, int]:
    constants = {
        "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "ROTARY": head_dim, "BLOCK_SIZE": 16,
        "BLOCK_D": power_of_2(head_dim), "NORM": True, "NORMS_LAST": True, "NEIGHBOURS": True, "SCALED": True,
        "FORMAT": form,
    }  # fmt: skip
    types = dict.fromkeys(("qkv", "q"), _TYPES[dtype]) | {"slot_mapping": "*i64"} | _pages(dtype, form)
    types |= dict.fromkeys(("cos", "sin", "weight", "query_scale"), "*fp32")
    return resources(rotate_and_write, kind, constants, types, {"num_warps": 1})


def norm(kind: str, size: int) -> dict[str, int]:
    """Resources of the kernel with both norms."""
    types = dict.fromkeys(("residual", "total", "normed"), "*bf16")
    types |= dict.fromkeys(("x", "post_weight", "weight"), "*fp32")
    constants = {"SIZE": size, "BLOCK": power_of_2(size), "POST": True}
    return resources(add_and_norm_row, kind, constants, types, {"num_warps": warps(power_of_2(size))})


def activation(kind: str) -> dict[str, int]:
    constants = {"WIDTH": 14336, "BLOCK": 1024, "GELU": True}
    return resources(gate_row, kind, constants, dict.fromkeys(("y", "out"), "*bf16"), {"num_warps": 4})


def plain_activation(kind: str) -> dict[str, int]:
    constants = {"WIDTH": 24576, "BLOCK": 1024, "ACTIVATION": "gelu"}
    return resources(activate_row, kind, constants, {"y": "*fp32", "out": "*bf16"}, {"num_warps": 4})


def resources(
    kernel: Any,
    kind: str,
    constants: dict[str, Any],
    types: dict[str, str],
    options: dict[str, Any],
    divisible: Sequence[str] = (),
) -> dict[str, int]:
    """`types`: of what is not a pointer to int32. `options`: constants too. `divisible`: numbers that 16 divides, as it
    does all addresses."""
    names, types, amd = kernel.arg_names, types | _NUMBERS, amd_of(kind)
    constants = constants | {name: options[name] for name in options if name in names}
    options = {name: number for name, number in options.items() if name not in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in divisible
    }
    source = ASTSource(kernel, signature, constants, aligned)
    if amd is not None:
        compiled = triton.compile(source, target=GPUTarget("hip", amd, 64 if amd == "gfx942" else 32), options=options)
        listed, names = compiled.asm["amdgcn"], (".vgpr_count", ".private_segment_fixed_size")
    else:
        compiled = triton.compile(source, target=GPUTarget("cuda", int(kind), 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            dump = [str(_DUMP), "--dump-resource-usage", file.name]
            listed = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        names = ("REG", "STACK")
    registers, stack = (int(re.search(rf"{re.escape(name)}: *(\d+)", listed)[1]) for name in names)
    waits = waited_for(compiled.asm["ttgir"])
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    return {
        "shared": compiled.metadata.shared, "columns": columns, "registers": registers, "stack": stack, "waits": waits,
    }  # fmt: skip


def waited_for(ttgir: str) -> int:
    """Number of loads inside loops that are waited for: others are copies to shared memory, ahead of their use."""
    found, loops = 0, []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        loops = [loop for loop in loops if indent > loop]
        if "scf.for" in line:
            loops.append(indent)
        found += bool(loops) and "tt.load" in line
    return found


def in_the_models_type(kind: str) -> dict[str, dict[str, int]]:
    found = {
        f"{kind} {dtype} {head_dim} {'many' if many else 'few'}": attention(kind, dtype, head_dim, many)
        for dtype, widths in HEADS.items()
        for head_dim in widths
        for many in (False, True)
    }
    found[f"{kind} 256 rotation"] = rotation(kind, torch.bfloat16, 256)  # the most registers
    found |= {f"{kind} norm of {size}": norm(kind, size) for size in (896, 4096, 16384)}
    found[f"{kind} activation"] = activation(kind)
    found[f"{kind} activation without a gate"] = plain_activation(kind)
    return found


def with_pages_of(form: str, kind: str) -> dict[str, dict[str, int]]:
    """`form`: int8 or fp8."""
    found = {f"{kind} 256 rotation": rotation(kind, torch.bfloat16, 256, form)}
    for head_dim, many in ((64, True), (128, False), (128, True), (256, True)):
        name = f"{kind} {head_dim} {'many' if many else 'few'}"
        found[name] = attention(kind, torch.bfloat16, head_dim, many, form)
    return found


def main(form: str, kinds: list[str]) -> None:
    found = {}
    for kind in kinds:
        found |= in_the_models_type(kind) if form == "model" else with_pages_of(form, kind)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
