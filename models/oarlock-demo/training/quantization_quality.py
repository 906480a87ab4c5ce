"""Cost of rounding weights, or keys and values, for the demo model: perplexity on held-out files, equal best tokens.

    PYTHONPATH=. python models/oarlock-demo/training/quantization_quality.py

Computed by the code that serves, with the same text in the same pieces for each form of weights and KV cache.
"""

import argparse
import math
from pathlib import Path

import torch
from demo_corpus import read_source, source_files, split_held_out
from tokenizers import Tokenizer
from torch import Tensor

from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.attention.kv_format import ROUNDED
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.preflight import preflight
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step

MODEL = Path(__file__).parents[1]
PIECE = 512  # tokens
BLOCK_SIZE = 32  # tokens of a page of the KV cache
# Forms of weights and of the KV cache.
FORMS = [*((name, "auto") for name in QUANTIZATIONS), *((name, kv) for name in ("none", "int8") for kv in ROUNDED)]


def held_out_pieces() -> list[list[int]]:
    """The token ids of the files that training did not see, each file cut by itself."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    pieces = []
    for path in split_held_out(source_files(), seed=0)[1]:
        ids = tokenizer.encode(read_source(path), add_special_tokens=False).ids
        pieces += [ids[start : start + PIECE] for start in range(0, len(ids), PIECE)]
    return [piece for piece in pieces if len(piece) > 1]


@torch.inference_mode()
def scores(pieces: list[list[int]], quantization: str, kv_cache_dtype: str, dtype: str) -> tuple[float, Tensor]:
    """The mean loss of a token in nats, and the best next token at every place, over all pieces."""
    config = WorkerConfig(
        str(MODEL), device="cpu", dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK_SIZE, log_level="WARNING",
    )  # fmt: skip
    blocks = list(range(1, PIECE // BLOCK_SIZE + 1))
    runner = ModelRunner(preflight(config), TensorParallel.solo())
    runner.load(lambda share: None)
    runner.allocate(len(blocks) + 1)
    total, count, best = 0.0, 0, []
    for piece in pieces:
        step = greedy_step([SequenceChunk(piece, 0, blocks)], BLOCK_SIZE, range(len(piece)), step_id=1)
        batch = ForwardBatch.from_step(step, BlockTables.of_step(step, runner.config.block_size, runner.device))
        hidden = runner.model(batch, runner.layer_memory, runner.backends, {0: runner.backends[0].prepare(batch)})
        logits = runner.model.compute_logits(hidden)  # [tokens, vocabulary]
        chosen = torch.log_softmax(logits[:-1], 1).gather(1, torch.tensor(piece[1:]).unsqueeze(1))
        total -= chosen.double().sum().item()
        count += len(piece) - 1
        best.append(logits.argmax(1))
    return total / count, torch.cat(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="bfloat16")
    dtype = parser.parse_args().dtype
    pieces = held_out_pieces()
    print(f"{sum(map(len, pieces)):,} tokens, {dtype}\n")
    print("| weights | KV cache | perplexity | change | same best token |\n|---|---|---|---|---|")
    dense_loss, dense_best = scores(pieces, *FORMS[0], dtype)
    for name, kv in FORMS:
        loss, best = (dense_loss, dense_best) if (name, kv) == FORMS[0] else scores(pieces, name, kv, dtype)
        same = (best == dense_best).double().mean().item()
        change = math.expm1(loss - dense_loss)
        weights, cache = dtype if name == "none" else name, dtype if kv == "auto" else kv
        print(f"| {weights} | {cache} | {math.exp(loss):.2f} | {change:+.2%} | {same:.1%} |")


if __name__ == "__main__":
    main()
