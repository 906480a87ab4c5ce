"""Programs, bytes and operations of decode attention on CUDA devices, computed from the rules of its launches.

    python -m benchmarks.kernel_costs

Nothing is measured and no device is needed: docs/gpu.md has what this prints.
"""

import numpy as np
import torch

from oarlock.workers.attention.backend import KVSpec
from oarlock.workers.attention.triton_backend import TritonBackend, tile_shapes
from oarlock.workers.attention.triton_tiles import NO_WINDOW, Shares, Tiles

PROCESSORS = 132  # of an H100 or H200
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B
DECODES = {
    "1 of 131,072": [131_072],
    "64 of 512": [512] * 64,
    "1 of 131,072, 63 of 512": [131_072] + [512] * 63,
    "64 of 131,072": [131_072] * 64,
    "256 of 2,048": [2048] * 256,
}


def divided(contexts: list[int]) -> tuple[Shares, int]:
    """How decodes are divided in a graph for sequences of up to 131,072 tokens; and keys of the longest program."""
    spec = KVSpec(1, KV_HEADS, HEAD_DIM, 16, torch.bfloat16, torch.device("meta"))
    backend = TritonBackend(spec)
    backend.processors = PROCESSORS
    shape, ends = tile_shapes(HEAD_DIM, torch.bfloat16, wide=True)[0], np.array(contexts)
    bounds = np.full(len(ends), 131_072)
    nothing = torch.empty(0)
    shares = backend.shares(
        Tiles(shape, HEADS // KV_HEADS, KV_HEADS, nothing, nothing, bounds, bounds - 1), NO_WINDOW, is_live=True
    )
    span = max(shares.least, -(-int((-(-ends // shares.extra)).sum()) // shape.keys) * shape.keys)
    return shares, int(min(max(contexts), span))


def attention_table() -> list[str]:
    """One layer's attention of a decode step."""
    lines = [
        "| sequences, contexts | programs | keys of the longest program; undivided | MB of keys and values | GFLOP |",
        "|---|---|---|---|---|",
    ]
    for name, contexts in DECODES.items():
        shares, longest = divided(contexts)
        keys = sum(contexts)
        megabytes, operations = keys * KV_HEADS * HEAD_DIM * 4 / 1e6, 4 * keys * HEADS * HEAD_DIM / 1e9
        lines.append(
            f"| {name} | {shares.num_programs * KV_HEADS:,} | {longest:,}; {max(contexts):,} | "
            f"{megabytes:,.0f} | {operations:.1f} |"
        )
    return lines


def as_markdown() -> str:
    """Format the table."""
    return "\n".join(attention_table())


if __name__ == "__main__":
    print(as_markdown())
