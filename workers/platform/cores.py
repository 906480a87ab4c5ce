"""The number of processor cores that ranks and their threads can share."""

import os
from pathlib import Path


def available_cores() -> int:
    """Cores this process may use: its affinity, or less under a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # no cgroup v2
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
