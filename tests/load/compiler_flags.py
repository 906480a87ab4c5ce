"""Times kernels as they are compiled beside the same sources compiled with more flags of the compiler.

    python -m tests.load.compiler_flags -O3 [--level avx2] [--rounds N] [--only attention]

For deciding what flags are worth: longer compiling delays the first start. Both take turns; a figure is the median over
rounds of the time with these flags in relation to that without, so more than 1 means that they cost speed.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.kernels.cpu import elementwise, levels, library
from oarlock.workers.kernels.cpu.gemm import CppGatedMatmul, CppMatmul
from oarlock.workers.kernels.cpu.levels import Level
from oarlock.workers.kernels.cpu.sampling import KernelLogitsShard
from tests.unit.workers.attention_cases import Seq, batch_of, tables_for

HIDDEN, INTERMEDIATE, VOCAB, BLOCK = 896, 4864, 151_936, 32
LEAST_S = 0.01  # of one measurement
Run = Callable[[], object]


def products(dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    up, down = torch.randn(2 * INTERMEDIATE, HIDDEN).to(dtype), torch.randn(HIDDEN, INTERMEDIATE).to(dtype)
    gated, plain = CppGatedMatmul(up, None, "silu"), CppMatmul(down, None)
    for rows in (1, 8, 64, 512):
        x, y = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, INTERMEDIATE).to(dtype)
        yield f"gated product, {rows} rows", lambda x=x: gated(x)
        yield f"product, {rows} rows", lambda y=y: plain(y)
    yield "packing", lambda: CppMatmul(down, None)
    yield "rows of a packed weight", lambda: plain.rows(torch.arange(HIDDEN))
    rows = torch.randn(64, HIDDEN).to(dtype)
    yield "norm", lambda: elementwise.rms_norm(rows, torch.ones(HIDDEN), 1e-6)
    heads, angles = torch.randn(64, 14, 64).to(dtype), torch.randn(64, 1, 64)
    yield "rotation", lambda: elementwise.rotate(heads, angles, angles, dtype)


def attention(dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    for name, seqs in (("1 x 4096", [Seq(1, 4096)]), ("32 x 512", [Seq(1, 512)] * 32), ("prompt", [Seq(1024, 1024)])):
        tables, blocks = tables_for(seqs, BLOCK)
        spec = KVSpec(1, 2, 64, BLOCK, dtype, torch.device("cpu"))
        layer, backend = AttentionSpec(0, 14, 2, 64, 0.125), CppBackend(spec)
        (kv,) = backend.allocate(blocks)
        batch = batch_of(tables, seqs, BLOCK, spec.device)
        plan, q = backend.prepare(batch), torch.randn(batch.num_tokens, 14, 64).to(dtype)
        k = torch.randn(batch.num_tokens, 2, 64).to(dtype)

        def attend(backend=backend, q=q, kv=kv, plan=plan, layer=layer) -> object:
            return backend.attend(q, kv, plan, layer)

        def write(backend=backend, kv=kv, k=k, batch=batch) -> object:
            return backend.write(kv, k, k, batch)

        yield f"attention, {name}", attend
        yield f"KV writes, {name}", write


def sampling() -> Iterator[tuple[str, Run]]:
    logits = torch.randn(8, VOCAB) * 4
    rows, temperature = torch.arange(8), torch.ones(8, dtype=torch.float64)
    keys = torch.randint(1, 1 << 30, (8, 2), dtype=torch.int32) | 1
    low, end = torch.full((8,), -1e30), torch.full((8,), VOCAB)
    shard = KernelLogitsShard(logits, 0, VOCAB // 8)
    yield "maxima", lambda: KernelLogitsShard(logits, 0, VOCAB // 8)
    yield "masses", lambda: shard.mass(rows, temperature, shard.top, low, end)
    yield "draws", lambda: shard.draw(rows, temperature, keys, low, end)
    yield "64 best", lambda: shard.best(rows, 64)


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    yield from products(dtype)
    yield from attention(dtype)
    yield from sampling()


def repeated(run: Run) -> Callable[[], float]:
    """A function that runs it as often as takes `LEAST_S`, and returns the seconds that it took."""
    run()
    started = time.perf_counter()
    run()
    times = max(1, int(LEAST_S / (time.perf_counter() - started)))

    def measure() -> float:
        started = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - started) / times

    return measure


def at(level: Level, dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    library.load(level)
    with library.using(level):
        torch.manual_seed(0)
        return {name: repeated(run) for name, run in cases(dtype)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", help="a level of instruction set; the best one that this processor has if not given")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    own, flags = parser.parse_known_args()
    level = next(level for level in levels.available() if own.level in (None, level.name))
    other = dataclasses.replace(level, name=f"{level.name}_other_flags", flags=(*level.flags, *flags))
    with torch.inference_mode():
        one, two = (at(each, getattr(torch, own.dtype)) for each in (level, other))
        print(f"{level.name}, {own.dtype}, {' '.join(flags)} in relation to none, {torch.get_num_threads()} threads")
        for name in one:
            if own.only in name:
                ratios = sorted(two[name]() / one[name]() for _ in range(own.rounds))
                microseconds = one[name]() * 1e6
                print(f"{name:32} {median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of {microseconds:9.1f} us")


if __name__ == "__main__":
    main()
