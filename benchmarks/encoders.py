"""Times a step of an encoder beside transformers' own model of the same weights, in one process and on the same cores.

    python -m benchmarks.encoders [--threads N] [--rounds N] [--models bert modernbert] [--dtypes float32 bfloat16]

Models have the shapes of BERT-base and ModernBERT-base and random weights. Texts are padded to the longest for
transformers, as it wants them. The two take turns in each round; a ratio is the median over rounds, in brackets the
lowest and highest, above 1 where we are faster.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModel

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.models.encoders.encoder import Encoder
from oarlock.workers.models.encoders.registry import read_encoder
from oarlock.workers.weights.open_checkpoint import open_checkpoint
from oarlock.workers.weights.weight_source import weight_source

MODELS = ("bert", "modernbert")
# name -> tokens of each text
BATCHES = {
    "1 x 16": [16],
    "1 x 128": [128],
    "1 x 500": [500],
    "16 x 128": [128] * 16,
    "32 of 16 to 256": [random.Random(number).randrange(16, 257) for number in range(32)],
}


def load(folder: Path, name: str, dtype: torch.dtype, settings: dict[str, int]) -> tuple[Encoder, torch.nn.Module]:
    """Ours and transformers', of one checkpoint that is made in `folder`."""
    path = folder / f"{name}-{dtype}"
    config = AutoConfig.for_model(name, **settings)
    AutoModel.from_config(config).to(dtype).save_pretrained(path)
    checkpoint = open_checkpoint(path)
    ours = Encoder(read_encoder(str(path), checkpoint), TensorParallel.solo(), dtype, torch.device("cpu"))
    with weight_source(checkpoint, check_finite=False, on_read=lambda: None) as weights:
        ours.load(weights, lambda share: None)
    return ours, AutoModel.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


def steps(ours: Encoder, theirs: torch.nn.Module, lens: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Calls that compute random texts of `lens` tokens: as one step of ours, and as one padded batch of theirs."""
    texts = [torch.randint(5, 100, (length,)) for length in lens]
    ids, positions = torch.cat(texts), torch.cat([torch.arange(length) for length in lens])
    padded = torch.zeros(len(lens), max(lens), dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, text in enumerate(texts):
        padded[row, : len(text)], mask[row, : len(text)] = text, 1
    return (
        lambda: ours(ids, positions, torch.zeros_like(ids), lens),
        lambda: theirs(input_ids=padded, attention_mask=mask),
    )


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--layers", type=int, help="of each model, instead of its own")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    settings = {} if given.layers is None else {"num_hidden_layers": given.layers}
    print("| model | type | texts | ms | transformers / ours |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name in given.models:
            for dtype in given.dtypes:
                pair = load(Path(folder), name, getattr(torch, dtype), settings)
                for texts, lens in BATCHES.items():
                    runs = steps(*pair, lens)
                    times = [[seconds(run) for run in runs] for _ in range(given.rounds + 1)][1:]
                    ratios = [theirs / ours for ours, theirs in times]
                    own = median(ours for ours, _ in times)
                    spread = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                    print(f"| {name} | {dtype} | {texts} | {own * 1e3:.1f} | {spread} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
