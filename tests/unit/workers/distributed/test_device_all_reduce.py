"""The way a sum takes on CUDA follows from measured times, the same on every rank; here of made-up ways."""

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import NCCL, SIZES, AllReduce, DeviceAllReduce, choose_device_all_reduce

MOST = torch.ones(SIZES[-1] // 2, dtype=torch.bfloat16)


class Way:
    """Two ranks with equal inputs, and so many seconds for each size."""

    def __init__(self, seconds: tuple[float, ...], factor: float = 2.0) -> None:
        self.seconds, self.factor, self.sizes = dict(zip(SIZES, seconds, strict=True)), factor, []

    def __call__(self, x: Tensor) -> Tensor:
        self.sizes.append(x.nbytes)
        return x * self.factor


def chosen(nccl: Way, **ways: Way | str) -> tuple[DeviceAllReduce, str]:
    """Chosen on a rank with whose numbers all others agree."""

    def seconds_of(add: AllReduce, x: Tensor) -> float:
        assert isinstance(add, Way)
        return add.seconds[x.nbytes]

    return choose_device_all_reduce(nccl, ways, MOST, 2, float, seconds_of)


def test_each_size_takes_the_way_that_was_fastest_at_the_next_larger_one() -> None:
    ways = {NCCL: Way((3, 3, 3, 3, 3, 1)), "one": Way((1, 1, 1, 9, 9, 9)), "two": Way((2, 2, 2, 2, 2, 9))}
    add, line = chosen(ways[NCCL], one=ways["one"], two=ways["two"])
    assert line.startswith("4 KiB by one (NCCL 3000000, one 1000000, two 2000000 us); ")
    for size, name in ((32, "one"), (4096, "one"), (SIZES[2], "one"), (SIZES[2] + 32, "two"), (SIZES[-1], NCCL)):
        for way in ways.values():
            way.sizes.clear()
        x = torch.ones(size // 2, dtype=torch.bfloat16)
        assert torch.equal(add(x), 2 * x)
        assert {name: way.sizes for name, way in ways.items() if way.sizes} == {name: [size]}


def test_sizes_beyond_symmetric_memory_use_nccl() -> None:
    nccl = Way((3, 4, 5, 6, 7, 8))
    add, _ = chosen(nccl, one=Way((1, 1, 1, 1, 1, 1)))
    nccl.sizes.clear()
    for x in (torch.ones(8), torch.ones(8, dtype=torch.bfloat16), torch.ones(SIZES[-1], dtype=torch.bfloat16)):
        add(x)  # of another type; not the same bytes for each rank; too large
    assert nccl.sizes == [32, 16, 2 * SIZES[-1]]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (Way((1, 1, 1, 1, 1, 1), factor=3.0), "NCCL; no one: its results are wrong"),
        ("no peer access", "NCCL; no one: no peer access"),
    ],
)
def test_a_way_that_is_wrong_or_missing_is_not_taken(way: Way | str, said: str) -> None:
    nccl = Way((3, 4, 5, 6, 7, 8))
    add, line = chosen(nccl, one=way)
    assert line == said
    nccl.sizes.clear()
    add(torch.ones(16, dtype=torch.bfloat16))
    assert nccl.sizes == [32]


def test_a_way_that_another_rank_lacks_is_not_taken() -> None:
    _, line = choose_device_all_reduce(
        Way((3,) * 6), {"one": Way((1,) * 6)}, MOST, 2, lambda number: 1.0, lambda add, x: 1.0
    )
    assert line == "NCCL; no one: on another rank"
