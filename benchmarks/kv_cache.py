"""Times attention over KV pages in 8 bits beside pages in bfloat16, and counts the tokens that fit in the same memory.

    python -m benchmarks.kv_cache [--threads N] [--rounds N] [--shapes 14/2/64 32/8/128] [--contexts 160 8192]

Each figure is of attention alone, over more layers than a cache holds, as decoding goes through them; `prompt` is one
prompt of 2048 tokens in one layer, with writing its pages. The forms take turns in each round, so that a noisy machine
is noisy for all of them; ratios are medians over rounds, in brackets the lowest and highest. Times are processor time
where there is one thread, so that a busy machine matters less.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.machine import beyond_caches
from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.attention.kv_format import ROUNDED
from tests.unit.workers.attention_cases import Seq, batch_of, tables_for

BLOCK = 32
FORMS = ["auto", *ROUNDED]
PROMPT = "prompt"


def steps(shape: tuple[int, int, int], seqs: list[Seq], form: str, dtype: torch.dtype) -> Callable[[], object]:
    """A function that computes the attention of all layers, for `seqs`."""
    heads, kv_heads, width = shape
    tables, blocks = tables_for(seqs, BLOCK)
    decodes = all(seq.query == 1 for seq in seqs)
    layers = max(1, beyond_caches() // (blocks * BLOCK * kv_heads * width * dtype.itemsize * 2)) if decodes else 1
    spec = KVSpec(layers, kv_heads, width, BLOCK, dtype, torch.device("cpu"), form)
    layer, backend = AttentionSpec(0, heads, kv_heads, width, width**-0.5), CppBackend(spec)
    pages = backend.allocate(blocks)
    whole = batch_of(tables, [Seq(seq.context, seq.context) for seq in seqs], BLOCK, spec.device)
    k, v = (torch.randn(len(whole.slots[0]), kv_heads, width).to(dtype) for _ in range(2))
    for kv in pages:
        backend.write(kv, k, v, whole)
    batch = batch_of(tables, seqs, BLOCK, spec.device)
    plan = backend.prepare(batch)
    q = torch.randn(len(batch.token_ids), heads, width).to(dtype)

    def run() -> None:
        for kv in pages:
            if not decodes:
                backend.write(kv, k, v, batch)
            backend.attend(q, kv, plan, layer)

    return run


def seconds(run: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    run()
    return clock() - begun


def compare(shape: tuple[int, int, int], seqs: list[Seq], dtype: torch.dtype, rounds: int) -> list[str]:
    """Cells of a row: the time of unrounded pages, then the speed of each form in 8 bits as a multiple of theirs."""
    runs = {form: steps(shape, seqs, form, dtype) for form in FORMS}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for form, run in runs.items():
            times[form].append(min(seconds(run) for _ in range(3)))
    cells = [f"{median(times['auto']) * 1e3:.2f} ms"]
    for form in ROUNDED:
        ratios = sorted(theirs / ours for theirs, ours in zip(times["auto"], times[form], strict=True))
        cells.append(f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shapes", nargs="+", default=["14/2/64", "32/8/128"], help="query heads/KV heads/head size")
    parser.add_argument("--contexts", nargs="+", default=["160", "2048", "8192", "16384", PROMPT], help="in tokens")
    parser.add_argument("--seqs", type=int, default=4, help="sequences that decode together")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    print(f"{args.seqs} sequences, {args.threads} threads: how many times faster than {args.dtype} pages\n")
    print(f"| heads | context | {args.dtype} | {' | '.join(ROUNDED)} |\n|---|---|---|{'---|' * len(ROUNDED)}")
    for name in args.shapes:
        shape = tuple(map(int, name.split("/")))
        assert len(shape) == 3
        for context in args.contexts:
            seqs = [Seq(2048, 2048)] if context == PROMPT else [Seq(1, int(context))] * args.seqs
            print(f"| {name} | {context} | {' | '.join(compare(shape, seqs, dtype, args.rounds))} |", flush=True)
    print(f"\nbytes of a token in one layer, and tokens in the memory of 1000 with {args.dtype} pages:")
    for name in args.shapes:
        _, kv_heads, width = map(int, name.split("/"))
        sizes = {form: KVSpec(1, kv_heads, width, BLOCK, dtype, torch.device("cpu"), form) for form in FORMS}
        least = sizes["auto"].bytes_per_token
        for form, spec in sizes.items():
            print(f"{name:10} {form:5} {spec.bytes_per_token:6} {1000 * least // spec.bytes_per_token:6}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
