"""The processor cores that ranks and their threads can share, as Linux describes them in /sys. Torch-free.

A second hardware thread of a core adds nothing to kernels that keep a core's arithmetic or its memory port busy, and a
parallel loop with equal parts waits for its slowest core: so physical cores are counted, and efficiency cores are not.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# On processors that state capacities (ARM): cores with less than this share of the largest are efficiency cores.
_LEAST_CAPACITY = 0.75


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]  # its hardware threads that this process may use
    is_efficient: bool  # slower, for little power


def available_cores() -> int:
    """Physical cores this process may use, without efficiency cores: by its affinity and its container's quota."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return within_quota(len(fast_cores(physical_cores(cpus))))


def physical_cores(cpus: Collection[int], system: Path = _SYSTEM) -> list[Core]:
    """The cores that the hardware threads `cpus` belong to. Where the system says nothing, each is its own core."""
    atoms = _numbers(system / "cpu_atom/cpus")  # Intel's hybrid processors
    capacities = {cpu: _capacity(system, cpu) for cpu in cpus}
    largest = max(capacities.values(), default=0)
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(cpus):
        siblings = _numbers(system / f"system/cpu/cpu{cpu}/topology/thread_siblings_list") or {cpu}
        cores.setdefault(tuple(sorted(siblings)), []).append(cpu)
    return [
        Core(tuple(own), own[0] in atoms or capacities[own[0]] < _LEAST_CAPACITY * largest) for own in cores.values()
    ]


def fast_cores(cores: list[Core]) -> list[Core]:
    """Those that are not efficiency cores; all, if there are no others."""
    return [core for core in cores if not core.is_efficient] or cores


def within_quota(cores: int, quota_file: Path = _QUOTA) -> int:
    """`cores`, or as many whole ones as the CPU quota of a container (cgroup v2) pays for; at least one."""
    try:
        quota, period = quota_file.read_text().split()
    except (OSError, ValueError):  # no cgroup v2
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _capacity(system: Path, cpu: int) -> int:
    """The relative speed of a core, at most 1024; 0 where it is not stated."""
    try:
        return int((system / f"system/cpu/cpu{cpu}/cpu_capacity").read_text())
    except (OSError, ValueError):
        return 0


def _numbers(path: Path) -> set[int]:
    """The numbers of a list such as `0-3,8`; empty if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
