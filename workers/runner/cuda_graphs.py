"""Graphs of a device: work that is recorded once, and then launched as a whole.

The work must use the same memory each time, and the host must not read the device's memory while the work runs. A graph
owns the memory that was allocated during the capture, and knows all other memory only by its address, so everything
that the work refers to must live as long as the graph. All ranks capture the same graphs in the same order, since
collectives are captured too. All graphs must be destroyed before the process group is.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], object]


class Graph(Protocol):
    """Recorded work that can be replayed."""

    def replay(self) -> None:
        """Launch the work again, in the order of the device's other work. Does not wait for it."""


class GraphMaker(Protocol):
    """Recorder of graphs, which share memory for intermediate results.

    So only one graph may run at a time, and results must be stored elsewhere. If the largest graph is captured first,
    the others reuse its memory.
    """

    def capture(self, work: Work) -> Graph:
        """Record `work` as a graph, which keeps it alive. The work runs at least once before, to initialise everything
        that is initialised at the first use."""

    def release(self) -> None:
        """Destroy all graphs and free their memory; others may be captured afterwards."""


class Call:
    """Graph on a host device: the work itself."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class Calls:
    """`GraphMaker` for a host device: it makes `Call`s."""

    def capture(self, work: Work) -> Graph:
        work()
        return Call(work)

    def release(self) -> None:
        """Do nothing: a call holds no device memory."""


class CudaGraph:
    """A CUDA graph with the captured work, which keeps the memory alive that the graph reads and writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Work) -> None:
        self._graph = graph
        self._work: Work | None = work

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        """Destroy the graph, which must not be running, and only then release the work's memory."""
        self._graph.reset()
        self._work = None


class CudaGraphs:
    """`GraphMaker` for CUDA, with one memory pool and one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graphs: list[CudaGraph] = []

    def capture(self, work: Work) -> Graph:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread may use the device meanwhile, which the default capture mode treats as an error.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        self._graphs.append(CudaGraph(graph, work))
        return self._graphs[-1]

    def release(self) -> None:
        torch.cuda.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool cannot be reused after its graphs are destroyed


def graph_maker(device: torch.device) -> GraphMaker:
    """Return the recorder of graphs of `device`."""
    return CudaGraphs() if device.type == "cuda" else Calls()
