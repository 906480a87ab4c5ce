"""The way a sum takes on CUDA follows from measured times, the same on every rank; here of made-up ways."""

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import SIZES, DeviceSum, Sum, choose_device_sum

CPU = torch.device("cpu")


class Way:
    """Two ranks with equal inputs, and so many seconds for each size."""

    def __init__(self, seconds: tuple[float, ...], factor: float = 2.0) -> None:
        self.seconds, self.factor, self.sizes = dict(zip(SIZES, seconds, strict=True)), factor, []

    def __call__(self, x: Tensor) -> Tensor:
        self.sizes.append(x.nbytes)
        return x * self.factor


def chosen(one_shot: Way, nccl: Way, others: float = 0.0) -> tuple[DeviceSum, str]:
    """`others`: the largest number of the other ranks."""

    def seconds_of(add: Sum, x: Tensor) -> float:
        assert isinstance(add, Way)
        return add.seconds[x.nbytes]

    return choose_device_sum(lambda: one_shot, nccl, CPU, lambda number: max(number, others), seconds_of)


@pytest.mark.parametrize(
    ("one_shot", "limit"),
    [
        ((1, 2, 9, 99), SIZES[1]),
        ((9, 1, 1, 1), 0),
        ((1, 9, 1, 1), SIZES[0]),
        ((1, 1, 1, 1), SIZES[3]),
    ],
)
def test_one_shot_up_to_the_first_size_at_which_it_is_not_faster(one_shot: tuple[float, ...], limit: int) -> None:
    first, second = Way(one_shot), Way((3, 4, 5, 6))
    add, line = chosen(first, second)
    assert line.startswith(f"one-shot to {limit >> 10} KiB, NCCL above" if limit else "NCCL")
    for size in (64, *SIZES, 1 << 20):
        first.sizes, second.sizes = [], []
        x = torch.ones(size // 4)
        assert torch.equal(add(x), 2 * x)
        assert (first.sizes, second.sizes) == (([size], []) if size <= limit else ([], [size]))


def test_what_the_one_shot_kernel_cannot_read_goes_to_nccl() -> None:
    first, second = Way((1, 1, 1, 1)), Way((3, 4, 5, 6))
    add, _ = chosen(first, second)
    first.sizes, second.sizes = [], []
    add(torch.ones(3))
    add(torch.ones(8, dtype=torch.bfloat16))
    assert first.sizes == [] and second.sizes == [12, 16]


def test_a_way_that_is_wrong_or_missing_is_not_taken() -> None:
    _, line = chosen(Way((1, 1, 1, 1), factor=3.0), Way((3, 4, 5, 6)))
    assert line == "NCCL; one-shot sums of 4096 bytes were wrong"
    _, line = chosen(Way((1, 1, 1, 1)), Way((3, 4, 5, 6)), others=1.0)
    assert line == "NCCL; no symmetric memory: on another rank"

    def missing() -> Sum:
        raise RuntimeError("no peer access\nbetween devices")

    _, line = choose_device_sum(missing, Way((3, 4, 5, 6)), CPU, float, lambda add, x: 1.0)
    assert line == "NCCL; no symmetric memory: no peer access"
