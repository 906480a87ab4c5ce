"""`CudaGraphs` on a made-up torch: what it asks of CUDA, in which order, also after a release."""

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from workers.worker.cuda_graphs import graphs
from workers.worker.cuda_graphs.graphs import CudaGraphs


class MadeUpCuda:
    """Of `torch.cuda` what graphs take. As in CUDA, a pool serves no more captures once its graphs have been reset."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stream_in_use, self.pools, self.dead = "main", 0, set()

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def Stream(self) -> Any:
        return SimpleNamespace(name="side", wait_stream=lambda other: self.said.append(f"side waits for {other.name}"))

    def current_stream(self) -> Any:
        name = self.stream_in_use
        return SimpleNamespace(name=name, wait_stream=lambda other: self.said.append(f"{name} waits for {other.name}"))

    @contextmanager
    def stream(self, stream: Any) -> Generator[None]:
        before, self.stream_in_use = self.stream_in_use, stream.name
        yield
        self.stream_in_use = before

    def synchronize(self) -> None:
        self.said.append("synchronize")

    def CUDAGraph(self) -> Any:
        made = SimpleNamespace(pool=None)

        def reset() -> None:
            self.dead.add(made.pool)
            self.said.append("reset")

        made.reset, made.replay = reset, lambda: self.said.append(f"replay of pool {made.pool}")
        return made

    @contextmanager
    def graph(self, graph: Any, pool: int, stream: Any, capture_error_mode: str) -> Generator[None]:
        assert pool not in self.dead and capture_error_mode == "thread_local"
        graph.pool = pool
        self.said.append(f"capture in pool {pool}")
        with self.stream(stream):
            yield
        self.said.append("captured")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MadeUpCuda:
    made = MadeUpCuda()
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=made))
    return made


def test_work_is_done_once_before_it_is_captured(cuda: MadeUpCuda) -> None:
    """On the stream of the capture, after all that came before; and what comes after waits for it."""
    CudaGraphs().capture(lambda: cuda.said.append(f"work on {cuda.stream_in_use}"))
    assert cuda.said == [
        "side waits for main", "work on side", "main waits for side", "capture in pool 1", "work on side", "captured",
    ]  # fmt: skip


def test_graphs_of_one_pool_are_destroyed_together_and_others_captured_in_a_new_one(cuda: MadeUpCuda) -> None:
    maker = CudaGraphs()
    first = [maker.capture(lambda: None) for _ in range(2)]
    cuda.said.clear()
    maker.release()
    assert cuda.said == ["synchronize", "reset", "reset"] and cuda.dead == {1} and len(first) == 2
    maker.release()
    assert cuda.said[3:] == ["synchronize"]
    again = maker.capture(lambda: None)
    again.replay()
    assert cuda.said[-1] == "replay of pool 3"
