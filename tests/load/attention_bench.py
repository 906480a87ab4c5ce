"""Times attention backends side by side: one layer's attention and KV write, per shape, as ratios of one run.

    python -m tests.load.attention_bench [--threads N] [--rounds N]

Variants take turns within each round, so that a noisy machine is noisy for all of them. The SDPA rows are what torch
offers ready-made: they read pages by gathering them, as a paged cache must, without and with the GQA flag.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, KVSpec
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.selector import BACKENDS
from tests.unit.workers.attention_cases import Seq, batch_of, tables_for

HEADS, KV_HEADS, WIDTH, BLOCK = 14, 2, 64, 32  # Qwen2.5-0.5B, which has 24 such layers
LAYERS = 24
SHAPES = [
    ("1 x 160", [Seq(1, 160)]),
    ("8 x 160", [Seq(1, 160)] * 8),
    ("32 x 160", [Seq(1, 160)] * 32),
    ("32 x 33..2000", [Seq(1, 33 + 63 * i) for i in range(32)]),
    ("4 x 2048", [Seq(1, 2048)] * 4),
    ("8 x 8192", [Seq(1, 8192)] * 8),
    ("prompt 128", [Seq(128, 128)]),
    ("prompt 512", [Seq(512, 512)]),
    ("prompt 2048", [Seq(2048, 2048)]),
    ("chunk 512 at 4096", [Seq(512, 4096)]),
    ("4 chunks 64 + 16 x 300", [Seq(64, 128)] * 4 + [Seq(1, 300)] * 16),
]


def backend_variant(
    backend: AttentionBackend,
    batch: ForwardBatch,
    blocks: int,
    layer: AttentionSpec,
    qkv: tuple[Tensor, Tensor, Tensor],
) -> Callable[[], object]:
    """One layer of `backend`, with the plan made once per 24 layers, as in a step."""
    q, k, v = qkv
    kv = backend.allocate(blocks)[0]
    kv.k.normal_()
    kv.v.normal_()

    def run() -> None:
        plan = backend.prepare(batch)
        for _ in range(LAYERS):
            backend.write(kv, k, v, batch)
            backend.attend(q, kv, plan, layer)

    return run


def sdpa_variant(batch: ForwardBatch, blocks: int, layer: AttentionSpec, q: Tensor, gqa: bool) -> Callable[[], object]:
    """Gather each sequence's pages, then SDPA: in one call if all sequences have one query and one length."""
    k_pages = torch.randn(blocks, BLOCK, KV_HEADS, WIDTH).to(q.dtype)
    v_pages = torch.randn(blocks, BLOCK, KV_HEADS, WIDTH).to(q.dtype)
    group = HEADS // KV_HEADS

    def one(rows: Tensor, tables: Tensor, query: int, context: int) -> Tensor:
        count = len(tables)
        k, v = (
            pages.index_select(0, tables.flatten()).view(count, -1, KV_HEADS, WIDTH)[:, :context].transpose(1, 2)
            for pages in (k_pages, v_pages)
        )
        mask = None if query == 1 else torch.ones(query, context, dtype=torch.bool).tril(context - query)
        if gqa or query > 1:
            heads = rows.view(count, query, HEADS, WIDTH).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, enable_gqa=True)
        return F.scaled_dot_product_attention(rows.view(count, KV_HEADS, group, WIDTH), k, v)

    uniform = len({*zip(batch.query_lens, batch.context_lens, strict=True)}) == 1

    def run() -> None:
        for _ in range(LAYERS):
            if uniform:
                one(
                    q[: batch.num_tokens],
                    batch.block_tables[0][: len(batch.query_lens)],
                    batch.query_lens[0],
                    batch.context_lens[0],
                )
                continue
            start = 0
            for seq, (query, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
                used = -(-context // BLOCK)
                one(q[start : start + query], batch.block_tables[0][seq : seq + 1, :used], query, context)
                start += query

    return run


def per_layer_us(run: Callable[[], object], seconds: float) -> float:
    """Best time of one layer within about `seconds`."""
    best = float("inf")
    until = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > until:
            return best / LAYERS * 1e6


def measure(seqs: list[Seq], dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Microseconds per layer of each variant, one entry per round."""
    spec = KVSpec(1, KV_HEADS, WIDTH, BLOCK, dtype, torch.device("cpu"))
    layer = AttentionSpec(0, HEADS, KV_HEADS, WIDTH, WIDTH**-0.5)
    tables, blocks = tables_for(seqs, BLOCK)
    batch = batch_of(tables, seqs, BLOCK, spec.device)
    q = torch.randn(len(batch.token_ids), HEADS, WIDTH).to(dtype)
    k, v = (torch.randn(len(batch.token_ids), KV_HEADS, WIDTH).to(dtype) for _ in range(2))
    variants = {
        backend.name: backend_variant(backend(spec), batch, blocks, layer, (q, k, v))
        for backend in BACKENDS
        if backend.why_not(spec) is None
    }
    variants["sdpa folded"] = sdpa_variant(batch, blocks, layer, q, gqa=False)
    variants["sdpa gqa"] = sdpa_variant(batch, blocks, layer, q, gqa=True)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(per_layer_us(run, 0.05))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", default="", help="only shapes whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{HEADS} query heads, {KV_HEADS} KV heads, head size {WIDTH}, {args.dtype}, {args.threads} threads")
    print("microseconds per layer (best), and how many times longer than 'torch' (median over rounds)\n")
    with torch.inference_mode():
        for title, seqs in SHAPES:
            if args.only not in title:
                continue
            times = measure(seqs, getattr(torch, args.dtype), args.rounds)
            cells = []
            for name, values in times.items():
                ratios = sorted(value / ours for value, ours in zip(values, times["torch"], strict=True))
                cells.append(f"{name} {min(values):9.1f} us {ratios[len(ratios) // 2]:6.2f} x")
            print(f"{title:24}" + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
