"""Bias, penalties and masks on the shards of the vocabulary, against one id at a time in Python floats."""

import numpy as np
import pytest
import torch

from oarlock.workers.protocol import ALL_BANNED, FINITE, NONFINITE, StepMetadata
from oarlock.workers.sampling.logits_processors import (
    _unpacked_bits,
    _unpacked_bits_on,
    apply_logits_processors,
    mask_with_torch,
)
from tests.unit.workers.sampling_cases import (
    Penalties,
    mask_of,
    naive_adjusted,
    naive_tokens,
    sample_with,
    sparse,
    step_of,
)

ROWS, VOCAB = 7, 1003  # shards of no round width: 1003, 502, 335 and 251 ids

COLUMNS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": [0.7, 1.0, 1.5, 3.0, 0.2, 1.0, 1.0]},
    "filtered": {
        "temperature": 1.3,
        "top_p": 0.9,
        "top_k": [0, 40, 0, 100, 0, 5, 0],
        "min_p": [0, 0, 0.05, 0, 0, 0, 0],
    },
}


def logits_of(seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def adjusted_step(seed: int, logits: torch.Tensor, **columns) -> StepMetadata:
    """Row 0 has none, 1 to 3 have penalties, 4 a mask, 5 everything, 6 a bias."""
    rng = np.random.default_rng(seed)
    best = logits.topk(40).indices.tolist()

    def counts(row: int) -> dict[int, int]:
        some = rng.choice(VOCAB, 30, replace=False).tolist()
        return {token: int(rng.integers(0, 4)) for token in {*best[row], *some, 0, VOCAB - 1}}

    penalties = {
        1: Penalties(counts(1), repetition=1.3),
        2: Penalties(counts(2), frequency=0.7, presence=-0.4),
        3: Penalties(counts(3), repetition=0.8, frequency=-1.9, presence=2.0),
        5: Penalties(counts(5), repetition=1.1, frequency=0.3, presence=0.2),
    }
    allowed = rng.choice(VOCAB, 500, replace=False).tolist()
    masks = {4: mask_of([3, 31, 32, 500, 501, 502, VOCAB - 1], VOCAB), 5: mask_of(allowed, VOCAB)}
    bias = [(5, best[5][0], -np.inf), (5, best[5][1], 4.0), (6, 17, 60.0), (6, 17, -np.inf), (6, VOCAB - 1, 2.5)]
    return step_of(ROWS, bias, penalties=penalties, masks=masks, seeds=rng.integers(-9, 9, ROWS), **columns)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_tokens_equal_the_naive_sampler(columns: dict, size: int) -> None:
    for seed in range(3):
        logits = logits_of(seed) - (40 if seed == 2 else 0)  # repetition divides positive logits and multiplies others
        step = adjusted_step(seed, logits, **columns)
        out = sample_with(logits, step, size)
        assert (out.finite == FINITE).all()
        assert out.token_ids.tolist() == naive_tokens(logits, step)


@pytest.mark.parametrize("size", [1, 4])
def test_every_logit_is_the_naive_one_to_the_bit(size: int) -> None:
    logits = logits_of(11)
    step = adjusted_step(11, logits)
    expected = naive_adjusted(logits, step)
    width = -(-VOCAB // size)
    for first in range(0, VOCAB, width):
        shard = logits[:, first : first + width].clone()
        histories = sparse(ROWS, first, shard.shape[1])
        histories.write(step)
        apply_logits_processors(shard, step, histories, first, np.zeros(ROWS, bool))
        assert torch.equal(shard, expected[:, first : first + width])
    assert torch.equal(expected[0], logits[0])


@pytest.mark.parametrize("size", [1, 3])
def test_logprobs_and_ranks_stay_equal_to_the_raw_logits(size: int) -> None:
    logits = logits_of(5)
    step = adjusted_step(5, logits, temperature=0.0, num_logprobs=[-1, 3, 20, -1, 4, 5, 2])
    out = sample_with(logits, step, size)  # which also checks that reporting rows are as they were
    truth = logits.double().log_softmax(-1)
    for row in (1, 2, 4, 5, 6):
        token, k = out.token_ids[row], step.num_logprobs[row]
        assert out.logprobs[row] == pytest.approx(float(truth[row, token]), abs=1e-5)
        assert out.ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())
        assert out.top_ids[row, :k].tolist() == logits[row].topk(int(k)).indices.tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_a_mask_without_ids_is_reported_and_disturbs_no_other(size: int) -> None:
    logits = logits_of(1)
    masks = {2: mask_of([], VOCAB), 3: mask_of([7], VOCAB)}
    out = sample_with(logits, step_of(ROWS, [(3, 9, 50.0)], masks=masks, temperature=0.0), size)
    assert out.finite.tolist() == [FINITE, FINITE, ALL_BANNED, FINITE, FINITE, FINITE, FINITE]
    assert out.token_ids[3] == 7
    untouched = [0, 1, 4, 5, 6]
    assert out.token_ids[untouched].tolist() == logits[untouched].argmax(1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_logit_is_seen_though_it_is_masked(value: float) -> None:
    logits = logits_of(1)
    logits[2, 40] = value
    out = sample_with(logits, step_of(ROWS, masks={2: mask_of([7], VOCAB), 4: mask_of([8], VOCAB)}), 2)
    assert out.finite.tolist() == [FINITE, FINITE, NONFINITE, FINITE, FINITE, FINITE, FINITE]
    assert out.token_ids[4] == 8


def test_a_row_draws_the_same_token_whatever_its_neighbours_ask_for() -> None:
    logits = logits_of(3)
    plain = sample_with(logits, step_of(ROWS, seeds=4, top_p=0.9))
    step = adjusted_step(3, logits, top_p=0.9)
    step.seeds[:] = 4
    assert sample_with(logits, step).token_ids[0] == plain.token_ids[0]


def test_without_changes_the_logits_are_not_touched() -> None:
    logits = logits_of(2)
    assert apply_logits_processors(logits, step_of(ROWS), sparse(ROWS, 0, VOCAB), 0, np.ones(ROWS, bool)) is None


@pytest.mark.parametrize("words", [1, 5])
def test_both_ways_to_spread_bits_agree(words: int) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, (4, words), dtype=np.uint32)
    here, there = _unpacked_bits(bits), _unpacked_bits_on(bits, torch.device("cpu"))
    assert torch.equal(here, there.to(torch.uint8))
    flags = [[int(row[i // 32]) >> i % 32 & 1 for i in range(32 * words)] for row in bits]
    assert here.tolist() == flags


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("first_id", "width"), [(0, 320), (160, 160), (37, 101), (300, 90)])
def test_the_mask_kernel_matches_the_plain_mask(first_id: int, width: int) -> None:
    """Shards that begin within a word, and one that reaches beyond the vocabulary of 333 ids."""
    rng = np.random.default_rng(5)
    masks = {row: mask_of(rng.choice(333, 60, replace=False).tolist(), 333) for row in (0, 2, 5)}
    step = step_of(6, masks=masks)
    logits = torch.randn(6, width)
    logits[2, 7], logits[5, 9] = float("nan"), float("-inf")
    ours, plain = logits.clone(), logits.clone()
    apply_logits_processors(ours, step, sparse(6, 0, 0), first_id, np.zeros(6, bool))
    inside = min(width, 333 - first_id)
    mask_with_torch(plain, step, first_id)
    torch.testing.assert_close(ours[:, :inside], plain[:, :inside], rtol=0, atol=0, equal_nan=True)
    assert ours[[1, 3, 4]].equal(logits[[1, 3, 4]])
    assert ours[[0, 2, 5]].isneginf().sum() > 3 * inside // 2
