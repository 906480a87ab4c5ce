"""Streams, events, memory and graphs of a device that is made up on the CPU. `made_up_cuda.py` has the rules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from tests.parallel.made_up_cuda import MadeUpCuda


class Fault(AssertionError):
    """Error in place of what a device would have answered: wrong numbers, an error of its own, or a hang."""


@dataclass(eq=False)
class Stream:
    """An order of work on a device. `seen`: of other streams, and of itself, how much work is known to be over."""

    cuda: MadeUpCuda
    device: int
    seen: dict[Stream, int] = field(default_factory=dict)
    ticks: int = 0

    def wait_stream(self, other: Stream) -> None:
        self.cuda.said.append("waits for a stream")
        self.wait_event(Event(self.cuda).record(other))

    def wait_event(self, event: Event) -> None:
        merge(self.seen, event.seen)

    def synchronize(self) -> None:
        self.cuda.host_waits("Stream.synchronize", {self: self.ticks} | self.seen)


class Event:
    """A moment of a stream. Before it is recorded nothing waits for it."""

    def __init__(self, cuda: MadeUpCuda, **_: bool) -> None:
        self._cuda, self.seen = cuda, dict[Stream, int]()
        self._device: int | None = None

    def record(self, stream: Stream | None = None) -> Event:
        stream = stream or self._cuda.current_stream()
        self.seen, self._device = {**stream.seen, stream: stream.ticks}, stream.device
        return self

    def synchronize(self) -> None:
        if self._device not in (None, of_thread.device):
            raise Fault(f"device {of_thread.device} is the thread's own, and it waits for an event of {self._device}")
        self._cuda.host_waits("Event.synchronize", self.seen)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._cuda.current_stream()).wait_event(self)


def merge(into: dict[Stream, int], seen: dict[Stream, int]) -> None:
    for stream, ticks in seen.items():
        into[stream] = max(into.get(stream, 0), ticks)


@dataclass(eq=False)
class Memory:
    """A piece of memory that was allocated at once, and its last use."""

    storage: StorageWeakRef
    num_bytes: int
    device: int | None = None  # None: pinned memory of the host
    graph: MadeUpGraph | None = None  # whose pool it is from
    last: tuple[Stream, int] | None = None


class DeviceTensor(Tensor):
    """A tensor of a made-up device. To C++ it is one of `meta`, so that no code of a real device is asked for."""

    inner: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, cuda: MadeUpCuda, inner: Tensor, memory: Memory) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        made.cuda_, made.inner, made.memory = cuda, inner, memory
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.memory.device)

    def tolist(self) -> list:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor)).cuda_
        return cuda.call(func, args, kwargs or {})


class Place:
    """Place of a tensor in memory, without keeping the tensor."""

    def __init__(self, tensor: Tensor, memory: Memory) -> None:
        self.memory = memory
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()

    def tensor(self, name: str) -> Tensor:
        """The tensor again, for the launch called `name`."""
        storage = UntypedStorage._new_with_weak_ptr(self.memory.storage.cdata)
        if storage is None:
            raise Fault(f"a replay of {name} names memory that was freed: {self._dtype} {list(self._size)}")
        return torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._size, self._stride)


class MadeUpGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, cuda: MadeUpCuda) -> None:
        self._cuda = cuda
        self._launches: list[tuple[str, Callable[[], None]]] = []
        self._memory: set[Memory] = set()
        self._owned: list[UntypedStorage] = []
        self.pool: int | None = None  # None: nothing was captured
        self.device, self.num_replays, self.is_reset = -1, 0, False

    def own(self, storage: UntypedStorage) -> None:
        self._owned.append(storage)

    def add(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, results: Any = None) -> None:
        """`call` is to be done at each replay; `results`: what it returned, where the new results belong."""
        places = tree_map(
            lambda leaf: Place(leaf.inner, leaf.memory) if isinstance(leaf, DeviceTensor) else leaf,
            (args, kwargs, results),
        )
        self._memory |= {leaf.memory for leaf in tree_leaves(places) if isinstance(leaf, Place)}

        def again() -> None:
            args, kwargs, results = tree_map(
                lambda leaf: leaf.tensor(name) if isinstance(leaf, Place) else leaf, places
            )
            for new, there in zip(tree_leaves(call(*args, **kwargs)), tree_leaves(results), strict=True):
                if isinstance(there, Tensor) and new.data_ptr() != there.data_ptr():
                    there.copy_(new)

        self._launches.append((name, again))

    @property
    def launches(self) -> list[str]:
        """Names of what one replay launches."""
        return [name for name, _ in self._launches]

    @torch.inference_mode()
    def replay(self) -> None:
        if self.pool is None or self.is_reset:
            raise Fault("a graph is launched that has no capture, or was destroyed")
        self._cuda.said.append(f"replay of pool {self.pool}")
        self._cuda.begin("a replay", self.device, self._memory, by=self)
        self.num_replays += 1
        with _disable_current_modes():
            for _, again in self._launches:
                again()

    def reset(self) -> None:
        self.is_reset = True
        self._launches.clear()
        self._owned.clear()
        self._cuda.dead_pools.add(self.pool)
        self._cuda.said.append("reset")


class _OfThread(threading.local):
    device = 0
    graph: MadeUpGraph | None = None  # in capture
    streams: dict[int, Stream] | None = None
    is_entered = False


of_thread = _OfThread()
