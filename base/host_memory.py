"""Free memory of this process in bytes, and the formatting of byte counts."""

import resource
import sys
from pathlib import Path

from oarlock.base.process_memory import memory_use

_CGROUP_FILES = (  # limit, usage: version 2, then version 1
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def human_bytes(count: int) -> str:
    """Format `count` in the largest binary unit that keeps the value at 1 or more."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def free_host_bytes(cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes that this process can still allocate: the machine's free memory, or less if cgroups or `ulimit
    -v` limit it."""
    free = min(_available(), _free_addresses())
    for directory in _cgroup_directories(cgroup_root, membership):
        for limit_name, usage_name in _CGROUP_FILES:
            limit, usage = _number(directory / limit_name), _number(directory / usage_name)
            if limit is not None and usage is not None:
                free = min(free, max(0, limit - usage + _reclaimable(directory)))
    return free


def _available() -> int:
    """Return the bytes that the kernel can provide without swapping."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _free_addresses() -> int:
    """Return the bytes of address space that `ulimit -v` leaves to this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - memory_use().mapped)


def _cgroup_directories(root: Path, membership: Path) -> list[Path]:
    """Return this process's cgroups and their parents, each of which may have a limit. Empty without cgroups."""
    if not membership.is_file():
        return []
    directories = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        # In a container the path may be outside the mount; then the root of the mount is this process's cgroup.
        group = base / path.lstrip("/")
        directories += [base, *(p for p in (group, *group.parents) if base in p.parents and p.is_dir())]
    return directories


def _number(path: Path) -> int | None:
    """Return the integer in `path`; None if the file is missing or contains "max"."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def _reclaimable(directory: Path) -> int:
    """Return the bytes of file cache that count as used by a cgroup, but that the kernel frees under memory
    pressure."""
    path = directory / "memory.stat"
    if not path.is_file():
        return 0
    pairs = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", 0)))
