"""Chooses how ranks on CUDA sum: by NCCL or one-shot through symmetric memory, as measured at start.

One-shot: each rank copies its input to where the others read it, then each adds all inputs in the order of ranks; so
all get the same bits. For a decode step's few kilobytes that takes less than NCCL's protocol, for much it takes more.
Not measured on a GPU yet.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)  # bytes of float32; beyond the last NCCL is used without a question
_ALIGN = 16  # bytes, which the one-shot kernel reads at once
_WARM, _TIMED = 10, 50  # sums


class Choice(NamedTuple):
    """The chosen ways: one-shot up to `one_shot_bytes`, NCCL above."""

    one_shot_bytes: int
    seconds: Mapping[int, tuple[float, float]]  # by size: one-shot, NCCL

    def __str__(self) -> str:
        chosen = f"one-shot to {self.one_shot_bytes >> 10} KiB, NCCL above" if self.one_shot_bytes else "NCCL"
        found = [f"{size >> 10} KiB {a * 1e6:.0f} and {b * 1e6:.0f} us" for size, (a, b) in self.seconds.items()]
        return f"{chosen}; one-shot and NCCL take: {', '.join(found)}"


class DeviceSum:
    """The sum over ranks by the way that its size takes."""

    def __init__(self, one_shot: Sum | None, nccl: Sum, one_shot_bytes: int) -> None:
        self._one_shot, self._nccl, self._one_shot_bytes = one_shot, nccl, one_shot_bytes

    def __call__(self, x: Tensor) -> Tensor:
        fits = x.dtype == torch.float32 and x.nbytes <= self._one_shot_bytes and x.nbytes % _ALIGN == 0
        return self._one_shot(x) if self._one_shot is not None and fits else self._nccl(x)


def choose(
    make_one_shot: Callable[[], Sum],
    nccl: Sum,
    device: torch.device,
    agree: Callable[[float], float],
    seconds_of: Callable[[Sum, Tensor], float],
) -> tuple[DeviceSum, str]:
    """The faster way by size, and a line that says so. `agree`: the largest of all ranks' numbers, so that all choose
    the same. One-shot must give NCCL's sums of whole numbers, and is used from the smallest size up to the first at
    which it is not faster."""
    reason, one_shot = "", None
    try:
        one_shot = make_one_shot()
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if agree(float(one_shot is None)) or one_shot is None:
        return DeviceSum(None, nccl, 0), f"NCCL; no symmetric memory: {reason or 'on another rank'}"
    seconds, limit, is_faster = {}, 0, True
    for size in SIZES:
        x = torch.arange(size // 4, dtype=torch.float32, device=device)
        if agree(float(not torch.equal(one_shot(x.clone()), nccl(x.clone())))):
            return DeviceSum(None, nccl, 0), f"NCCL; one-shot sums of {size} bytes were wrong"
        seconds[size] = agree(seconds_of(one_shot, x)), agree(seconds_of(nccl, x))
        is_faster = is_faster and seconds[size][0] < seconds[size][1]
        limit = size if is_faster else limit
    return DeviceSum(one_shot, nccl, limit), str(Choice(limit, seconds))


def seconds_on_device(add: Sum, x: Tensor) -> float:
    """Seconds of one sum among many, one after the other."""
    x = torch.zeros_like(x)
    for _ in range(_WARM):
        add(x)
    torch.cuda.synchronize(x.device)
    begun = time.perf_counter()
    for _ in range(_TIMED):
        add(x)
    torch.cuda.synchronize(x.device)
    return (time.perf_counter() - begun) / _TIMED
