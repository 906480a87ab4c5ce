"""Errors of quantised checkpoints in bfloat16, as served and with weights written out, beside transformers' own.

    python -m tests.golden.quantised_errors    # prints the table in docs/quantization.md

Tiny random models. Root mean squares over the logits of one prompt, against float64 with the numbers that are stored.
"""

import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from oarlock.workers.distributed.parallel_state import TensorParallel
from tests.golden.cases import PROMPT
from tests.golden.exact_reference import ExactReference
from tests.golden.layer_compare import rms
from tests.golden.paged_run import PagedRun, load_decoder
from tests.golden.quantised import CASES, Quantised, write
from tests.golden.tiny_models import make_tiny

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
# Every token has all experts: none is chosen by a rounding.
GPT_OSS = {"intermediate_size": 224, "num_local_experts": 3, "num_experts_per_tok": 3}
SHOWN = ("gptq-4-64-asym", "gptq-4-32-asym-act", "awq-32", "packed-4-32-asym-act", "integers-channel", "mxfp4")


class Errors(NamedTuple):
    """Multiples of the error of transformers in bfloat16 with the same weights."""

    served: float
    dequantised: float


def errors_of(quantised: Quantised, tokens: list[int]) -> Errors:
    """Errors of the logits after each of `tokens`."""
    truth, _ = ExactReference(quantised.meaning, tokens).logits

    def ours(dequantize: bool) -> float:
        decoder = load_decoder(quantised.path, TensorParallel.solo(), torch.bfloat16, dequantize=dequantize)
        return rms(PagedRun(decoder).step({0: tokens})[0].double() - truth)

    with torch.inference_mode():
        half = ExactReference(quantised.meaning, tokens, torch.bfloat16).model
        theirs = rms(half(torch.tensor([tokens])).logits[0].double() - truth)
        return Errors(ours(False) / theirs, ours(True) / theirs)


def main() -> None:
    torch.set_num_threads(1)
    tokens = random.Random(3).choices(range(300), k=PROMPT)
    print("| checkpoint | as served | with `--dequantize` |\n|---|---|---|")
    for name in SHOWN:
        with tempfile.TemporaryDirectory(prefix="oarlock-errors-") as folder:
            family = CASES[name].family
            shape = SHAPE | GPT_OSS if family else SHAPE
            made = write(make_tiny(Path(folder), family or "qwen2", **shape), Path(folder), CASES[name])
            print("| {} | {:.2f} | {:.2f} |".format(name, *errors_of(made, tokens)), flush=True)


if __name__ == "__main__":
    main()
