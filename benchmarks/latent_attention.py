"""Times latent attention of DeepSeek-V2-Lite's shape by itself, and compares it with the ceilings of the machine.

    python -m benchmarks.latent_attention [--threads N] [--rounds N] [--heads N] [--context N]

One row of 576 values per token serves all heads, so that a decode of 16 heads computes 30 operations for each byte that
it reads in bfloat16, and 60 in 8 bits: the multipliers are the limit, and not the memory, if they give less than that.
Each figure is the best of all rounds. With one thread, times are processor time.
"""

import argparse
import itertools
import time

import torch

from benchmarks.machine import Ceilings
from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.cpp import CppBackend
from tests.unit.workers.attention_cases import Seq, batch_of, tables_for

WIDTH, VALUE_WIDTH, BLOCK = 576, 512, 32
LAYERS = 6  # with pages of their own, so that a step does not find the pages of the step before in a cache


def best_s(seqs: list[Seq], heads: int, cache: str, rounds: int) -> tuple[float, int]:
    """Return the time of one layer's attention, and the bytes of the pages that it reads."""
    device = torch.device("cpu")
    spec = KVSpec(LAYERS, 1, WIDTH, BLOCK, torch.bfloat16, device, cache, value_dim=VALUE_WIDTH, value_in_key=True)
    layer = AttentionSpec(0, heads, 1, WIDTH, WIDTH**-0.5)
    tables, blocks = tables_for(seqs, BLOCK)
    batch, backend = batch_of(tables, seqs, BLOCK, device), CppBackend(spec)
    pages = backend.allocate(blocks)
    for own in pages:
        own.k.random_(0, 100) if spec.is_rounded else own.k.normal_()
    plan, q = backend.prepare(batch), torch.randn(len(batch.token_ids), heads, WIDTH).bfloat16()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for own in itertools.islice(itertools.cycle(pages), rounds):
        begun = clock()
        backend.attend(q, own, plan, layer)
        times.append(clock() - begun)
    return min(times), sum(seq.context for seq in seqs) * spec.shape.key_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=8192, help="tokens of each sequence that decodes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = Ceilings(args.threads).measure()
    read, product = (
        found["read_gb_s"],
        max(rate for name, rate in found["gemm_gflops"].items() if name.endswith("bfloat16")),
    )
    print(f"{args.heads} heads, {args.threads} threads; reads {read:.1f} GB/s, multiplies {product:.0f} GFLOP/s\n")
    print("| step | pages | us | GB/s | of reading | GFLOP/s | of multiplying |\n|---|---|---|---|---|---|---|")
    steps = {
        f"1 x {args.context}": [Seq(1, args.context)],
        f"8 x {args.context}": [Seq(1, args.context)] * 8,
        "prompt of 512": [Seq(512, 512)],
    }
    for (title, seqs), cache in itertools.product(steps.items(), ("auto", "int8", "fp8")):
        tokens = sum(seq.query for seq in seqs)
        seconds, size = best_s(seqs, args.heads, cache, max(LAYERS, args.rounds // tokens))
        pairs = sum(seq.query * (seq.context - (seq.query - 1) / 2) for seq in seqs)
        flops = 2 * args.heads * (WIDTH + VALUE_WIDTH) * pairs
        rates = size / seconds / 1e9, flops / seconds / 1e9
        cells = f"{rates[0]:.1f} | {rates[0] / read:.2f} | {rates[1]:.0f} | {rates[1] / product:.2f}"
        print(f"| {title} | {cache} | {seconds * 1e6:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
