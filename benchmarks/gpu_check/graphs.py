"""Decode steps as graphs, beside the same model in float64 and beside the same steps operation by operation.

Graphs are padded to a bucket and read keys in other spans, so bits may differ. How much they may is measured: by what
transformers loses in the same type, or by steps without graphs whose attention is the reference.

python -m benchmarks.gpu_check.graphs      # captures one step of two sequences and replays it: for compute-sanitizer
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check import models
from benchmarks.gpu_check.part import Row, Where
from oarlock.workers.protocol import StepOutput
from oarlock.workers.recurrent.states import NULL_SLOT
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import SequenceChunk, TrialMemory, greedy_step

BATCHES = (1, 3, 8, 17, 33, 64)  # in a bucket of their own size, and padded to one
DECODES = 6
CONTEXT = 64  # tokens that a sequence may have
SAME = 0.9  # of the tokens: near-ties are decided by rounding
ROUNDING = 4.0  # times the distance to the reference
TWICE = 2.0  # transformers' own error

Answers = tuple[np.ndarray, np.ndarray]  # token ids int32 [steps, B], their logprobs float32 [steps, B]


def graphs(where: Where) -> Iterator[Row]:
    """Three ranks with the same weights, one after the other."""
    batches = (1, 3) if where.is_tiny else BATCHES
    ways = {
        "graphs": {"enforce_eager": False},
        "eager": {"enforce_eager": True},
        "reference": {"enforce_eager": True, "attention_backend": "reference"},
    }
    found = {}
    for way, options in ways.items():
        runner = models.runner_of("0.6b", where, sequences=max(batches), tokens=CONTEXT, prompt=1024, **options)
        found[way] = {batch: outputs(runner, drawn(batch, runner.spec.vocab_size)) for batch in batches}
        runner.close()
        del runner
    for batch in batches:
        yield compared(f"{batch} sequences", *(found[way][batch] for way in ways))


def beside_float64(where: Where, family: str = "qwen3", **overrides: Any) -> Iterator[Row]:
    """A tiny model of `family` in bfloat16, prompts and decodes, with graphs and without, beside float64's logprobs.
    `overrides`: of its config.

    `ours / theirs`: the root mean square error, as a multiple of that of transformers in bfloat16. `gap`: how much less
    likely than float64's best token the greedy one is at most, as a multiple of transformers' largest error.
    """
    from tests.golden.tiny_models import make_tiny

    texts = {batch: drawn(batch, 300) for batch in ((1, 3) if where.is_tiny else BATCHES)}
    with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
        model = make_tiny(Path(folder), family, seed=7, dtype=torch.bfloat16, **overrides)
        exact, theirs = (logprobs(model, texts, dtype, where) for dtype in (torch.float64, torch.bfloat16))
        for way, eager in (("graphs", False), ("eager", True)):
            runner = models.loaded(str(model), where, max(texts), CONTEXT, 1024, enforce_eager=eager)
            for batch, found in texts.items():
                yield judged(f"{way}, {batch} sequences", outputs(runner, found), exact[batch], theirs[batch])
            runner.close()


def judged(name: str, ours: Answers, exact: np.ndarray, theirs: np.ndarray) -> Row:
    """Row of our answers beside logprobs [steps, B, V] of float64 and of transformers in our type."""
    ids, found = ours
    of_ours = found - np.take_along_axis(exact, ids[..., None].astype(np.int64), -1)[..., 0]
    of_theirs = np.take_along_axis(theirs - exact, ids[..., None].astype(np.int64), -1)[..., 0]
    rms, allowed = (float(np.sqrt((errors**2).mean())) for errors in (of_ours, of_theirs))
    gap = float((exact.max(-1) - (found - of_ours)).max() / np.abs(theirs - exact).max())
    ok = bool(np.isfinite(found).all()) and rms <= TWICE * max(allowed, 1e-3) and gap <= TWICE
    return Row(name, {"ours / theirs": rms / max(allowed, 1e-3), "gap": gap}, ok=ok)


@torch.inference_mode()
def logprobs(model: Path, texts: dict[int, list[list[int]]], dtype: torch.dtype, where: Where) -> dict[int, np.ndarray]:
    """transformers' logprobs [steps, B, V] after each prompt and after each token that follows it."""
    from transformers import AutoModelForCausalLM

    # Grouped matmuls of experts do not take float64.
    options: dict[str, Any] = {"dtype": dtype, "experts_implementation": "eager"}
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, **options).to(where.device).eval()

    def after(text: list[int]) -> torch.Tensor:
        return loaded(torch.tensor([text], device=where.device)).logits[0, -DECODES - 1 :].double().log_softmax(-1)

    return {batch: torch.stack([after(text) for text in some], 1).cpu().numpy() for batch, some in texts.items()}


def drawn(batch: int, vocab_size: int) -> list[list[int]]:
    """A prompt for each sequence, and behind it the tokens of its decodes."""
    draw = random.Random(batch)
    return [[draw.randrange(vocab_size) for _ in range(5 + draw.randrange(11) + DECODES)] for _ in range(batch)]


def outputs(runner: ModelRunner, texts: list[list[int]]) -> Answers:
    """Greedy tokens after the prompt of each text, and after each token that follows it."""
    batch, size = len(texts), runner.config.block_size
    width = -(-CONTEXT // size)
    steps = []
    for turn in range(DECODES + 1):
        chunks = []
        for row, text in enumerate(texts):
            stop = len(text) - DECODES + turn
            start = stop - 1 if turn else 0
            blocks = range(1 + row * width, 1 + (row + 1) * width)
            slots = [1 + 2 * row + (turn + n) % 2 for n in range(2)]  # which swap in each turn
            read = slots[1] if turn else NULL_SLOT
            chunks.append(SequenceChunk(text[start:stop], start, blocks, read_slot=read, write_slot=slots[0]))
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks]) - 1
        step = greedy_step(chunks, size, ends.tolist(), step_id=turn + 1, memory=TrialMemory.of(runner.spec))
        answer = runner.execute(models.replaced(step, num_logprobs=np.zeros(batch, np.int32)))
        steps.append(_answers(answer))
    return np.stack([ids for ids, _ in steps]), np.stack([logprobs for _, logprobs in steps])


def _answers(output: StepOutput | None) -> Answers:
    assert output is not None and output.logprobs is not None, "rank 0 answers with logprobs"
    return output.token_ids, output.logprobs


def compared(name: str, graph: Answers, eager: Answers, reference: Answers) -> Row:
    """Row of a comparison. `same tokens`: their share. `distance`, `rounding`: the largest of the tokens' logprobs."""
    same = float((graph[0] == eager[0]).mean())
    distance = float(np.abs(graph[1] - eager[1]).max())
    rounding = float(np.abs(eager[1] - reference[1]).max())
    ok = same >= SAME and bool(np.isfinite(graph[1]).all()) and distance <= max(ROUNDING * rounding, 1e-3)
    return Row(name, {"same tokens": same, "distance": distance, "rounding": rounding}, ok=ok)


def main() -> None:
    from tests.golden.tiny_models import make_tiny

    with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
        model = make_tiny(Path(folder), "qwen3", num_hidden_layers=2, hidden_size=512, head_dim=128)
        runner = models.loaded(str(model), Where(sys.argv[1] if sys.argv[1:] else "cuda"), 2, CONTEXT, 64)
        outputs(runner, drawn(2, runner.spec.vocab_size))
        runner.close()


if __name__ == "__main__":
    main()
