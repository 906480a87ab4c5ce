"""Physical cores are counted: not hyper-threads, not efficiency cores, and no more than a container may use."""

from pathlib import Path

import pytest

from oarlock.workers.platform.processor import (
    available_cores,
    fast_cores,
    format_cpu_list,
    is_present,
    parse_cpu_list,
    physical_cores,
    within_quota,
)
from tests.unit.workers.made_up_system import make_system, pairs


def count(cpus: range | set[int], folder: Path) -> int:
    return len(fast_cores(physical_cores(cpus, folder)))


def test_one_socket_with_two_threads_per_core(tmp_path: Path) -> None:
    folder = make_system(tmp_path, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    cores = physical_cores(range(8), folder)
    assert [core.cpus for core in cores] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert count(range(8), folder) == 4


def test_two_sockets_whose_threads_are_neighbours(tmp_path: Path) -> None:
    folder = make_system(tmp_path, pairs(8), nodes={0: "0-7", 1: "8-15"})
    assert count(range(16), folder) == 8
    assert [core.node for core in physical_cores(range(16), folder)] == [0] * 4 + [1] * 4


def test_a_hybrid_processor_counts_its_performance_cores(tmp_path: Path) -> None:
    folder = make_system(tmp_path, pairs(4) | {cpu: str(cpu) for cpu in range(8, 16)}, atoms="8-15")
    assert count(range(16), folder) == 4
    assert count(range(8, 16), folder) == 8  # a process that may use no others uses these


@pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_large_and_small_cores_differ_by_capacity_or_else_by_frequency(tmp_path: Path, file: str) -> None:
    speeds = dict.fromkeys(range(4), 446) | dict.fromkeys(range(4, 7), 871) | {7: 1024}
    folder = make_system(tmp_path, {cpu: str(cpu) for cpu in range(8)}, speeds=speeds, speed_file=file)
    assert count(range(8), folder) == 4


def test_a_cpuset_counts_the_cores_it_touches(tmp_path: Path) -> None:
    folder = make_system(tmp_path, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert count({1, 5}, folder) == 1
    assert count({1, 2, 7}, folder) == 3


def test_offline_cpus_are_no_cores(tmp_path: Path) -> None:
    folder = make_system(tmp_path, {cpu: str(cpu) for cpu in range(4)}, online="0,2-3")
    assert [core.cpus for core in physical_cores(range(4), folder)] == [(0,), (2,), (3,)]
    assert is_present(1, folder) and not is_present(4, folder)


def test_a_system_that_says_nothing_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    assert count({0, 1, 5}, tmp_path / "missing") == 3


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("150000 100000", 1), ("50000 100000", 1), ("300000 100000", 3), ("", 8)]
)
def test_a_quota_pays_for_whole_cores(tmp_path: Path, text: str, cores: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert within_quota(8, file) == cores
    assert within_quota(8, tmp_path / "missing") == 8


def test_this_machine_has_some() -> None:
    assert available_cores() >= 1


@pytest.mark.parametrize("text", ["", "0", "0-3,8", "0,2,4-5", "7-65535"])
def test_a_list_of_cpus_is_read_and_written(text: str) -> None:
    assert format_cpu_list(parse_cpu_list(text)) == text


@pytest.mark.parametrize("text", ["a", "3-1", "-3", "1-", "1--3", "0-99999999999", "0x1", "1.5"])
def test_a_wrong_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_cpu_list(text)
