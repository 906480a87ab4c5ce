"""Drafts change no bit: rows behind a newest token equal those of single tokens, and rejected drafts leave nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepOutput
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import SequenceChunk, TrialMemory, greedy_step
from oarlock.workers.sampling.sampler import num_accepted
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.attention.test_attention import INVARIANT, specs
from tests.unit.workers.attention_cases import Case, Seq

BLOCK = 16


@pytest.mark.parametrize(("backend", "dtype", "cache"), INVARIANT, ids=str)
@pytest.mark.parametrize("options", [{"group": 7}, {"group": 4, "window": 20}], ids=str)
def test_rejected_drafts_are_written_over(options, backend, dtype, cache) -> None:
    """Each step has a right token and three wrong drafts after it, over the ends of blocks."""
    kv_spec, layer = specs(dtype=dtype, cache=cache, **options)
    begin, end, drafts = 27, 52, 3
    lengths = [Seq(end + drafts, end + drafts)]
    case, wrong = Case(kv_spec, layer, lengths), Case(kv_spec, layer, lengths, seed=1)
    steps = [[Seq(begin, begin)], *([Seq(1, position + 1)] for position in range(begin, end))]
    expected = case.run(backend(kv_spec), steps)[0]
    made = backend(kv_spec)
    kv = made.allocate(case.num_blocks)[0]
    case._poison(kv, made)
    k, v, q = case.k[0], case.v[0], case.q[0]
    found = [case._step(made, kv, case.tables, [Seq(begin, begin)], [0])[0]]
    for position in range(begin, end):
        case.k, case.v, case.q = (
            [torch.cat([right[: position + 1], other[0][position + 1 :]])]
            for right, other in ((k, wrong.k), (v, wrong.v), (q, wrong.q))
        )
        found.append(case._step(made, kv, case.tables, [Seq(1 + drafts, position + 1 + drafts)], [0])[0][:1])
    assert torch.equal(torch.cat(found), expected)


def runner_of(path: Path, **changes) -> ModelRunner:
    config = WorkerConfig(
        str(path), device="cpu", max_model_len=128, kv_cache_bytes=1 << 20, num_threads=1, block_size=BLOCK,
        max_num_seqs=4,
    )  # fmt: skip
    runner = ModelRunner(preflight(config.with_(**changes)), TensorParallel.solo())
    runner.load(lambda share: None)
    runner.allocate(runner.num_blocks_that_fit())
    return runner


def step(runner: ModelRunner, chunks: list[SequenceChunk], rows: list[int], seeded: bool) -> StepOutput:
    """Sample in `rows` of the step's tokens, with logprobs; `seeded`: at random."""
    made = greedy_step(chunks, BLOCK, rows, memory=TrialMemory.of(runner.spec))
    made.num_logprobs[:] = 4
    made.temperature[:] = 0.9 if seeded else 0.0
    made.seeds[:] = 5
    output = runner.execute(made)
    assert output is not None
    return output


def columns(output: StepOutput, rows: slice) -> tuple:
    assert output.logprobs is not None and output.top_ids is not None and output.top_logprobs is not None
    return tuple(
        array[rows].tobytes() for array in (output.token_ids, output.logprobs, output.top_ids, output.top_logprobs)
    )


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
        {"dtype": "bfloat16", "attention_backend": "torch"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_answers_with_drafts_are_the_same_without(tmp_path: Path, family: str, changes: dict, seeded: bool) -> None:
    """Every row's logprobs too, beside other sequences, with drafts of which none, some or all are right."""
    runner = runner_of(make_tiny(tmp_path, family, head_dim=32, seed=3), **changes)
    prompt, blocks, count = list(range(3, 30)), [7, 2, 5, 4, 6], 24
    other = SequenceChunk([9], 20, [9, 10])
    first = step(runner, [SequenceChunk(prompt, 0, blocks)], [len(prompt) - 1], seeded)
    text, expected = [*prompt, int(first.token_ids[0])], []
    for _ in range(count):
        output = step(runner, [other, SequenceChunk(text[-1:], len(text) - 1, blocks)], [1], seeded)
        expected.append(columns(output, slice(0, 1)))
        text.append(int(output.token_ids[0]))
    known, draw, steps = len(prompt) + 1, np.random.default_rng(0), 0
    step(runner, [SequenceChunk(prompt, 0, blocks)], [len(prompt) - 1], seeded)
    while known < len(text) - 1:
        guesses = text[known : known + int(draw.integers(1, 5))]
        wrong = int(draw.integers(0, len(guesses) + 1))
        guesses[wrong:] = [token + 1 if token < 200 else 3 for token in guesses[wrong:]]
        chunk = SequenceChunk([text[known - 1], *guesses], known - 1, blocks, len(guesses))
        output = step(runner, [other, chunk, other], list(range(1, 2 + len(guesses))), seeded)
        assert output.num_accepted is not None and output.num_accepted.tolist() == [0, wrong, 0]
        for row in range(wrong + 1):
            if known < len(text):
                assert columns(output, slice(row, row + 1)) == expected[known - len(prompt) - 1], (known, row)
                known += 1
        steps += 1
    assert steps < count - 4


def test_accepted_drafts_are_counted_up_to_the_first_wrong_one() -> None:
    chunks = [
        SequenceChunk([1, 2, 3], 0, [0]),
        SequenceChunk([4, 10, 11, 12], 5, [0], 3),
        SequenceChunk([5], 3, [0]),
        SequenceChunk([6, 20], 3, [0], 1),
        SequenceChunk([7, 8], 0, [0]),
        SequenceChunk([8, 30, 31], 3, [0], 2),
    ]
    made = greedy_step(chunks, BLOCK, [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14])
    sampled = torch.tensor([99, 10, 77, 12, 98, 97, 20, 21, 31, 31, 32])
    assert num_accepted(made, sampled).tolist() == [0, 1, 0, 1, 0, 0]
    sampled = torch.tensor([99, 10, 11, 12, 98, 97, 21, 21, 30, 31, 32])
    assert num_accepted(made, sampled).tolist() == [0, 3, 0, 0, 0, 2]
