"""Compiles the kernels of latent attention for kinds of device, without one, and prints the resources that each takes.

    python -m tests.unit.workers.kernels.triton.latent_resources 80 90

One line of JSON, as of `triton_resources`: attention over rows of 512 + 64 elements with every tile and format of
pages, the merge of its results, the writes of rows, and the matmul of heads.
"""

import json
import sys

import torch

from oarlock.workers.attention.backend import KVSpec
from oarlock.workers.attention.triton_latent import latent_constants, latent_tile_shapes, row_constants
from oarlock.workers.attention.triton_tiles import MERGED_AT_ONCE
from oarlock.workers.kernels.triton import availability
from oarlock.workers.kernels.triton.key_spans import merge_spans
from oarlock.workers.kernels.triton.latent_attention import attend_latent
from oarlock.workers.kernels.triton.latent_pages import norm_rotate_and_write, write_rows
from oarlock.workers.kernels.triton.matmul import multiply_heads
from oarlock.workers.quantization.fixed_order import matmul_tile
from tests.unit.workers.kernels.triton.triton_resources import WIDE, WITH_FLOAT8, amd_of, resources

_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_FORMATS = ("auto", "int8", "fp8")


def spec_of(dtype: torch.dtype, cache: str) -> KVSpec:
    return KVSpec(1, 1, 576, 16, dtype, torch.device("meta"), cache, value_dim=512, value_in_key=True)


def attention(kind: str, dtype: torch.dtype, cache: str) -> dict[str, dict[str, int]]:
    """Return the resources of all tiles for one format of pages."""
    spec, amd, found = spec_of(dtype, cache), amd_of(kind), {}
    types = {"q": _TYPES[dtype], "out": _TYPES[dtype], "pages": "*u8" if spec.is_rounded else _TYPES[dtype]}
    types |= {"partial_out": "*fp32", "partial_stats": "*fp32", "scales": "*i16"}
    form = cache if spec.is_rounded else ""
    for shape in latent_tile_shapes(dtype, form, wide=kind in WIDE, amd=amd is not None):
        constants = latent_constants(spec, shape, 128, shape.rows)
        constants |= {"NATIVE_FP8": kind in WITH_FLOAT8, "PRECISION": availability.float32_precision(amd)}
        options = availability.options(shape.warps, shape.stages, amd)
        name = f"{kind} attend {dtype.itemsize * 8} {form} {shape.rows} rows"
        found[name] = resources(attend_latent, kind, constants, types, options, ("q_stride",))
    return found


def merging(kind: str) -> dict[str, int]:
    types = {"partial_out": "*fp32", "partial_stats": "*fp32", "tiles": "i32", "BLOCK_M": "i32"}
    types |= dict.fromkeys(("out", "sinks"), "*bf16")
    constants = {"KV_HEADS": 2, "GROUP": 64, "HEAD_DIM": 512, "BLOCK_D": 512, "SINKS": False, "AT_ONCE": MERGED_AT_ONCE}
    return resources(merge_spans, kind, constants, types, {"num_warps": 4})


def writing(kind: str, cache: str) -> dict[str, int]:
    spec = spec_of(torch.bfloat16, cache)
    types = {"rows": "*bf16", "pages": "*u8" if spec.is_rounded else "*bf16", "scales": "*i16", "slot_mapping": "*i64"}
    types |= {"count": "i32", "stride": "i32"}
    return resources(write_rows, kind, row_constants(spec) | {"BLOCK_T": 4}, types, {"num_warps": 4}, ("stride",))


def rotation(kind: str, cache: str) -> dict[str, int]:
    spec = spec_of(torch.bfloat16, cache)
    types = dict.fromkeys(("q", "rows", "queries", "weight"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    types |= {"pages": "*u8" if spec.is_rounded else "*bf16", "scales": "*i16", "slot_mapping": "*i64", "stride": "i32"}
    constants = row_constants(spec) | {"HEADS": 128, "NOPE": 128, "ROTARY": 64, "NEIGHBOURS": True}
    return resources(norm_rotate_and_write, kind, constants, types, {"num_warps": 1}, ("q_stride", "stride"))


def of_heads(kind: str, dtype: torch.dtype) -> dict[str, int]:
    strides = ("columns", "inputs", "x_stride", "x_head_stride", "out_stride", "out_head_stride")
    types = dict.fromkeys(("x", "weight", "out"), _TYPES[dtype]) | dict.fromkeys((*strides, "rows"), "i32")
    tile = matmul_tile(dtype)
    return resources(multiply_heads, kind, tile.constants(), types, tile.options(amd_of(kind)), strides)


def main() -> None:
    found = {}
    for kind in sys.argv[1:]:
        for cache in _FORMATS:
            found |= attention(kind, torch.bfloat16, cache) | attention(kind, torch.float32, cache)
            found[f"{kind} write {cache}"] = writing(kind, cache)
            found[f"{kind} rotate and write {cache}"] = rotation(kind, cache)
        found[f"{kind} merge"] = merging(kind)
        found |= {f"{kind} heads {dtype}": of_heads(kind, dtype) for dtype in _TYPES}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
