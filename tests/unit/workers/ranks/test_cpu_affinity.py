"""Every rank gets physical cores of one NUMA node; what an operator asks for is obeyed, or refused with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.platform.processor import allowed_cpus, physical_cores
from oarlock.workers.ranks.cpu_affinity import check_affinity, plan_cpus, ranks_share_cores, with_cpus
from tests.unit.workers.made_up_system import make_system, pairs

# Two sockets of 8 cores with two threads each, numbered as Linux does: first all first threads, then all second ones.
SOCKETS = {cpu: f"{cpu % 16},{cpu % 16 + 16}" for cpu in range(32)}
NODES = {0: "0-7,16-23", 1: "8-15,24-31"}


@pytest.mark.parametrize(
    ("ranks", "threads", "affinity"),
    [
        (1, 8, "0-7"),  # one node only: the other's memory is far
        (2, 8, "0-7|8-15"),
        (3, 4, "0-3|4-7|8-15"),
        (4, 4, "0-3|4-7|8-11|12-15"),
        (16, 1, "|".join(map(str, range(16)))),
    ],
)
def test_ranks_on_two_sockets(tmp_path: Path, ranks: int, threads: int, affinity: str) -> None:
    cores = physical_cores(range(32), make_system(tmp_path, SOCKETS, nodes=NODES))
    plan = plan_cpus(cores, ranks)
    assert (plan.threads, plan.affinity, plan.reason) == (threads, affinity, "")


def test_fewer_threads_than_cores_may_use_all_of_the_share(tmp_path: Path) -> None:
    cores = physical_cores(range(32), make_system(tmp_path, SOCKETS, nodes=NODES))
    plan = plan_cpus(cores, 2, num_threads=5)
    assert (plan.threads, plan.affinity) == (5, "0-7|8-15")


def test_ranks_go_where_their_share_is_largest(tmp_path: Path) -> None:
    """A container that may use one core of the first node and six of the second."""
    cores = physical_cores({0, *range(8, 14)}, make_system(tmp_path, SOCKETS, nodes=NODES))
    assert plan_cpus(cores, 1).affinity == "8-13"
    assert plan_cpus(cores, 2).affinity == "8-10|11-13"


@pytest.mark.parametrize(
    ("ranks", "num_threads", "paid", "threads", "reason"),
    [
        (17, None, None, 1, "17 ranks share 16 cores"),
        (1, 12, None, 12, "a rank has 12 threads, and its share of one NUMA node is 8 cores"),
        (2, None, 3, 1, "a CPU quota allows 3 of 16 cores, which other programs use as well"),
        (1, None, 3, 3, "a CPU quota allows 3 of 16 cores, which other programs use as well"),
        (1, 2, 3, 2, "a CPU quota allows 3 of 16 cores, which other programs use as well"),
    ],
)
def test_threads_are_not_pinned_if_it_would_hurt(
    tmp_path: Path, ranks: int, num_threads: int | None, paid: int | None, threads: int, reason: str
) -> None:
    cores = physical_cores(range(32), make_system(tmp_path, SOCKETS, nodes=NODES))
    plan = plan_cpus(cores, ranks, num_threads, paid)
    assert (plan.threads, plan.affinity, plan.reason) == (threads, "none", reason)


def test_three_of_64_cpus(tmp_path: Path) -> None:
    folder = make_system(tmp_path, {cpu: f"{cpu % 32},{cpu % 32 + 32}" for cpu in range(64)}, nodes={0: "0-63"})
    assert plan_cpus(physical_cores({5, 6, 37}, folder), 1).affinity == "5-6"  # 37 is the second thread of 5


def test_a_hybrid_laptop_computes_on_its_performance_cores(tmp_path: Path) -> None:
    folder = make_system(tmp_path, pairs(4) | {cpu: str(cpu) for cpu in range(8, 16)}, atoms="8-15", nodes={0: "0-15"})
    plan = plan_cpus(physical_cores(range(16), folder), 1)
    assert (plan.threads, plan.affinity) == (4, "0,2,4,6")


def test_a_phone_computes_on_its_large_cores(tmp_path: Path) -> None:
    speeds = dict.fromkeys(range(4), 446) | dict.fromkeys(range(4, 8), 1024)
    folder = make_system(tmp_path, {cpu: str(cpu) for cpu in range(8)}, speeds=speeds)
    assert plan_cpus(physical_cores(range(8), folder), 2).affinity == "4-5|6-7"


@pytest.mark.parametrize("siblings", [{cpu: str(cpu) for cpu in range(4)}, dict.fromkeys(range(4), "")])
def test_without_folders_of_nodes_and_topology_all_cpus_are_cores_of_one_node(tmp_path: Path, siblings: dict) -> None:
    cores = physical_cores(range(4), make_system(tmp_path, siblings))
    assert plan_cpus(cores, 1).affinity == "0-3"


def test_ranks_that_take_every_cpu_share_those_of_their_node(tmp_path: Path) -> None:
    """Where a CPU is left for other programs, each rank has its own."""
    folder = make_system(tmp_path, {cpu: str(cpu) for cpu in range(8)}, nodes={0: "0-3", 1: "4-7"})
    cores = physical_cores(range(8), folder)
    plan = plan_cpus(cores, 4)
    assert (plan.threads, plan.affinity) == (2, "0-3|0-3|4-7|4-7")
    assert plan_cpus(cores, 4, num_threads=1).affinity == "0-1|2-3|4-5|6-7"
    assert plan_cpus(cores, 3).affinity == "0-1|2-3|4-7"


def test_offline_cpus_are_left_out(tmp_path: Path) -> None:
    folder = make_system(tmp_path, {cpu: str(cpu) for cpu in range(4)}, online="0,2-3", nodes={0: "0-3"})
    assert plan_cpus(physical_cores(range(4), folder), 1).affinity == "0,2-3"


def config(affinity: str, ranks: int = 1, **changes: object) -> WorkerConfig:
    return WorkerConfig("model", tensor_parallel_size=ranks, cpu_affinity=affinity).with_(**changes)


def test_auto_is_decided_for_this_machine() -> None:
    decided = with_cpus(config("auto"), "cpu")
    assert decided.num_threads and decided.cpu_affinity != "auto"
    assert with_cpus(decided, "cpu") == decided
    assert with_cpus(config("auto"), "cuda").cpu_affinity == "none"


def test_threads_bound_by_openmp_are_left_alone(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("OMP_PLACES", "cores")
    with caplog.at_level("INFO", "oarlock"):
        assert with_cpus(config("auto"), "cpu").cpu_affinity == "none"
    assert "OMP_PLACES is set" in caplog.text


def test_a_list_is_obeyed() -> None:
    mine = str(min(allowed_cpus()))
    check_affinity(config(mine))
    assert with_cpus(config(mine), "cpu") == config(mine, num_threads=1)
    both = with_cpus(config(f"{mine}|{mine}", 2), "cpu")
    assert both.num_threads == 1 and ranks_share_cores(both)


@pytest.mark.parametrize(
    ("affinity", "ranks", "changes", "cause"),
    [
        ("all", 1, {}, r"'all', which is not a list of CPUs"),
        ("0-", 1, {}, r"not a list of CPUs"),
        ("0||0", 3, {}, r"not a list of CPUs"),
        ("0", 2, {}, r"has 1 list\(s\) of CPUs, and there are 2 rank\(s\)"),
        ("0|0", 1, {}, r"has 2 list\(s\) of CPUs, and there are 1 rank\(s\)"),
        ("60000", 1, {}, r"CPU 60000, which this machine does not have"),
        (str(min(allowed_cpus())), 1, {"num_threads": 2}, r"--num-threads 2 is more than the 1 CPU\(s\)"),
    ],
)
def test_a_wrong_list_is_refused(affinity: str, ranks: int, changes: dict, cause: str) -> None:
    with pytest.raises(StartupError, match=cause) as error:
        check_affinity(config(affinity, ranks, **changes))
    assert "\n" not in error.value.cause + error.value.fix


def test_a_cpu_that_this_process_may_not_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = min(allowed_cpus())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {mine + 1})
    with pytest.raises(StartupError, match=f"CPU {mine}, which this process may not use") as error:
        check_affinity(config(str(mine)))
    assert error.value.fix.startswith(f"Choose among {mine + 1}, or allow it more")


COUNT_PINNED = """
import logging, os, sys, torch
from pathlib import Path
from oarlock.workers.config import WorkerConfig
from oarlock.workers.ranks.cpu_affinity import use_cpus
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
before = set(os.listdir("/proc/self/task"))
use_cpus(WorkerConfig("model", device="cpu", cpu_affinity=sys.argv[1]), 0)
torch.set_num_threads(3)  # more than it has CPUs: all of them must be on this one
x = torch.rand(512, 512)
x @ x
x.exp()
started = set(os.listdir("/proc/self/task")) - before
assert len(started) >= 2, started
for task in {str(os.getpid()), *started}:
    lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    print(next(line for line in lines if line.startswith("Cpus_allowed_list")).split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and affinity are Linux's")
@pytest.mark.slow
def test_threads_of_torch_are_pinned_with_the_one_that_starts_them() -> None:
    last = max(allowed_cpus())
    command = [sys.executable, "-c", COUNT_PINNED, str(last)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert output[0].startswith(f"event=cpu_affinity pinned=true cpus={last} numa_nodes=")
    assert len(output) >= 4 and set(output[1:]) == {str(last)}
