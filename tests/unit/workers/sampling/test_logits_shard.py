"""Sampling operations on one rank's logits: the kernels of every level against torch's operations, on awkward rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu.sampling import KernelLogitsShard, log_totals
from oarlock.workers.sampling.candidates import decode
from oarlock.workers.sampling.logits_shard import TorchLogitsShard, floors
from oarlock.workers.sampling.noise import Noise, row_keys
from oarlock.workers.sampling.top_k_top_p import Filters, draw_from_list, draw_from_list_with_torch

pytestmark = pytest.mark.usefixtures("level")

ROWS = 6
ALL = torch.arange(ROWS)
WIDTHS = [1, 100, 128, 1000, 4096 + 17]


def logits_of(width: int, kind: str) -> Tensor:
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)) * 3
    if kind == "tied":
        x = x.round()
    if kind == "sparse":  # most ids are banned, a row has none left, and one holds a single id
        x[x < 3] = float("-inf")
        x[1] = float("-inf")
        x[2, 1:] = float("-inf")
    if kind == "equal":
        x[:] = -0.0
    return x


def shards(x: Tensor, first_id: int = 300, slice_length: int = 37) -> tuple[TorchLogitsShard, KernelLogitsShard]:
    noise = Noise(first_id, x.shape[1], x.device)
    return TorchLogitsShard(x, first_id, slice_length, noise), KernelLogitsShard(x, first_id, slice_length)


def cuts_of(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cuts: nothing; at a value of each row, with an end before, among and after its equals; everything."""
    everything = torch.full((ROWS,), float("-inf")), torch.zeros(ROWS, dtype=torch.int64)
    some = x[:, x.shape[1] // 3]
    ends = [torch.full((ROWS,), 300 + end) for end in (0, x.shape[1] // 2, x.shape[1])]
    return [everything, *((some, end) for end in ends), (x.amax(1), ends[0])]


@pytest.fixture(params=["random", "tied", "sparse", "equal"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("width", WIDTHS)
def test_maxima_candidates_and_counts_are_the_same(width: int, kind: str) -> None:
    x = logits_of(width, kind)
    plain, ours = shards(x)
    assert torch.equal(ours.top, plain.top)
    finite = plain.top.isfinite()
    assert torch.equal(ours.argmax(ALL)[finite], plain.argmax(ALL)[finite])
    for count in (1, 2, 64, 200, width):
        (values, ids), (expected, expected_ids) = decode(ours.best(ALL, count)), decode(plain.best(ALL, count))
        assert torch.equal(values, expected)
        assert torch.equal(*((some - 300).clamp(max=width) for some in (ids, expected_ids)))  # the rest is padding
    for values in (x[:, -1], plain.top, plain.top - 1):
        assert torch.equal(ours.count_above(ALL, values), plain.count_above(ALL, values))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("temperature", [1e-38, 0.7, 5.0])
def test_draws_are_the_same_and_masses_within_rounding(width: int, kind: str, temperature: float) -> None:
    x = logits_of(width, kind)
    plain, ours = shards(x)
    temperatures = torch.full((ROWS,), temperature, dtype=torch.float64)
    exact = ((x.double() - x.double().amax(1, keepdim=True)) / temperature).exp().nan_to_num()
    for position, (low, end) in enumerate(cuts_of(x)):
        keys = torch.from_numpy(row_keys(np.arange(ROWS), np.full(ROWS, position, np.int32)))
        scores, ids = ours.draw(ALL, temperatures, keys, low, end)
        expected, expected_ids = plain.draw(ALL, temperatures, keys, low, end)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(scores, expected, rtol=1e-14, atol=1e-12)
        columns = torch.arange(width) + 300
        left = (x > low[:, None]) | ((x == low[:, None]) & (columns < end[:, None]))
        mass = (exact * left).sum(1)
        for shard in (plain, ours):
            found = shard.mass(ALL, temperatures, x.amax(1), low, end).sum(1)
            torch.testing.assert_close(found, mass, rtol=1e-6 if position else 5e-7, atol=1e-30)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_slices_have_the_same_mass_on_any_rank(ranks: int, kind: str) -> None:
    """Though blocks of 128 ids begin elsewhere, and other ids lie beside them."""
    width, slice_length = 8 * 203, 203
    x = logits_of(width, kind)
    temperatures, peak = torch.rand(ROWS, dtype=torch.float64) + 0.5, x.amax(1)
    low, end = x[:, 700].contiguous(), torch.full((ROWS,), 300 + 900)
    for cut in ((low, end), (torch.full((ROWS,), float("-inf")), torch.zeros(ROWS, dtype=torch.int64))):
        whole = shards(x, 300, slice_length)[1].mass(ALL, temperatures, peak, *cut)
        share = width // ranks
        parts = [
            shards(part.contiguous(), 300 + rank * share, slice_length)[1].mass(ALL, temperatures, peak, *cut)
            for rank, part in enumerate(x.chunk(ranks, 1))
        ]
        assert whole.shape == (ROWS, 8) and torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("kind", ["random", "sparse", "equal"])
@pytest.mark.parametrize("vocab", [1000, 9, 5003])
def test_a_spread_has_the_same_bits_with_torch_and_for_every_number_of_ranks(vocab: int, kind: str) -> None:
    slice_length = -(-vocab // 8)
    x = logits_of(vocab, kind)
    whole = shards(x, 0, slice_length)[1].spread(ALL)
    for ranks in (1, 2, 4, 8):
        width = vocab if ranks == 1 else slice_length * 8 // ranks
        padded = torch.nn.functional.pad(x, (0, width * ranks - vocab), value=float("-inf"))
        for form in (0, 1):
            parts = [
                shards(part.contiguous(), rank * width, slice_length)[form].spread(ALL)
                for rank, part in enumerate(padded.split(width, 1))
            ]
            together = torch.cat(parts, 1)
            assert torch.equal(together[:, : whole.shape[1]], whole)
            assert not together[:, whole.shape[1] :].any()
    counts = (x > float("-inf")).sum(1)
    assert torch.equal(whole[..., 0].sum(1).long(), counts)
    values = x.double().masked_fill(x == float("-inf"), 0.0)
    torch.testing.assert_close(whole[..., 1:].sum(1), torch.stack([values.sum(1), (values**2).sum(1)], 1))


def test_lists_and_logarithms_are_as_with_torch() -> None:
    x = logits_of(1000, "random")
    keys = shards(x)[0].best(ALL, 64)
    column = torch.rand(ROWS, dtype=torch.float64)
    noise = torch.from_numpy(row_keys(np.arange(ROWS), np.zeros(ROWS, np.int32)))
    for top_k, min_p, top_p in ((0, 0.0, 0.7), (10, 0.0, 1.0), (0, 0.2, 0.9), (100, 0.1, 0.5)):
        filters = Filters(
            temperature=column + 0.5,
            top_p=torch.full_like(column, top_p),
            top_k=torch.full((ROWS,), top_k),
            min_p=torch.full_like(column, min_p),
            top_n_sigma=torch.zeros_like(column),
            keys=noise,
            floor=column,
        )
        filters.floor = floors(TensorParallel.solo(), shards(x)[1], ALL, x.amax(1), filters)
        total = ((x.double() - x.double().amax(1, keepdim=True)) / filters.temperature[:, None]).exp().sum(1)
        for ours, plain in zip(
            draw_from_list(keys, filters, total), draw_from_list_with_torch(keys, filters, total), strict=True
        ):
            assert torch.equal(ours, plain)
        if min_p:
            expected = x.amax(1).double() + filters.temperature * filters.min_p.log()
            torch.testing.assert_close(filters.floor, expected, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(log_totals(x.amax(1), column), x.amax(1).double() + column.log(), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 130, 999])
def test_a_broken_row_is_seen_and_disturbs_no_other(value: float, place: int) -> None:
    x = logits_of(1000, "random")
    temperatures = torch.ones(ROWS, dtype=torch.float64)
    keys = torch.from_numpy(row_keys(np.arange(ROWS), np.zeros(ROWS, np.int32)))
    low, end = torch.full((ROWS,), float("-inf")), torch.zeros(ROWS, dtype=torch.int64)

    def answers() -> list[Tensor]:
        ours = shards(x)[1]
        drawn = ours.draw(ALL, temperatures, keys, low, end)
        return [
            ours.top,
            ours.mass(ALL, temperatures, ours.top, low, end),
            ours.argmax(ALL),
            ours.best(ALL, 64),
            *drawn,
        ]

    healthy = answers()
    x[3, place] = value
    others = [0, 1, 2, 4, 5]
    for before, now in zip(healthy, answers(), strict=True):
        assert torch.equal(before[others], now[others])
    assert shards(x)[1].top[3].isnan()


def test_rows_can_be_taken_in_any_order_and_number() -> None:
    x = logits_of(1000, "random")
    ours = shards(x)[1]
    keys = torch.from_numpy(row_keys(np.arange(ROWS), np.zeros(ROWS, np.int32)))
    some = torch.tensor([4, 1, 5])
    low, end = x[:, 7].contiguous(), torch.full((ROWS,), 500)
    temperatures = torch.rand(ROWS, dtype=torch.float64) + 0.5
    assert torch.equal(ours.best(some, 20), ours.best(ALL, 20)[some])
    part = ours.mass(some, temperatures[some], ours.top[some], low[some], end[some])
    assert torch.equal(part, ours.mass(ALL, temperatures, ours.top, low, end)[some])
    few = ours.draw(some, temperatures[some], keys[some], low[some], end[some])
    for part, whole in zip(few, ours.draw(ALL, temperatures, keys, low, end), strict=True):
        assert torch.equal(part, whole[some])
