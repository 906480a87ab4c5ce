"""Times the cpp attention kernel beside what the processor can do: reading the same bytes, and multiplying.

    python -m tests.load.attention_ceilings [--threads N] [--rounds N] [--levels avx512,avx2] [--dtype bfloat16]

Times are processor time where there is one thread, so that a busy machine matters less, else wall time.

Decode is compared with a streaming read of the same keys and values; there are enough layers that no cache holds them.
Prompts are compared with a loop of fused multiply-adds on registers. Kernel and ceiling take turns; figures are medians
over rounds.
"""

import argparse
import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.kernels.cpu import build, levels, library
from oarlock.workers.kernels.cpu.levels import Level
from tests.unit.workers.attention_cases import Seq, batch_of, cpp_at, tables_for

BLOCK = 32
CACHE_BYTES = 192 << 20  # more than a cache holds
HEADS = [(14, 2, 64), (16, 8, 128), (32, 8, 128)]  # query heads, KV heads, head size
DECODE = [("1 x 8192", [Seq(1, 8192)]), ("8 x 8192", [Seq(1, 8192)] * 8), ("32 x 512", [Seq(1, 512)] * 32)]
PROMPTS = [
    ("prompt 128", [Seq(128, 128)]),
    ("prompt 2048", [Seq(2048, 2048)]),
    ("chunk 512 at 8192", [Seq(512, 8192)]),
]


class Ceilings:
    """The loops of `attention_ceilings.cpp`, compiled for `level`."""

    def __init__(self, level: Level) -> None:
        library.load(level)  # and OpenMP with it
        compiler = shutil.which("g++")
        assert compiler is not None
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory) / "ceilings.so"
            build.compile_to(target, level, compiler, [Path(__file__).with_suffix(".cpp")])
            self._loops = ctypes.CDLL(str(target))
        self._loops.stream_read.restype = self._loops.multiply_add.restype = ctypes.c_float

    def read(self, tensors: list[torch.Tensor]) -> None:
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        floats = tensors[0].numel() * tensors[0].element_size() // 4
        self._loops.stream_read(pointers, ctypes.c_long(len(tensors)), ctypes.c_long(floats))

    def operations_per_s(self, threads: int, rounds: int = 1_000_000) -> float:
        took = seconds(lambda: self._loops.multiply_add(ctypes.c_long(rounds)))
        return threads * rounds * self._loops.operations_per_round() / took


def seconds(run: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    run()
    return clock() - began


def measure(
    level: Level, heads: tuple[int, int, int], dtype: torch.dtype, seqs: list[Seq], threads: int, rounds: int
) -> str:
    num_heads, kv_heads, width = heads
    tables, blocks = tables_for(seqs, BLOCK)
    decodes = all(seq.query == 1 for seq in seqs)
    layers = max(1, CACHE_BYTES // (blocks * BLOCK * kv_heads * width * dtype.itemsize * 2)) if decodes else 1
    spec = KVSpec(layers, kv_heads, width, BLOCK, dtype, torch.device("cpu"))
    layer = AttentionSpec(0, num_heads, kv_heads, width, width**-0.5)
    backend = cpp_at(level)(spec)
    pages = backend.allocate(blocks)
    for kv in pages:
        kv.k.normal_()
        kv.v.normal_()
    batch = batch_of(tables, seqs, BLOCK, spec.device)
    plan = backend.prepare(batch)
    q = torch.randn(batch.num_tokens, num_heads, width).to(dtype)
    ceilings = Ceilings(level)
    used = [tensor[1:] for kv in pages for tensor in (kv.k, kv.v)]

    def attend() -> None:
        for kv in pages:
            backend.attend(q, kv, plan, layer)

    attend()
    ceilings.read(used)
    size = sum(tensor.nbytes for tensor in used)
    ours, theirs = [], []
    for _ in range(rounds):
        if decodes:
            ours.append(size / seconds(attend) / 1e9)
            theirs.append(size / seconds(lambda: ceilings.read(used)) / 1e9)
        else:
            seen = sum(seq.query * (seq.context - seq.query) + seq.query * (seq.query + 1) / 2 for seq in seqs)
            ours.append(4 * seen * num_heads * width / min(seconds(attend) for _ in range(3)) / 1e9)
            theirs.append(ceilings.operations_per_s(threads) / 1e9)
    unit = "GB/s" if decodes else "GFLOP/s"
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    spread = f"{median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{median(ours):8.1f} of {median(theirs):7.1f} {unit:7} {spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--levels", default="", help="names of levels, separated by commas; all that run here if empty")
    parser.add_argument("--only", default="", help="only shapes whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chosen = [level for level in levels.available() if not args.levels or level.name in args.levels.split(",")]
    print(f"{args.dtype}, {args.threads} threads: ours, the ceiling, their ratio (range over rounds)")
    for heads in HEADS:
        for title, seqs in DECODE + PROMPTS:
            if args.only not in title:
                continue
            for level in chosen:
                result = measure(level, heads, getattr(torch, args.dtype), seqs, args.threads, args.rounds)
                print(f"{'/'.join(map(str, heads)):10} {title:18} {level.name:12} {result}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
