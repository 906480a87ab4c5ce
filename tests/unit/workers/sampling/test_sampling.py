"""The sampler against a reference that sorts everything, on one rank and on several, and its properties one by one."""

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from oarlock.workers.kernels.cpu import library
from oarlock.workers.protocol import ALL_BANNED, FINITE, NONFINITE, StepMetadata, pack_output, unpack_output
from oarlock.workers.sampling.candidates import decode, encode
from oarlock.workers.sampling.noise import gumbel, mixed_ids, noise_bits, row_keys
from oarlock.workers.sampling_parameters import ROW_NAMES
from tests.unit.workers.sampling_cases import mask_of, naive_kept, naive_noise, naive_tokens, sample_with, step_of

ROWS, VOCAB = 6, 1000
SIZES = [1, 2, 3, 4]

MODES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": [0.2, 0.7, 1.0, 1.5, 3.0, 1e-3]},
    "top_k": {"top_k": [1, 2, 20, 64, 65, 400], "temperature": 2.0},
    "top_p": {"top_p": [0.01, 0.5, 0.9, 0.95, 0.999, 0.3]},
    "min_p": {"min_p": [1.0, 0.5, 0.1, 0.01, 1e-4, 1e-9]},
    "top_n_sigma": {"top_n_sigma": [1e-6, 0.5, 1.0, 2.0, 100.0, -1.0], "temperature": [1.0, 0.1, 9.0, 2.0, 1.0, 1.0]},
    "top_n_sigma, others": {
        "top_n_sigma": [2.0, 1.5, 3.0, 1.0, 4.0, 2.5],
        "top_p": [0.9, 1.0, 0.999, 0.5, 1.0, 0.97],
        "top_k": [0, 20, 0, 300, 0, 65],
        "min_p": [0.0, 0.0, 1e-3, 0.0, 0.3, 1e-6],
        "temperature": 3.0,
    },
    "top_p, min_p": {"min_p": [1e-9, 0.01, 0.2, 1e-3, 1e-6, 1e-9], "top_p": [0.9, 0.8, 0.7, 0.99, 0.5, 0.999]},
    "top_k, top_p": {"top_k": [5, 50, 64, 100, 900, 2000], "top_p": [0.9, 0.5, 0.95, 0.8, 0.9, 0.9]},
    "all, hot": {"top_k": 300, "top_p": 0.97, "min_p": 0.001, "temperature": 4.0},
    "mixture": {
        "temperature": [0.0, 1.0, 0.8, 1.0, 1.0, 0.0],
        "top_p": [1.0, 1.0, 0.9, 0.999, 1.0, 0.9],
        "top_k": [0, 0, 0, 0, 100, 3],
        "target_ids": [-1, -1, -1, -1, -1, 17],
    },
}


def peaked(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def flat(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 0.3


def tied(seed: int = 0) -> torch.Tensor:
    """Few distinct values, as a 16-bit head gives."""
    return (torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2).round() / 2


@pytest.mark.usefixtures("form")
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [peaked, flat, tied], ids=lambda make: make.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_the_naive_sampler(mode, make, size):
    for seed in range(2):
        logits, step, expected = naive_case(mode, make, seed)
        out = sample_with(logits, step, size)
        assert out.token_ids.tolist() == expected
        assert (out.finite == FINITE).all()
        assert out.logprobs is None or mode == "mixture"


@cache
def naive_case(
    mode: str, make: Callable[[int], torch.Tensor], seed: int
) -> tuple[torch.Tensor, StepMetadata, list[int]]:
    logits = make(seed)
    bias = [(0, 5, -np.inf), (1, int(logits[1].argmax()), -np.inf), (2, 999, 30.0), (5, 17, 2.5)]
    step = step_of(ROWS, bias, seeds=np.arange(ROWS) + 1000 * seed - 3, **MODES[mode])
    return logits, step, naive_tokens(logits, step)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [peaked, tied], ids=lambda make: make.__name__)
def test_logprobs_are_of_the_raw_distribution(make, size):
    logits = make()
    wanted = [-1, 0, 3, 20, -1, 5]
    targets = [-1, -1, -1, 40, 41, -1]
    bias = [(1, 3, 50.0), (2, int(logits[2].argmax()), -np.inf)]
    step = step_of(ROWS, bias, temperature=0.0, num_logprobs=wanted, target_ids=targets)
    out = sample_with(logits, step, size)
    truth = logits.double().log_softmax(-1)
    assert out.token_ids[1] == 3 and out.token_ids[3] == 40 and out.token_ids[4] == 41
    assert out.top_ids.shape == (ROWS, 20)
    for i in range(ROWS):
        if wanted[i] < 0 and targets[i] < 0:
            assert out.logprobs[i] == 0 and out.ranks[i] == 0
            continue
        token = out.token_ids[i]
        assert out.logprobs[i] == pytest.approx(float(truth[i, token]), abs=1e-5)
        assert out.ranks[i] == 1 + int((logits[i] > logits[i, token]).sum())
        k = max(0, wanted[i])
        order = sorted(range(VOCAB), key=lambda t, i=i: (-float(logits[i, t]), t))[:k]
        assert out.top_ids[i].tolist() == order + [-1] * (20 - k)
        np.testing.assert_allclose(out.top_logprobs[i, :k], truth[i, order], atol=1e-5)


@pytest.mark.usefixtures("form")
def test_a_step_written_in_the_place_of_another_is_sampled_by_its_own_numbers():
    """A kernel keeps the addresses of a step's arrays, and nothing of what they hold."""
    logits, first = peaked(), step_of(ROWS, **MODES["mixture"])
    sample_with(logits, first, 1)
    asked = [-1, 2, -1, -1, 0, -1]
    for mode in ("greedy", "all, hot", "top_p"):
        other = step_of(ROWS, seeds=np.arange(ROWS) + 9, num_logprobs=asked if mode == "top_p" else -1, **MODES[mode])
        for name in ("target_ids", *ROW_NAMES, "seeds", "sample_positions", "num_logprobs"):
            getattr(first, name)[:] = getattr(other, name)
        out, expected = sample_with(logits, first, 1), sample_with(logits, other, 1)
        for name in ("token_ids", "finite", "logprobs", "ranks", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(out, name), getattr(expected, name), err_msg=name)
        assert out.token_ids.tolist() == naive_tokens(logits, other)


@pytest.mark.usefixtures("form")
def test_many_rows_are_scored_at_once():
    logits = torch.randn(70, 300)
    targets = np.arange(70) * 3
    out = sample_with(logits, step_of(70, target_ids=targets), 2)
    truth = logits.double().log_softmax(-1)[torch.arange(70), torch.from_numpy(targets)]
    np.testing.assert_allclose(out.logprobs, truth, atol=1e-5)
    assert out.top_ids.shape == (70, 0)
    buffer = memoryview(bytearray(1 << 16))
    pack_output(out, buffer)
    np.testing.assert_array_equal(unpack_output(buffer).ranks, out.ranks)


@pytest.mark.usefixtures("form")
@pytest.mark.slow
def test_broken_rows_are_reported_and_disturb_no_other():
    logits = peaked()
    for mode, size in itertools.product(MODES.values(), (1, 3)):
        step = step_of(ROWS, num_logprobs=2, **mode)
        healthy = sample_with(logits, step, size)
        broken = logits.clone()
        broken[0, 700] = float("nan")
        broken[1] = float("-inf")
        broken[2, 3] = float("inf")
        out = sample_with(broken, step, size)
        assert out.finite.tolist() == [NONFINITE] * 3 + [FINITE] * 3
        assert out.token_ids[3:].tolist() == healthy.token_ids[3:].tolist()
        np.testing.assert_array_equal(out.top_logprobs[3:], healthy.top_logprobs[3:])
        assert ((out.token_ids >= 0) & (out.token_ids < VOCAB)).all()


@pytest.mark.usefixtures("form")
@pytest.mark.slow
def test_a_row_whose_ids_are_all_banned_is_reported_as_such():
    """Rows 0 and 4 ban all ids by bias, and by bias and mask together; row 4 is broken as well, on one rank alone."""
    some = [3, 31, 700]
    bias = [(0, token, -np.inf) for token in range(VOCAB)] + [(row, 700, -np.inf) for row in (1, 2, 4, 5)]
    bias += [(row, token, -np.inf) for row in (2, 4) for token in some]
    masks = {row: mask_of(some, VOCAB) for row in (1, 2, 3, 4, 5)}
    logits = peaked()
    logits[3, some] = float("-inf")  # all that is allowed has a probability of 0
    logits[4, 5] = float("nan")  # banned by the mask
    logits[5, 700] = float("inf")  # banned by bias
    for mode, size in itertools.product(MODES.values(), (1, 3)):
        step = step_of(ROWS, bias, masks=masks, num_logprobs=[-1, 2, -1, 2, -1, 2], **mode)
        out = sample_with(logits, step, size)
        assert out.finite.tolist() == [ALL_BANNED, FINITE, ALL_BANNED, NONFINITE, NONFINITE, NONFINITE]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("mode", MODES)
def test_row_and_batch_do_not_matter(mode):
    logits = flat(3)
    step = step_of(ROWS, **MODES[mode])
    together = sample_with(logits, step)
    for i in range(ROWS):
        columns = {name: getattr(step, name)[i] for name in (*ROW_NAMES, "seeds", "sample_positions", "target_ids")}
        alone = sample_with(logits[i : i + 1], step_of(1, **columns))
        assert alone.token_ids[0] == together.token_ids[i]


@pytest.mark.usefixtures("form")
def test_top_k_one_is_greedy():
    logits = tied()
    greedy = sample_with(logits, step_of(ROWS, temperature=0.0)).token_ids
    np.testing.assert_array_equal(sample_with(logits, step_of(ROWS, top_k=1, temperature=5.0)).token_ids, greedy)
    np.testing.assert_array_equal(greedy, logits.argmax(1))


@pytest.mark.usefixtures("form")
@pytest.mark.slow
def test_smaller_top_p_keeps_a_part_of_what_larger_keeps():
    """Nested for the definition, and draws stay inside it, whichever path the sampler takes."""
    logits = flat()[:1]
    seen: set[int] = set()
    for top_p in (0.05, 0.2, 0.5, 0.8, 0.95):
        step = step_of(1, top_p=top_p)
        kept = set(naive_kept(logits[0], step, 0))
        assert seen < kept
        seen = kept
        many = step_of(200, top_p=top_p, seeds=np.arange(200))
        drawn = set(sample_with(logits.expand(200, -1).contiguous(), many).token_ids.tolist())
        assert drawn <= kept
    assert len(seen) > 64, "the largest set is beyond the short list"


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("columns", [{}, {"top_p": 0.8}, {"top_k": 6}], ids=str)
def test_draws_follow_the_distribution(columns):
    """Chi-square over 12,000 draws with fixed seeds; the bound is its 99.9 % quantile."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0]])
    kept = naive_kept(logits[0], step_of(1, **columns), 0)
    expected = torch.softmax(logits[0, kept].double(), 0).numpy()
    counts = np.zeros(10)
    draws = 12_000
    for seed in range(6):
        rows = draws // 6
        step = step_of(rows, seeds=seed * 31, sample_positions=np.arange(rows), **columns)
        np.add.at(counts, sample_with(logits.expand(rows, -1).contiguous(), step).token_ids, 1)
    assert counts.sum() == counts[kept].sum() == draws
    statistic = ((counts[kept] - draws * expected) ** 2 / (draws * expected)).sum()
    quantiles = {4: 16.27, 6: 20.52, 10: 27.88}  # of 3, 5 and 9 degrees of freedom
    assert statistic < quantiles[len(kept)]


def test_noise_is_the_definition_and_well_mixed():
    seeds, positions = np.array([0, -1, 2**62, 12345]), np.array([0, 1, 5, 2**31 - 1], np.int32)
    keys = torch.from_numpy(row_keys(seeds, positions))
    ids = torch.tensor([0, 1, 2, 151_935, 2**20])
    ours = gumbel(noise_bits(mixed_ids(ids).unsqueeze(0), keys))
    for i in range(4):
        for j, token in enumerate(ids.tolist()):
            assert float(ours[i, j]) == pytest.approx(naive_noise(int(seeds[i]), int(positions[i]), token), rel=1e-12)


@pytest.mark.parametrize("vary", ["ids", "positions", "seeds"])
def test_noise_is_uniform_and_independent_of_neighbours(vary):
    """Each bit is fair, buckets are even, and neighbours (in id, position or seed) do not predict one another."""
    count = 1 << 16
    steps = np.arange(count)
    seeds = steps if vary == "seeds" else np.full(count, 9)
    positions = steps.astype(np.int32) if vary == "positions" else np.full(count, 3, np.int32)
    ids = torch.from_numpy(steps if vary == "ids" else np.full(count, 42)).unsqueeze(1)
    words = noise_bits(mixed_ids(ids), torch.from_numpy(row_keys(seeds, positions))).squeeze(1).numpy()
    words = words.view(np.uint32)
    fair = ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(0)
    assert np.abs(fair - 0.5).max() < 5 * 0.5 / count**0.5
    buckets = np.bincount(words >> 24, minlength=256)
    assert ((buckets - count / 256) ** 2 / (count / 256)).sum() < 330.5  # 99.9 % quantile of 255 degrees of freedom
    pairs = np.bincount((words[:-1] >> 28) * 16 + (words[1:] >> 28), minlength=256)
    assert ((pairs - (count - 1) / 256) ** 2 / ((count - 1) / 256)).sum() < 330.5
    if vary == "ids":
        assert len(np.unique(words)) == count, "a bijection of ids"


def test_keys_order_by_value_then_lowest_id():
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, 1.0, float("-inf"), 3e38, -1e-30])
    ids = torch.tensor([7, 0, 3, 2, 5, 1, 4, 6])
    keys = encode(values, ids).sort(descending=True).values
    back, tokens = decode(keys)
    assert tokens.tolist() == [4, 5, 7, 2, 3, 6, 0, 1]
    assert torch.equal(back, values[[6, 4, 0, 3, 2, 7, 1, 5]])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_kernels_choose_like_torch(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random combinations of parameters over a larger vocabulary, on one rank and on two.

    It has more blocks than there are candidates, so that flat rows are drawn without a search for candidates.
    """
    rng = np.random.default_rng(1)
    rows = 60
    logits = torch.randn(rows, 20_000, generator=torch.Generator().manual_seed(2)) * scale
    logits[::3] = logits[::3].bfloat16().float()  # many equal values
    step = step_of(
        rows,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0], rows),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.5], rows),
        top_k=rng.choice([0, 0, 0, 1, 50, 300, 25_000], rows),
        min_p=rng.choice([0.0, 0.0, 0.1, 0.001], rows),
        seeds=rng.integers(-(2**63), 2**63, rows),
        sample_positions=rng.integers(0, 2**31, rows),
        num_logprobs=rng.choice([-1, -1, 5], rows),
    )
    ours = [sample_with(logits, step, size) for size in (1, 2)]
    monkeypatch.setattr(library, "why_not", lambda *_: "this is the comparison without kernels")
    plain = sample_with(logits, step)
    for out in ours:
        assert out.token_ids.tolist() == plain.token_ids.tolist()
        np.testing.assert_array_equal(out.ranks, plain.ranks)
        np.testing.assert_array_equal(out.top_ids, plain.top_ids)
        np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-6)
