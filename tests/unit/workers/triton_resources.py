"""Compiles the Triton attention kernel for several kinds of CUDA device, without one, and prints what it takes of each.

    python -m tests.unit.workers.triton_resources

One line of JSON: for each kind and shape the bytes of shared memory, the registers of a thread, and the bytes of stack
that a thread spills to.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.attention.triton_backend import power_of_2, tile_shapes
from workers.kernels.triton.paged_attention import attend

CAPABILITIES = (80, 89, 90, 100)
HEADS = {torch.bfloat16: (64, 128, 256), torch.float32: (64, 128)}
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_NUMBERS = {
    "q_stride": "i32", "table_stride": "i32", "scale": "fp32", "softcap": "fp32", "window": "i32", "span": "i32",
}  # fmt: skip
_DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def resources(capability: int, dtype: torch.dtype, head_dim: int, many: bool) -> dict[str, int]:
    """Of the tile for few query rows or for many, with every option on."""
    shape = tile_shapes(head_dim, dtype)[many]
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "BLOCK_M": shape.rows,
        "BLOCK_N": shape.keys, "BLOCK_D": power_of_2(head_dim), "SOFTCAP": True, "WINDOW": True, "SPANS": True,
    }  # fmt: skip
    types = dict.fromkeys(("q", "k_pages", "v_pages", "out"), _TYPES[dtype])
    types |= dict.fromkeys(("partial_out", "partial_stats"), "*fp32") | _NUMBERS
    names = attend.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    compiled = triton.compile(
        ASTSource(attend, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": shape.warps, "num_stages": shape.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [str(_DUMP), "--dump-resource-usage", file.name]
        listed = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", listed)[1]) for name in ("REG", "STACK"))
    return {"shared": compiled.metadata.shared, "registers": registers, "stack": stack}


def main() -> None:
    found = {
        f"{capability} {dtype} {head_dim} {'many' if many else 'few'}": resources(capability, dtype, head_dim, many)
        for capability in CAPABILITIES
        for dtype, widths in HEADS.items()
        for head_dim in widths
        for many in (False, True)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
