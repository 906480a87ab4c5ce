"""Physical cores are counted: not hyper-threads, not efficiency cores, and no more than a container may use."""

from pathlib import Path

import pytest

from workers.platform.cores import available_cores, fast_cores, physical_cores, within_quota


def system(
    folder: Path, siblings: dict[int, str], *, atoms: str = "", capacities: dict[int, int] | None = None
) -> Path:
    """A made-up /sys/devices. `siblings`: for each CPU, the list of the threads of its core."""
    for cpu, text in siblings.items():
        topology = folder / f"system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
        if capacities:
            (topology.parent / "cpu_capacity").write_text(f"{capacities[cpu]}\n")
    if atoms:
        (folder / "cpu_atom").mkdir()
        (folder / "cpu_atom/cpus").write_text(atoms + "\n")
    return folder


def count(cpus: range | set[int], folder: Path) -> int:
    return len(fast_cores(physical_cores(cpus, folder)))


def test_one_socket_with_two_threads_per_core(tmp_path: Path) -> None:
    folder = system(tmp_path, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    cores = physical_cores(range(8), folder)
    assert [core.cpus for core in cores] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert count(range(8), folder) == 4


def test_two_sockets_whose_threads_are_neighbours(tmp_path: Path) -> None:
    folder = system(tmp_path, {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(16)})
    assert count(range(16), folder) == 8


def test_a_hybrid_processor_counts_its_performance_cores(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)} | {cpu: str(cpu) for cpu in range(8, 16)}
    folder = system(tmp_path, siblings, atoms="8-15")
    assert count(range(16), folder) == 4
    assert count(range(8, 16), folder) == 8  # a process that may use no others uses these


def test_large_and_small_arm_cores_differ_by_capacity(tmp_path: Path) -> None:
    capacities = dict.fromkeys(range(4), 446) | dict.fromkeys(range(4, 7), 871) | {7: 1024}
    folder = system(tmp_path, {cpu: str(cpu) for cpu in range(8)}, capacities=capacities)
    assert count(range(8), folder) == 4


def test_a_cpuset_counts_the_cores_it_touches(tmp_path: Path) -> None:
    folder = system(tmp_path, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert count({1, 5}, folder) == 1
    assert count({1, 2, 7}, folder) == 3


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
