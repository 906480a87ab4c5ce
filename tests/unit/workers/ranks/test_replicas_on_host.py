"""Replicas share one host: its memory, cores and CUDA devices are divided among the ranks of all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.workers.checks import devices
from oarlock.workers.config import WorkerConfig
from oarlock.workers.models.registry import read_spec
from oarlock.workers.platform import cuda_driver
from oarlock.workers.preflight import check_without_weights, preflight
from oarlock.workers.ranks.cpu_affinity import check_affinity, with_cpus
from oarlock.workers.runner import kv_room, memory_needs
from oarlock.workers.runner.device import device_of
from oarlock.workers.runner.memory_needs import weight_bytes_of_node
from tests.golden.tiny_models import make_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path, "qwen2", dtype=torch.float32)


def replica(model: Path, rank: int = 0, size: int = 2, **changes: Any) -> WorkerConfig:
    named = {"device": "cpu", "data_parallel_size": size, "data_parallel_rank": rank}
    return WorkerConfig(str(model)).with_(**(named | changes))


@pytest.mark.parametrize(
    ("cores", "changes", "cause", "fix"),
    [
        (2, {"size": 3}, "3 x 1 rank(s) of a replica makes 3 ranks for 2 CPU core(s)", "Use --data-parallel-size 2."),
        (3, {"tensor_parallel_size": 2}, "2 x 2 rank(s) of a replica makes 4 ranks for 3 CPU core(s)", "Leave"),
        (8, {"tensor_parallel_size": 2, "nnodes": 2}, "--data-parallel-size 2 with --nnodes 2", "behind a proxy"),
        (8, {"size": 0}, "data_parallel_size is 0", "at least 1"),
    ],
)
def test_unsupported_devices_are_refused_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch, cores: int, changes: dict[str, Any], cause: str, fix: str
) -> None:
    monkeypatch.setattr(devices, "available_cores", lambda: cores)
    for check in (check_without_weights, preflight):
        with pytest.raises(StartupError) as refused:
            check(replica(model, **changes))
        assert cause in refused.value.cause and fix in refused.value.fix and refused.value.exit_code == 3


def test_replicas_need_devices_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 3)
    with pytest.raises(StartupError) as refused:
        preflight(replica(model, device="cuda", tensor_parallel_size=2))
    assert "data_parallel_size 2 x 2 rank(s) of a replica needs 4 CUDA devices; 3 found" in refused.value.cause
    assert "Use --data-parallel-size 1, or --device cpu" in refused.value.fix
    with pytest.raises(StartupError, match="Use --data-parallel-size 3"):
        preflight(replica(model, device="cuda", size=4))
    found = preflight(replica(model, 2, size=3, device="cuda"))
    assert not found.share_device and device_of(found, 0) == torch.device("cuda", 2)


def test_a_replica_takes_the_devices_behind_those_of_the_replicas_before_it(model: Path) -> None:
    for rank, taken in ((0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])):
        config = replica(model, rank, device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2)
        assert [device_of(config, place).index for place in range(4)] == taken


def test_each_rank_of_each_replica_has_its_list_of_cpus(model: Path) -> None:
    with pytest.raises(StartupError, match=r"1 list\(s\) of CPUs, and there are 2 rank"):
        check_affinity(replica(model, cpu_affinity="0"))
    for rank in (0, 1):
        config = replica(model, rank, cpu_affinity="0|0")
        check_affinity(config)
        resolved = with_cpus(config, "cpu")
        assert resolved.cpu_affinity == "0|0" and resolved.num_threads == 1
        assert config.first_on_host == rank and config.ranks_on_host == 2


def test_threads_are_divided_among_the_ranks_of_all_replicas(model: Path) -> None:
    one = with_cpus(WorkerConfig(str(model), device="cpu", cpu_affinity="none"), "cpu")
    two = with_cpus(replica(model, cpu_affinity="none"), "cpu")
    assert one.num_threads is not None and two.num_threads == max(1, one.num_threads // 2)


def test_the_weights_count_once_for_each_replica(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 4 * read_spec(str(model)).num_parameters
    monkeypatch.setattr(devices, "available_cores", lambda: 8)
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 2 * weights + weights // 2)
    asked = {"dtype": "float32", "cpu_affinity": "none", "size": 3, "kv_cache_bytes": 1 << 17, "max_model_len": 64}
    assert preflight(replica(model, **asked | {"size": 2})).dtype == "float32"
    with pytest.raises(StartupError, match="need 3 x ") as refused:
        preflight(replica(model, **asked))
    assert refused.value.exit_code == 4 and "--data-parallel-size" in refused.value.fix
    # What was free before the first replica began to load decides, however far the others are by now.
    assert preflight(replica(model, **asked, host_free_bytes=4 * weights)).data_parallel_size == 3


def test_all_replicas_get_equal_shares_of_kv_memory_whenever_they_measure(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(str(model), 64)
    config = replica(model, dtype="float32", tensor_parallel_size=2, host_free_bytes=10**9, max_model_len=64)
    weights = weight_bytes_of_node(config, spec, "float32", memory_needs.NONE)
    shares = set()
    for rank, free_now in ((0, 9 * 10**8), (1, 10**7)):
        monkeypatch.setattr(kv_room, "free_host_bytes", lambda free=free_now: free)
        room = kv_room.room_for_kv(config.with_(data_parallel_rank=rank), None, 0, 0, weights)
        shares.add(room.available)
    assert shares == {int((10**9 - 2 * weights) * kv_room.CPU_SHARE) // 4}
