"""Graphs of a made-up device, which record launches of Triton's kernels and sums over ranks.

So a replay shows lengths and shapes of the time of capture, and nothing that the host does in between. While a graph is
captured, reading a tensor from the host is an error, as it is on a device, and so is making one of the host's memory.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from oarlock.workers.runner import cuda_graphs
from tests.golden.interpreter_lock import one_kernel_at_a_time
from tests.golden.paged_run import ThreadRank
from tests.parallel.made_up_cuda import MadeUpCuda, graph_in_capture, outside_of_capture


def intercept(monkeypatch: pytest.MonkeyPatch) -> MadeUpCuda:
    """Let `CudaGraphs` capture on the device that is returned, launches and sums too, until undone."""
    one_kernel_at_a_time(monkeypatch)
    cuda = MadeUpCuda()
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(cuda=cuda))
    launch, exchange = GridExecutor.__call__, ThreadRank._exchange

    def recorded(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        graph = graph_in_capture()
        with outside_of_capture(), _disable_current_modes():  # the interpreter itself reads tensors
            launch(executor, *args, **kwargs)
        if graph is not None:
            name = executor.fn.__name__
            graph.add(name, lambda *args, **kwargs: launch(executor, *args, **kwargs), args, kwargs)

    def exchanged(rank: ThreadRank, x: Tensor) -> list[Tensor]:
        graph = graph_in_capture()
        with outside_of_capture(), _disable_current_modes():
            parts = [part.clone() for part in exchange(rank, x)]
        if graph is not None:
            graph.add("a sum over ranks", lambda x: exchange(rank, x), (x,), {}, parts)
        return parts

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    monkeypatch.setattr(ThreadRank, "_exchange", exchanged)
    for owner, name in ((Tensor, "tolist"), (Tensor, "numpy"), (torch, "from_numpy"), (torch, "tensor")):
        monkeypatch.setattr(owner, name, _refused_while_recording(getattr(owner, name)))
    return cuda


def _refused_while_recording(call: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        assert graph_in_capture() is None, "the host reads or writes a tensor while a graph is captured"
        return call(*args, **kwargs)

    return guarded
