"""Graphs of a device on the CPU: the operations of torch and the launches of Triton's kernels that work made once.

A replay does them again on the same memory, without running the work's Python. So it shows what a device's graph would:
lengths and shapes of the time of capture, and nothing that the host does in between. While it records, reading a tensor
from the host is an error, as it is in a capture, and so is making one of the host's memory.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from tests.golden.interpreter_lock import one_kernel_at_a_time
from tests.golden.paged_run import ThreadRank
from workers.worker.cuda_graphs.graphs import Work

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class RecordedGraph:
    """Operations in order, and how often they were done again."""

    def __init__(self) -> None:
        self.again: list[Callable[[], None]] = []
        self.num_replays = 0
        self.is_released = False

    @torch.inference_mode()
    def replay(self) -> None:
        assert not self.is_released, "a graph that was destroyed is launched"
        self.num_replays += 1
        for do in self.again:
            do()


class _Recorder(TorchDispatchMode):
    """Writes down every operation of torch."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _READS, f"the host reads the device: {func}"
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not func.is_view:
            self._graph.again.append(lambda: _copy(func(*args, **kwargs), made))
        return made


def _copy(new: Any, made: Any) -> None:
    """Results of a repeated operation take the places of its first ones. Where it wrote in place, they are there."""
    for here, there in zip(tree_leaves(new), tree_leaves(made), strict=True):
        if isinstance(there, Tensor) and here.data_ptr() != there.data_ptr():
            there.copy_(here)


class Recordings:
    """`GraphMaker` of `RecordedGraph`s. Ranks that are threads may record side by side, after `intercept`."""

    def __init__(self) -> None:
        self.captured: list[RecordedGraph] = []

    def capture(self, work: Work) -> RecordedGraph:
        work()
        graph = _recorded.graph = RecordedGraph()
        try:
            with _Recorder(graph):
                work()
        finally:
            _recorded.graph = None
        self.captured.append(graph)
        return graph

    def release(self) -> None:
        for graph in self.captured:
            graph.is_released = True
        self.captured.clear()


class _OfThread(threading.local):
    """What the calling thread records."""

    graph: RecordedGraph | None = None


_recorded = _OfThread()


def intercept(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a thread that records writes down launches and sums too, and may not read tensors, until undone."""
    one_kernel_at_a_time(monkeypatch)
    launch, exchange = GridExecutor.__call__, ThreadRank._exchange

    def recorded(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        graph, _recorded.graph = _recorded.graph, None  # the interpreter itself reads tensors
        try:
            with _disable_current_modes():
                launch(executor, *args, **kwargs)
        finally:
            _recorded.graph = graph
        if graph is not None:
            graph.again.append(lambda: launch(executor, *args, **kwargs))

    def exchanged(rank: ThreadRank, x: Tensor) -> list[Tensor]:
        graph, _recorded.graph = _recorded.graph, None
        with _disable_current_modes():
            parts = [part.clone() for part in exchange(rank, x)]
        _recorded.graph = graph
        if graph is not None:
            graph.again.append(lambda: _copy(exchange(rank, x), parts))
        return parts

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    monkeypatch.setattr(ThreadRank, "_exchange", exchanged)
    for owner, name in ((Tensor, "tolist"), (Tensor, "numpy"), (torch, "from_numpy"), (torch, "tensor")):
        monkeypatch.setattr(owner, name, _refused_while_recording(getattr(owner, name)))


def _refused_while_recording(call: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        assert _recorded.graph is None, "the host reads or writes a tensor while a graph is captured"
        return call(*args, **kwargs)

    return guarded
