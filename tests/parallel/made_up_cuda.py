"""`torch.cuda` made up on the CPU: streams, graphs, pools of memory and the allocator, as far as graphs take them.

A graph keeps the operations of torch that work made while it was captured, and the launches that `recorded_graphs.py`
adds; a replay does them again on the same memory, without the work's Python. As on a device, it owns only what was
allocated during the capture. All other memory it knows by address: here through a weak reference, so a replay that
names memory whose owner is gone fails, rather than wait until the allocator gives it to somebody else.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Place:
    """Place of a tensor in memory, without keeping the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()

    @property
    def is_freed(self) -> bool:
        """Whether nobody owns the memory any more."""
        return self._storage.expired()

    def tensor(self, name: str) -> Tensor:
        """The tensor again, for the operation called `name`."""
        storage = UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        kind = f"{self._dtype} {list(self._size)}"
        assert storage is not None, f"a replay of {name} reads or writes memory that was freed: {kind}"
        return torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._size, self._stride)


class MadeUpGraph:
    """Stands in for `torch.cuda.CUDAGraph`: operations in order, and how often they were done again."""

    def __init__(self, cuda: "MadeUpCuda") -> None:
        self._cuda = cuda
        self._operations: list[Callable[[], None]] = []
        self._owned: list[UntypedStorage] = []
        self.pool: int | None = None  # None: nothing was captured
        self.num_replays, self.is_reset = 0, False

    def add(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, results: Any = None) -> None:
        """`call` is to be done at each replay; `results`: what it returned, where the new results belong."""
        places = tree_map(_place, (args, kwargs, results))
        named = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf.untyped_storage() for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        self._owned += [storage for storage in made if storage._cdata not in named]

        def again() -> None:
            args, kwargs, results = tree_map(
                lambda leaf: leaf.tensor(name) if isinstance(leaf, Place) else leaf, places
            )
            _copy(call(*args, **kwargs), results)

        self._operations.append(again)

    @torch.inference_mode()
    def replay(self) -> None:
        assert self.pool is not None, "a graph without a capture is launched"
        assert not self.is_reset, "a graph that was destroyed is launched"
        self._cuda.said.append(f"replay of pool {self.pool}")
        self.num_replays += 1
        for again in self._operations:
            again()

    def reset(self) -> None:
        self.is_reset = True
        self._operations.clear()
        self._owned.clear()
        self._cuda.dead_pools.add(self.pool)
        self._cuda.said.append("reset")


def _place(leaf: Any) -> Any:
    return Place(leaf) if isinstance(leaf, Tensor) else leaf


def _tensor(leaf: Any, name: str) -> Any:
    return leaf.tensor(name) if isinstance(leaf, Place) else leaf


def _copy(new: Any, made: Any) -> None:
    """Results of a repeated operation take the places of its first ones. Where it wrote in place, they are there."""
    for here, there in zip(tree_leaves(new), tree_leaves(made), strict=True):
        if isinstance(there, Tensor) and here.data_ptr() != there.data_ptr():
            there.copy_(here)


class _Recorder(TorchDispatchMode):
    """Adds every operation of torch to a graph."""

    def __init__(self, graph: MadeUpGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _READS, f"the host reads the device: {func}"
        kwargs = kwargs or {}
        if func is torch.ops.aten.fill_.Tensor:  # `x[...] = 0.0`: a number of the host travels with the launch
            func, args = torch.ops.aten.fill_.Scalar, (args[0], args[1].item())
        made = func(*args, **kwargs)
        if not func.is_view:
            self._graph.add(str(func), func, args, kwargs, made)
        return made


class Stream:
    """A name for the order of work: here everything is done at once."""

    def __init__(self, cuda: "MadeUpCuda", name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: "Stream") -> None:
        self._cuda.said.append(f"{self.name} waits for {other.name}")


class _OfThread(threading.local):
    """Graph that the calling thread captures, and on which stream it works."""

    graph: MadeUpGraph | None = None
    stream: Stream | None = None


_thread = _OfThread()


def graph_in_capture() -> MadeUpGraph | None:
    """The graph that the calling thread captures."""
    return _thread.graph


@contextmanager
def outside_of_capture() -> Generator[None]:
    """Keeps what is done inside out of the graph of the calling thread."""
    graph, _thread.graph = _thread.graph, None
    try:
        yield
    finally:
        _thread.graph = graph


class MadeUpCuda:
    """Stands in for `torch.cuda`. As in CUDA, a pool serves no more captures once its graphs have been reset. Ranks
    that are threads may share one."""

    def __init__(self) -> None:
        self.said: list[str] = []  # what was asked for, in order
        self.graphs: list[MadeUpGraph] = []  # all that were made
        self.num_pools, self.dead_pools = 0, set[int | None]()
        self._main = Stream(self, "main")

    def graph_pool_handle(self) -> int:
        self.num_pools += 1
        return self.num_pools

    def Stream(self) -> Stream:
        return Stream(self, "side")

    def current_stream(self) -> Stream:
        return _thread.stream or self._main

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before, _thread.stream = _thread.stream, stream
        try:
            yield
        finally:
            _thread.stream = before

    def synchronize(self) -> None:
        self.said.append("synchronize")

    def empty_cache(self) -> None:
        self.said.append("empty_cache")

    def CUDAGraph(self) -> MadeUpGraph:
        self.graphs.append(MadeUpGraph(self))
        return self.graphs[-1]

    @contextmanager
    def graph(self, graph: MadeUpGraph, pool: int, stream: Stream, capture_error_mode: str) -> Generator[None]:
        """Capture a graph; like torch, first give unused memory back to the driver."""
        assert pool not in self.dead_pools and capture_error_mode == "thread_local"
        graph.pool = pool
        self.empty_cache()
        self.said.append(f"capture in pool {pool}")
        _thread.graph = graph
        try:
            with self.stream(stream), _Recorder(graph):
                yield
        finally:
            _thread.graph = None
        self.said.append("captured")
