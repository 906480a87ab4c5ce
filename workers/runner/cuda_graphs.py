"""Graphs of a device: work that is recorded once, and then launched whole.

The work must read and write the same memory each time, and must not look at the device from the host. A graph owns what
was allocated while it was captured, and knows all other memory by address alone; so whatever the work refers to lives
as long as its graph. All ranks capture the same graphs in the same order, since collectives are captured with the rest;
and all graphs must be gone before the process group is.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], object]


class Graph(Protocol):
    """A graph: work that was recorded, and can be replayed."""

    def replay(self) -> None:
        """Do it again, in the order of the device's other work. Does not wait for it."""


class GraphMaker(Protocol):
    """Records graphs, which share memory for what they compute on the way: so only one of them runs at a time, and its
    results are kept elsewhere. The largest comes first, and the others find room in what it took."""

    def capture(self, work: Work) -> Graph:
        """`work` as a graph, which keeps it. It is done at least once before, for whatever happens only the first
        time."""

    def release(self) -> None:
        """Destroy all graphs, and give back their memory; others may be captured afterwards."""


class Call:
    """A graph where the device is the host: the work itself."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class Calls:
    """`GraphMaker` where the device is the host: it makes `Call`s."""

    def capture(self, work: Work) -> Graph:
        work()
        return Call(work)

    def release(self) -> None:
        """Does nothing: a call holds no memory of a device."""


class CudaGraph:
    """A graph of CUDA with the work that was captured: it keeps alive the memory that the graph reads and writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Work) -> None:
        self._graph = graph
        self._work: Work | None = work

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        """Destroy the graph, which no longer runs, and only then let go of the work's memory."""
        self._graph.reset()
        self._work = None


class CudaGraphs:
    """CUDA's graphs, in one pool of memory and on one stream."""

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
        # NCCL's own thread may use the device meanwhile, which the default mode of capturing takes for an error.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        self._graphs.append(CudaGraph(graph, work))
        return self._graphs[-1]

    def release(self) -> None:
        torch.cuda.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool that has lost its graphs takes no others
