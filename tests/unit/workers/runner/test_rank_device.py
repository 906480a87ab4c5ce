"""A rank's start on a made-up second CUDA device: the device is chosen before anything is asked of CUDA."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed import parallel_state
from oarlock.workers.distributed.shm_layout import total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.distributed.topology import RendezvousInfo
from oarlock.workers.protocol import StepOutput
from oarlock.workers.ranks.spawn_ranks import RankArguments
from oarlock.workers.runner import worker_process
from oarlock.workers.runner.device import use_device
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.pending_output import AnsweringThread
from tests.golden.tiny_models import make_tiny

OF_CUDA = (
    "CUDAGraph", "Event", "Stream", "current_stream", "empty_cache", "get_device_capability", "get_device_properties",
    "graph_pool_handle", "mem_get_info", "synchronize",
)  # fmt: skip


class DeviceCalls(TorchFunctionMode):
    """Keeps what is asked of CUDA devices, and which one is current at the time; it is done on the CPU instead."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.said: list[tuple[str, int]] = []  # what, and the current device

    def note(self, what: str) -> None:
        self.said.append((what, self.current))

    def set_device(self, device: torch.device) -> None:
        assert device.index is not None
        self.current = device.index
        self.note("set_device")

    def noting(self, what: str, result: Callable[..., Any] = lambda *_, **__: None) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(what)
            return result(*args, **kwargs)

        return noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = False

        def on_cpu(leaf: Any) -> Any:
            nonlocal named
            if isinstance(leaf, torch.device) and leaf.type == "cuda":
                named = True
                return torch.device("cpu")
            return leaf

        args, kwargs = tree_map(on_cpu, (args, kwargs or {}))
        if named:
            self.note(func.__name__)
        return func(*args, **kwargs)


class Started(Exception):
    """Raised when the start comes to the weights."""


class SilentControl:
    """A control channel that nobody reads."""

    def send(self, kind: str, **fields: Any) -> None:
        """Drop the message: there is no engine."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceCalls]:
    made = DeviceCalls()
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    for name in OF_CUDA:
        monkeypatch.setattr(torch.cuda, name, made.noting(name))
    dist = parallel_state.dist
    monkeypatch.setattr(dist, "init_process_group", made.noting("init_process_group"))
    monkeypatch.setattr(dist, "all_reduce", made.noting("all_reduce"))
    monkeypatch.setattr(dist, "all_gather", made.noting("all_gather", lambda out, x, group: [o.copy_(x) for o in out]))
    monkeypatch.setattr(parallel_state, "open_store", lambda info: object())
    one_shot = made.noting("one-shot sum", lambda x: x)
    monkeypatch.setattr(parallel_state, "OneShot", made.noting("symmetric memory", lambda *_: one_shot))
    with made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=1)


def config_of(model: Path, **changes: Any) -> WorkerConfig:
    config = WorkerConfig(str(model), device="cuda", dtype="float32", tensor_parallel_size=2, max_model_len=32)
    return config.with_(cpu_affinity="none", load_format="safetensors", num_threads=1, **changes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_chooses_its_device_before_anything_is_asked_of_cuda(
    rank: int, model: Path, calls: DeviceCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(runner: ModelRunner, on_progress: object) -> None:
        raise Started

    monkeypatch.setattr(ModelRunner, "load", load)
    memory = anonymous_memory(total_bytes(2, 4096))
    info = RendezvousInfo(rank, 2, memory, 4096, timeout_s=60.0, shares_cores=True)
    with pytest.raises(Started):
        worker_process.start(RankArguments(info, config_of(model)), SilentControl())  # ty: ignore[invalid-argument-type]
    os.close(memory)
    names = [name for name, _ in calls.said]
    assert names[0] == "set_device" and {current for _, current in calls.said} == {rank}
    expected = ["init_process_group", "symmetric memory", "one-shot sum", "synchronize", "full", "Stream"]
    assert [name for name in expected if name not in names] == []
    assert names.index("init_process_group") < names.index("one-shot sum") < names.index("Stream")


def test_the_thread_that_waits_for_a_device_has_chosen_it(model: Path, calls: DeviceCalls) -> None:
    """A second replica in one box, whose first rank answers from another device than the first replica's."""
    config = config_of(model, tensor_parallel_size=1, data_parallel_size=2, data_parallel_rank=1)

    class Waiting:
        def wait(self) -> StepOutput:
            calls.note("event")
            raise RuntimeError("the device failed")

    failures = []
    thread = AnsweringThread(
        lambda output: None, lambda step, error: failures.append(step), lambda: use_device(config, 0)
    )
    thread.add(7, Waiting())
    thread.close(60.0)
    assert calls.said == [("set_device", 1), ("event", 1)] and failures == [7]
