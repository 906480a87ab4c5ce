"""`CudaGraphs` on a made-up torch: what it asks of CUDA, in which order, also after a release."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from oarlock.workers.runner import cuda_graphs
from oarlock.workers.runner.cuda_graphs import CudaGraphs
from tests.parallel.made_up_cuda import MadeUpCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MadeUpCuda:
    made = MadeUpCuda()
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(cuda=made))
    return made


def test_work_is_done_once_before_it_is_captured(cuda: MadeUpCuda) -> None:
    """On the stream of the capture, after all that came before; and what comes after waits for it."""
    CudaGraphs().capture(lambda: cuda.said.append(f"work on {cuda.current_stream().name}"))
    assert cuda.said == [
        "side waits for main", "work on side", "main waits for side", "empty_cache", "capture in pool 1",
        "work on side", "captured",
    ]  # fmt: skip


def test_graphs_of_one_pool_are_destroyed_together_and_others_captured_in_a_new_one(cuda: MadeUpCuda) -> None:
    maker = CudaGraphs()
    first = [maker.capture(lambda: None) for _ in range(2)]
    cuda.said.clear()
    maker.release()
    assert cuda.said == ["synchronize", "reset", "reset"] and cuda.dead_pools == {1} and len(first) == 2
    maker.release()
    assert cuda.said[3:] == ["synchronize"]
    again = maker.capture(lambda: None)
    again.replay()
    assert cuda.said[-1] == "replay of pool 3"


def test_what_captured_work_refers_to_lives_until_its_graph_is_destroyed(cuda: MadeUpCuda) -> None:
    maker, out = CudaGraphs(), torch.zeros(3)
    scratch = torch.full((3,), 7.0)
    kept = StorageWeakRef(scratch.untyped_storage())
    graph = maker.capture(partial(out.copy_, scratch))
    del scratch
    maker.capture(lambda: None)
    out.zero_()
    graph.replay()
    assert out.tolist() == [7.0, 7.0, 7.0]
    maker.release()
    assert kept.expired()
