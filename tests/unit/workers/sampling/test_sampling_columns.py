"""The columns by which a device samples agree with the step in each row."""

import numpy as np
import torch

from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from oarlock.workers.sampling.columns import NONE, SamplingColumns, Variant, bias_entries, sections, write_rows
from oarlock.workers.sampling.noise import row_keys
from tests.unit.workers.sampling_cases import Penalties, mask_of, step_of

CPU = torch.device("cpu")


def test_rows_without_options_have_the_defaults_and_so_has_padding() -> None:
    step = step_of(2, temperature=[0.5, 0.0], top_k=[0, 7])
    arrays = {name: np.full(shape, 99, dtype) for name, dtype, shape in sections(4)}
    write_rows(step, arrays)
    assert arrays["temperature"].tolist() == [0.5, 0, 0, 0]
    assert arrays["top_k"].tolist() == [0, 7, 0, 0]
    assert arrays["bias_starts"].tolist() == [0] * 5
    for name in ("target_ids", "num_logprobs", "history_rows", "guesses", "mask_index"):
        assert arrays[name].tolist() == [NONE] * 4
    for name in ("top_p", "repetition"):
        assert arrays[name].tolist() == [1] * 4
    for name in ("changed", "min_p", "frequency", "presence", "drafts_before"):
        assert arrays[name].tolist() == [0] * 4
    np.testing.assert_array_equal(arrays["keys"][:2], row_keys(step.seeds, step.sample_positions))


def test_options_belong_to_their_rows() -> None:
    bias = [(1, 4, 2.5), (1, 6, -np.inf), (3, 2, 1.0)]
    penalties = {0: Penalties({3: 1}, 1.5), 2: Penalties({}, frequency=0.5, presence=-0.5)}
    step = step_of(4, bias, penalties=penalties, masks={1: mask_of([5], 40), 3: mask_of([33], 40)})
    step.rows = np.array([7, 5, 6, 4], np.int32)
    columns = SamplingColumns.of_step(step, CPU)
    assert columns.bias_starts.tolist() == [0, 0, 2, 2, 3]
    assert columns.bias[:, 0].tolist() == [4, 6, 2]
    assert columns.bias[:, 1].contiguous().view(torch.float32).tolist() == [2.5, -np.inf, 1.0]
    assert columns.history_rows.tolist() == [7, NONE, 6, NONE]
    assert columns.repetition.tolist() == [1.5, 1, 1, 1]
    assert columns.frequency.tolist() == [0, 0, 0.5, 0]
    assert columns.presence.tolist() == [0, 0, -0.5, 0]
    assert columns.mask_index.tolist() == [NONE, 0, NONE, 1]
    assert columns.changed.tolist() == [1, 1, 1, 1]
    assert columns.mask_bits.tolist() == [[1 << 5, 0], [0, 2]]


def test_an_id_that_is_biased_twice_has_one_entry() -> None:
    step = step_of(2, [(0, 4, 2.5), (0, 4, -np.inf), (0, 5, 1.0), (1, 4, 3.0)])
    entries = bias_entries(step)
    values = entries[:, 1].copy().view(np.float32)
    kept = entries[:, 0] != NONE
    assert kept.sum() == 3
    assert sorted(zip(entries[kept, 0].tolist(), values[kept].tolist(), strict=True)) == [(4, -np.inf), (4, 3), (5, 1)]


def test_rows_know_the_drafts_around_them() -> None:
    chunks = [
        SequenceChunk([1, 2, 3], 0, [0]),
        SequenceChunk([4, 10, 11], 5, [0], 2),
        SequenceChunk([5], 3, [0]),
        SequenceChunk([8, 30], 3, [0], 1),
    ]
    columns = SamplingColumns.of_step(greedy_step(chunks, 16, [2, 3, 4, 5, 6, 7, 8]), CPU)
    assert columns.guesses.tolist() == [NONE, 10, 11, NONE, NONE, 30, NONE]
    assert columns.drafts_before.tolist() == [0, 0, 1, 2, 0, 0, 1]


def test_a_step_asks_for_what_one_of_its_rows_does() -> None:
    greedy = Variant()
    assert Variant.of(step_of(2, temperature=0.0, top_p=0.5)) == greedy
    assert Variant.of(step_of(2, temperature=[0.0, 1.0])) == Variant(random=True)
    assert Variant.of(step_of(2, temperature=2.0, top_k=[0, 5])) == Variant(random=True, filtered=True)
    assert Variant.of(step_of(2, target_ids=[3, -1], temperature=0.0)) == Variant(logprobs=True)
    assert Variant.of(step_of(1, [(0, 1, 2.0)], temperature=0.0)) == Variant(processed=True)
    both = Variant(random=True, logprobs=True)
    assert both.serves(greedy) and both.serves(both) and not both.serves(Variant(filtered=True))
