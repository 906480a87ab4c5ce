"""Many small arrays in one piece of memory, so that one copy takes them to the device or back.

Knows nothing of steps. Copies from and to memory of the host that is pinned run while the host goes on; so there are
two pieces of it: one may be written while the other is still copied.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64  # bytes; as much as the widest access of a kernel needs, and a line of the host's cache
_TORCH = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32, "|u1": torch.uint8}

Section = tuple[str, str, tuple[int, ...]]  # name, dtype as numpy writes it, shape


class Layout:
    """Offsets of sections that lie one after the other."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._places: list[tuple[Section, int]] = []
        self.num_bytes = 0
        for section in sections:
            self._places.append((section, self.num_bytes))
            size = math.prod(section[2]) * np.dtype(section[1]).itemsize
            self.num_bytes += -(-size // _ALIGN) * _ALIGN

    def arrays(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        """Views of the sections in `memory`, uint8 [at least `num_bytes`]."""
        return {
            name: np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
            for (name, dtype, shape), start in self._places
        }

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Views of the sections in `memory`, a uint8 tensor [at least `num_bytes`]."""
        views = {}
        for (name, dtype, shape), start in self._places:
            kind = _TORCH[dtype]
            stop = start + math.prod(shape) * kind.itemsize
            views[name] = memory[start:stop].view(kind).view(shape)
        return views


class StagingBuffer:
    """`num_bytes` on the device, and twice as much on the host, half of which is in use at a time."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._halves = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]
        # A thread that waits for such an event sleeps instead of spinning.
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(2)] if on_cuda else None
        self._current = 0

    def turn(self) -> None:
        """Take the other half, when it has been copied."""
        self._current = 1 - self._current
        if self._copied is not None:
            self._copied[self._current].synchronize()

    @property
    def on_host(self) -> np.ndarray:
        """The half in use: uint8 [num_bytes]."""
        return self._halves[self._current].numpy()

    def to_device(self, num_bytes: int) -> None:
        """Copy the first `num_bytes` in the order of the device's work, without waiting."""
        self.on_device[:num_bytes].copy_(self._halves[self._current][:num_bytes], non_blocking=True)
        self._record()

    def to_host(self, num_bytes: int) -> Callable[[], np.ndarray]:
        """Take the other half and copy to it. The result waits until that is done, and returns it: uint8, valid until
        the half is taken again."""
        self.turn()
        current = self._current
        self._halves[current][:num_bytes].copy_(self.on_device[:num_bytes], non_blocking=True)
        self._record()

        def copied() -> np.ndarray:
            if self._copied is not None:
                self._copied[current].synchronize()
            return self._halves[current].numpy()

        return copied

    def _record(self) -> None:
        if self._copied is not None:
            self._copied[self._current].record()
