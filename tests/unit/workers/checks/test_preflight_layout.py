"""Ranks on several hosts and in pipeline stages: what cannot be dealt or divided is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.workers.checks import devices
from oarlock.workers.config import WorkerConfig
from oarlock.workers.kernels.cpu import build
from oarlock.workers.models.registry import read_spec
from oarlock.workers.platform import cuda_driver, processor
from oarlock.workers.preflight import check_without_weights, preflight
from oarlock.workers.runner import memory_needs
from tests.golden.tiny_models import make_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path, "qwen2", dtype=torch.bfloat16)


def config(model: Path, **changes: Any) -> WorkerConfig:
    return WorkerConfig(str(model), device="cpu").with_(**changes)


@pytest.mark.parametrize(
    ("sizes", "cause", "fix"),
    [
        (
            (3, 1, 2),
            "3 tensor-parallel ranks x 1 pipeline stages cannot be divided equally among 2 nodes",
            "a multiple of --nnodes",
        ),
        ((2, 3, 2), "a node's 3 ranks would belong to two stages", "whole stages"),
        ((1, 4, 1), "pipeline_parallel_size 4 does not fit this model: it has 3 layers", "--pipeline-parallel-size 3"),
        ((3, 1, 1), "tensor_parallel_size 3 does not fit this model", "Sizes that work: 1, 2, 4"),
        ((1, 0, 1), "pipeline_parallel_size is 0", "at least 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_sizes_that_do(
    model: Path, sizes: tuple[int, int, int], cause: str, fix: str
) -> None:
    tp, pp, nnodes = sizes
    asked = config(model, tensor_parallel_size=tp, pipeline_parallel_size=pp, nnodes=nnodes)
    for check in (check_without_weights, preflight):
        with pytest.raises(StartupError) as caught:
            check(asked)
        assert cause in caught.value.cause and fix in caught.value.fix and caught.value.exit_code == 3


def test_each_host_needs_devices_for_its_own_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    assert preflight(config(model, device="cuda", tensor_parallel_size=2, nnodes=2)).device == "cuda"
    assert preflight(config(model, device="cuda", pipeline_parallel_size=2, nnodes=2)).device == "cuda"
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2}
    with pytest.raises(StartupError, match=r"on 2 host.s. needs 2 CUDA devices on each host; this one has 1") as caught:
        preflight(config(model, device="cuda", **sizes))
    assert "more hosts" in caught.value.fix


def test_each_host_needs_memory_for_its_part(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model in float32 is 4 bytes for each parameter, of which there is room for 3."""
    parameters = read_spec(str(model)).num_parameters
    monkeypatch.setattr(build, "chosen", lambda: None)
    monkeypatch.setattr(processor, "here", lambda: processor.Processor(False, False, "no AVX512-BF16 or AMX"))
    monkeypatch.setattr(devices, "free_host_bytes", lambda: 3 * parameters)
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 4 * parameters)
    given = config(model, kv_cache_bytes=parameters, max_model_len=64)
    assert preflight(given).dtype == "bfloat16"
    assert preflight(given.with_(tensor_parallel_size=2, nnodes=2)).dtype == "float32"
