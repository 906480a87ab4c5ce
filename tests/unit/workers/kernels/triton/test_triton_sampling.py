"""The sampler of Triton kernels against torch's: on a CUDA device, or else on the CPU in Triton's interpreter."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.triton.sampling.choose import MARGIN, gumbel, gumbel_screen
from oarlock.workers.protocol import ALL_BANNED, FINITE, NONFINITE, StepMetadata, StepOutput
from oarlock.workers.sampling.columns import SamplingColumns, Variant, bias_entries, write_rows
from oarlock.workers.sampling.columns import sections as column_sections
from oarlock.workers.sampling.device_sampler import DeviceOutputs, DeviceSampler, output_of
from oarlock.workers.sampling.noise import gumbel as judged_gumbel
from oarlock.workers.sampling.sharded_sampler import RowSampler, ShardSampler
from oarlock.workers.sampling.token_histories import DenseHistories
from tests.golden.interpreter_lock import one_kernel_at_a_time
from tests.golden.paged_run import on_ranks
from tests.unit.workers.kernels.triton.triton_resources import of_program
from tests.unit.workers.kernels.triton.triton_sampling_resources import launches_of, recording_sampler, recording_shard
from tests.unit.workers.sampling.test_sampling import MODES, ROWS, VOCAB, flat, peaked, tied
from tests.unit.workers.sampling.test_token_histories import ROWS as SCENE_ROWS
from tests.unit.workers.sampling.test_token_histories import VOCAB as SCENE_VOCAB
from tests.unit.workers.sampling.test_token_histories import Scene, tokens_for
from tests.unit.workers.sampling_cases import Penalties, dense, mask_of, sample_with, step_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference sampler compute with torch's operations."""
    monkeypatch.setattr(library, "why_not", lambda *_: "the judge runs without kernels")


def sampled(logits: Tensor, step: StepMetadata, short: int = 2, variant: Variant | None = None) -> StepOutput:
    """Sample with the kernels, which try the `short` best blocks before rounds."""
    vocab = logits.shape[1]
    histories = DenseHistories(step.num_seqs, 0, vocab, DEVICE)
    histories.write(step)
    sampler = DeviceSampler(vocab, len(logits), histories, DEVICE, short)
    columns, outputs = SamplingColumns.of_step(step, DEVICE), DeviceOutputs.empty(len(logits), DEVICE)
    moved = logits.to(DEVICE)
    sampler.sample(moved, columns, outputs, variant or Variant.of(step))
    torch.testing.assert_close(moved.cpu(), logits, rtol=0, atol=0, equal_nan=True)
    return output_of(step, outputs.on_host())


def agree(ours: StepOutput, judge: StepOutput) -> None:
    assert ours.finite.tolist() == judge.finite.tolist()
    valid = judge.finite == FINITE
    assert ours.token_ids[valid].tolist() == judge.token_ids[valid].tolist()
    assert (ours.logprobs is None) == (judge.logprobs is None)
    if judge.logprobs is not None:
        np.testing.assert_array_equal(ours.ranks[valid], judge.ranks[valid])
        np.testing.assert_array_equal(ours.top_ids[valid], judge.top_ids[valid])
        np.testing.assert_allclose(ours.logprobs[valid], judge.logprobs[valid], atol=4e-6)
        np.testing.assert_allclose(ours.top_logprobs[valid], judge.top_logprobs[valid], atol=4e-6)


@pytest.mark.soak
@pytest.mark.parametrize("short", [1, 4])
@pytest.mark.parametrize("make", [peaked, flat, tied], ids=lambda make: make.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_the_judge(mode: str, make: Callable[[int], Tensor], short: int) -> None:
    step = step_of(ROWS, seeds=np.arange(ROWS) + 3, **MODES[mode])
    logits = make(1)
    agree(sampled(logits, step, short), sample_with(logits, step))


KINDS: dict[str, list] = {
    "temperature": [0.0, 0.7, 1e-3, 5.0, 1.0, 2.0, 1.0, 1.0, 1.5, 1.0, 4.0, 1.0],
    "top_k": [0, 0, 0, 1, 2, 200, 0, 0, 30, 0, 90, 2000],
    "top_p": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.3, 0.95, 0.9, 1.0, 0.9, 0.9],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.001, 1e-6],
    "top_n_sigma": [1.0, 0.0, -1.0, 2.0, 0.0, 0.0, 0.0, 2.5, 0.0, 1.5, 3.0, 1e-6],
}


@pytest.mark.parametrize(("make", "short"), [(peaked, 2), (flat, 4), (tied, 2)])
def test_a_batch_of_all_kinds_gives_the_tokens_of_the_judge(make: Callable[[int], Tensor], short: int) -> None:
    rows = len(KINDS["top_k"])
    logits = torch.cat([make(5), make(6)])
    step = step_of(rows, seeds=np.arange(rows) + 3, **KINDS)
    agree(sampled(logits, step, short), sample_with(logits, step))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_random_batches_of_a_larger_vocabulary_give_the_tokens_of_the_judge(seed: int) -> None:
    """With everything that a step can ask for, in random combinations; some logits are rounded to 16 bits."""
    rng, rows, vocab = np.random.default_rng(seed), 40, 20_000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * [0.3, 2.0, 4.0][seed % 3]
    logits[::3] = logits[::3].bfloat16().float()
    some = [set(rng.integers(0, vocab, 300).tolist()) for _ in range(rows)]
    bias = [(row, token, float(rng.choice([-np.inf, 2.0, -3.0]))) for row in range(0, rows, 3) for token in some[row]]
    penalties = {
        row: Penalties(
            {t: t % 4 for t in some[row]}, float(rng.choice([1.0, 1.3, 0.8])), *rng.choice([0.0, 0.7, -0.4], 2)
        )
        for row in range(0, rows, 4)
    }
    masks = {row: rng.integers(0, 2**32, vocab // 32, dtype=np.uint32) for row in range(0, rows, 5)}
    step = step_of(
        rows, bias, penalties=penalties, masks=masks,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0], rows), top_p=rng.choice([1.0, 0.999, 0.9, 0.5], rows),
        top_k=rng.choice([0, 0, 0, 1, 50, 300, 25_000], rows), min_p=rng.choice([0.0, 0.0, 0.1, 0.001], rows),
        top_n_sigma=rng.choice([0.0, 0.0, 0.7, 2.5], rows),
        seeds=rng.integers(-(2**63), 2**63, rows), sample_positions=rng.integers(0, 2**31, rows),
        num_logprobs=rng.choice([-1, -1, 5], rows),
    )  # fmt: skip
    agree(sampled(logits, step, 64), sample_with(logits, step, make_histories=dense))


def test_ties_and_steep_temperatures_are_decided_as_by_the_judge() -> None:
    """Equal probabilities at the ends of what is kept, and scores whose noise is lost in rounding."""
    logits = torch.full((5, VOCAB), -9.0)
    logits[:, 100:110] = 2.0
    logits[3:, 600:900] = 2.0
    temperature, top_p = [1.0, 1e-30, 1e-38, 1.0, 1.0], [0.5, 1.0, 0.5, 0.5, 1.0]
    step = step_of(5, temperature=temperature, top_p=top_p, top_k=[0, 0, 0, 0, 250])
    agree(sampled(logits, step), sample_with(logits, step))


def test_logprobs_match_the_judge() -> None:
    logits = tied(2)
    bias = [(1, 3, 50.0), (2, int(logits[2].argmax()), -np.inf)]
    step = step_of(ROWS, bias, temperature=0.0, num_logprobs=[-1, 0, 3, 20, -1, 5], target_ids=[-1, -1, -1, 40, 41, -1])
    agree(sampled(logits, step), sample_with(logits, step))


@pytest.mark.parametrize("mode", ["mixture", "top_k, top_p"])
def test_broken_and_banned_rows_are_reported_and_disturb_no_other(mode: str) -> None:
    some = [3, 31, 700]
    logits = torch.cat([peaked(), peaked(1)])
    logits[6, 700], logits[7], logits[8, 3] = float("nan"), float("-inf"), float("inf")
    logits[3, some] = float("-inf")  # all that is allowed has a probability of 0
    logits[4, 5], logits[5, 700] = float("nan"), float("inf")  # banned by the mask, and by bias
    bias = [(0, token, -np.inf) for token in range(VOCAB)] + [(row, 700, -np.inf) for row in (1, 2, 2, 4, 5)]
    bias += [(row, token, -np.inf) for row in (2, 4) for token in some]
    masks = {row: mask_of(some, VOCAB) for row in (1, 2, 3, 4, 5, 10)}
    options = {name: np.tile(values, 2) for name, values in MODES[mode].items()}
    step = step_of(12, bias, masks=masks, num_logprobs=2, **options)
    ours = sampled(logits, step)
    banned, broken, fine = ALL_BANNED, NONFINITE, FINITE
    assert ours.finite.tolist() == [banned, fine, banned, *[broken] * 6, *[fine] * 3]
    agree(ours, sample_with(logits, step, make_histories=dense))


def test_rows_do_not_depend_on_how_they_are_launched() -> None:
    """Bits are the same with options that no row asks for, with padding, and in parts."""
    logits = torch.cat([peaked(8), tied(8)])
    rows = len(logits)
    step = step_of(rows, [(4, 3, 9.0), (9, 5, 3.0)], masks={3: mask_of([5, 6, 7], VOCAB)}, num_logprobs=1, **KINDS)
    whole = sampled(logits, step)
    sampler = DeviceSampler(VOCAB, 7, DenseHistories(rows, 0, VOCAB, DEVICE), DEVICE, 2)
    arrays = {name: np.empty(shape, dtype) for name, dtype, shape in column_sections(rows + 2)}
    write_rows(step, arrays)
    arrays |= {"bias": bias_entries(step), "mask_bits": step.mask_bits.view(np.int32)}
    columns = SamplingColumns(**{name: torch.from_numpy(array).to(DEVICE) for name, array in arrays.items()})
    outputs = DeviceOutputs.empty(rows + 2, DEVICE)
    padded = torch.cat([logits, torch.zeros(2, VOCAB)]).to(DEVICE)
    for first in (0, 7):
        sampler.sample(padded[first : first + 7], columns, outputs, Variant(True, True, True, True), first)
    parts = output_of(step, outputs.on_host())
    for name in ("token_ids", "finite", "logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def sampled_by_shards(logits: Tensor, step: StepMetadata, ranks: int) -> StepOutput:
    """Sample as `ranks` ranks do, each from its ids, of which the last may have fewer, and padding behind them."""
    rows, vocab = logits.shape
    local = -(-vocab // ranks)
    padded = torch.nn.functional.pad(logits, (0, ranks * local - vocab), value=float("-inf")).to(DEVICE)
    histories = DenseHistories(step.num_seqs, 0, vocab, DEVICE)
    histories.write(step)
    columns, found = SamplingColumns.of_step(step, DEVICE), list[Tensor]()

    def outputs_of(rank: int, all_gather: Callable[[Tensor], Tensor]) -> StepOutput:
        own = min(local, vocab - rank * local)
        outputs = DeviceOutputs.empty(rows, DEVICE)
        sampler = ShardSampler(rank * local, own, rows, histories, DEVICE, all_gather)
        sampler.sample(padded[:, rank * local : (rank + 1) * local], columns, outputs, Variant.of(step))
        return output_of(step, outputs.on_host())

    def kept(own: Tensor) -> Tensor:
        found.append(own)
        return torch.stack([own] * ranks)

    for rank in range(ranks):
        outputs_of(rank, kept)
    first, last = (outputs_of(rank, lambda own: torch.stack(found)) for rank in (0, ranks - 1))
    assert first.token_ids.tolist() == last.token_ids.tolist() and first.finite.tolist() == last.finite.tolist()
    return first


@pytest.mark.parametrize(("ranks", "processed"), [(2, False), (3, True)])
def test_the_best_of_all_ranks_is_that_of_whole_rows(ranks: int, processed: bool) -> None:
    """Greedy rows and drawn ones, steep and flat, with ties over ranks; rows that are broken, and that masks empty."""
    logits = torch.cat([peaked(8), tied(9), flat(4)])
    rows = len(logits)
    logits[1, 700], logits[2], logits[3, 3] = float("nan"), float("-inf"), float("inf")
    logits[4, [5, VOCAB - 2]] = logits[5, [6, VOCAB - 1]] = 40.0
    some, options = [3, 31, 700], {}
    if processed:
        bias = [(row, 700, -np.inf) for row in (6, 7)] + [(7, token, -np.inf) for token in some] + [(8, 3, 9.0)]
        penalties = {row: Penalties({t: t % 4 for t in range(VOCAB)}, 1.3, 0.7, -0.4) for row in (9, 10)}
        options = {"bias": bias, "masks": {row: mask_of(some, VOCAB) for row in (6, 7, 8, 11)}, "penalties": penalties}
    temperature = np.resize([0.0, 0.7, 1.0, 1e-30, 2.0], rows)
    step = step_of(rows, **options, temperature=temperature, top_k=np.resize([0, 0, 1], rows), seeds=np.arange(rows))
    assert ShardSampler.serves(Variant.of(step))
    agree(sampled_by_shards(logits, step, ranks), sample_with(logits, step, make_histories=dense))


@pytest.mark.parametrize("ranks", [2, 5])
def test_rows_that_ranks_divide_have_the_bits_of_one_rank(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two parts, of which the last rank of five has no row; with everything that rows can ask for."""
    one_kernel_at_a_time(monkeypatch)
    logits, some = torch.cat([peaked(8), tied(8)]), [5, 6, 7]
    rows = len(logits)
    logits[1, 700], logits[2, some] = float("nan"), float("-inf")
    penalties = {row: Penalties({t: t % 4 for t in range(VOCAB)}, 1.3, 0.7, -0.4) for row in (9, 10)}
    masks = {2: mask_of(some, VOCAB), 3: mask_of(some, VOCAB)}
    wanted = {"num_logprobs": np.resize([-1, 3, 0], rows), "target_ids": np.resize([-1, -1, -1, 40], rows)}
    step = step_of(rows, [(4, 3, 9.0), (9, 5, 3.0)], masks=masks, penalties=penalties, **wanted, **KINDS)
    local = -(-VOCAB // ranks)
    padded = torch.nn.functional.pad(logits, (0, ranks * local - VOCAB), value=float("-inf")).to(DEVICE)

    def on_rank(tp: TensorParallel) -> StepOutput:
        histories = DenseHistories(step.num_seqs, 0, VOCAB, DEVICE)
        histories.write(step)
        sampler = RowSampler(tp, VOCAB, local, rows, histories)
        columns, outputs = SamplingColumns.of_step(step, DEVICE), DeviceOutputs.empty(rows, DEVICE)
        own = padded[:, tp.rank * local : (tp.rank + 1) * local]
        for first, stop in ((0, rows - 1), (rows - 1, rows)):
            sampler.sample(own[first:stop], columns, outputs, Variant(True, True, True, True), first)
        return output_of(step, outputs.on_host())

    whole = sampled(logits, step, 64, Variant(True, True, True, True))
    assert {FINITE, NONFINITE} == set(whole.finite.tolist())
    for found in on_ranks(ranks, on_rank):
        for name in ("token_ids", "finite", "logprobs", "ranks", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), name)


def test_kept_histories_penalise_like_fresh_counts() -> None:
    """Greedy, so that the token tells the largest adjusted logit; drafts are counted up to the first wrong one."""
    scene, draw = Scene(3), torch.Generator().manual_seed(0)
    histories = DenseHistories(SCENE_ROWS, 0, SCENE_VOCAB, DEVICE)
    sampler = DeviceSampler(SCENE_VOCAB, 32, histories, DEVICE)
    rights = 0
    for _ in range(15):
        step, drafts = scene.step()
        logits = torch.randn(len(step.logits_indices), SCENE_VOCAB, generator=draw)
        wanted = tokens_for(scene, step, drafts)
        for row, token in enumerate(wanted[::2]):
            logits[2 * row, token] += 20.0
        histories.write(step)
        columns, outputs = SamplingColumns.of_step(step, DEVICE), DeviceOutputs.empty(len(logits), DEVICE)
        sampler.sample(logits.to(DEVICE), columns, outputs, Variant.of(step))
        sampler.count(columns, outputs, len(logits))
        output = output_of(step, outputs.on_host())
        assert output.token_ids.tolist() == scene.adjusted(logits, step, drafts).argmax(1).tolist()
        scene.take(step, drafts, output.token_ids.tolist())
        rights += 0 if output.num_accepted is None else int(output.num_accepted.sum())
    assert rights > 5


@triton.jit
def _both(words, screens, exact, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    word = tl.load(words + place).to(tl.uint32, bitcast=True)
    tl.store(screens + place, gumbel_screen(word))
    tl.store(exact + place, gumbel(word))


def test_screens_lie_within_their_margin() -> None:
    """At the ends, where the logarithms are steepest, around the change of formula, and in between."""
    ends = [*range(2000), *range(2**32 - 2000, 2**32), *range(2**32 - 2**26 - 500, 2**32 - 2**26 + 500)]
    draw = np.random.default_rng(0).integers(0, 2**32, 8192 - len(ends))
    words = np.concatenate([ends, draw]).astype(np.uint32)
    moved = torch.from_numpy(words.view(np.int32)).to(DEVICE)
    screens, exact = torch.empty(8192, device=DEVICE), torch.empty(8192, dtype=torch.float64, device=DEVICE)
    _both[(1,)](moved, screens, exact, COUNT=8192)
    truth = judged_gumbel(torch.from_numpy((words ^ np.uint32(1 << 31)).view(np.int32)))
    torch.testing.assert_close(exact.cpu(), truth, rtol=1e-14, atol=1e-14)
    assert float((screens.double() - exact).abs().max()) < MARGIN.value / 10


@pytest.mark.parametrize("recording", [recording_sampler, recording_shard])
def test_all_forms_of_kernels_are_compiled_before_they_are_needed(recording: Callable) -> None:
    sampler, launches = recording()
    sampler.warm_up(sampler.vocab_size)
    compiled = {(name, *sorted(options.items())) for name, _, _, options in launches}
    for flags in itertools.product((False, True), repeat=4):
        variant = Variant(*flags)
        if recording is recording_sampler or ShardSampler.serves(variant):
            wanted = {(name, *sorted(options.items())) for name, _, _, options in launches_of(variant, recording)}
            assert wanted <= compiled, flags


@pytest.mark.soak
@pytest.mark.parametrize("kinds", [["80", "89", "90", "100"]])
def test_launches_fit_devices(kinds: list[str]) -> None:
    """Compiled without a device: no more registers and shared memory than it has."""
    found = of_program("triton_sampling_resources", *kinds)
    assert len(found) == 12 * len(kinds)
    for name, taken in found.items():
        assert taken["shared"] <= 8 << 10, name
        assert taken["registers"] <= (128 if "kept" in name else 255), name
