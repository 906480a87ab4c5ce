"""A made-up device with separate memory, for tests: the host's, counted by the tensors that operations make."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MadeUpDevice:
    """A `MemoryMeter` of `total` bytes, of which `free` are free when nothing runs. `peak_of` raises what torch raises
    when tensors take more."""

    def __init__(self, total: int, free: int) -> None:
        self._total, self._free = total, free
        self.peaks: list[int] = []

    def total_bytes(self) -> int:
        return self._total

    def free_bytes(self) -> int:
        return self._free

    def peak_of(self, run: Callable[[], object]) -> int:
        with CountedTensors(self._free) as counted:
            run()
        self.peaks.append(counted.peak)
        return counted.peak


class CountedTensors(TorchDispatchMode):
    """Counts the bytes of memory that tensors made within hold, each once, as long as any tensor holds it."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._holders: Counter[int] = Counter()  # by address
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size == 0 or (address in before and not self._holders[address]):
                continue  # made before
            if not self._holders[address]:
                self._now += size
            self._holders[address] += 1
            weakref.finalize(tensor, self._release, address, size)
        self.peak = max(self.peak, self._now)
        if self._now > self._most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self._now - self._most} bytes.")
        return out

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self._now -= size
