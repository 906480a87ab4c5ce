"""Decode steps as graphs beside the same steps operation by operation: the same tokens, up to rounding.

Graphs are padded to a bucket and read keys in other spans, so bits may differ. How much they may is measured: by steps
without graphs whose attention is the reference, which rounds otherwise as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu_check import models
from benchmarks.gpu_check.part import Row, Where
from oarlock.workers.protocol import StepOutput
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step

BATCHES = (1, 3, 8, 17, 33, 64)  # in a bucket of their own size, and padded to one
DECODES = 6
CONTEXT = 64  # tokens that a sequence may have
SAME = 0.9  # of the tokens: near-ties are decided by rounding
ROUNDING = 4.0  # times the distance to the reference


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
        found[way] = {batch: outputs(runner, batch) for batch in batches}
        runner.close()
        del runner
    for batch in batches:
        yield compared(f"{batch} sequences", *(found[way][batch] for way in ways))


Answers = tuple[np.ndarray, np.ndarray]  # token ids int32 [steps, B], their logprobs float32 [steps, B]


def outputs(runner: ModelRunner, batch: int) -> Answers:
    """Greedy tokens after a prompt of each sequence, and after each of the same few tokens."""
    draw = random.Random(batch)
    size = runner.config.block_size
    width = -(-CONTEXT // size)
    lengths = [5 + draw.randrange(11) for _ in range(batch)]
    steps = []
    for turn in range(DECODES + 1):
        chunks = []
        for row, length in enumerate(lengths):
            start, count = (0, length) if turn == 0 else (length + turn - 1, 1)
            tokens = [draw.randrange(runner.spec.vocab_size) for _ in range(count)]
            chunks.append(SequenceChunk(tokens, start, range(1 + row * width, 1 + (row + 1) * width)))
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks]) - 1
        step = greedy_step(chunks, size, ends.tolist(), step_id=turn + 1)
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
