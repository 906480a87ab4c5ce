"""How much memory this process can still have, and numbers of bytes as people read them. Torch-free."""

import resource
import sys
from pathlib import Path

import psutil

_CGROUP_FILES = (  # limit, usage: version 2, then version 1
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def human_bytes(count: int) -> str:
    """`count` in the largest binary unit that keeps it at 1 or more."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def free_host_bytes(cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Memory this process can still have: what the machine has, or what its control groups leave, if that is less."""
    free = min(psutil.virtual_memory().available, _free_addresses())
    for directory in _cgroup_directories(cgroup_root, membership):
        for limit_name, usage_name in _CGROUP_FILES:
            limit, usage = _number(directory / limit_name), _number(directory / usage_name)
            if limit is not None and usage is not None:
                free = min(free, max(0, limit - usage + _reclaimable(directory)))
    return free


def _free_addresses() -> int:
    """What a limit on this process's address space (`ulimit -v`) leaves of it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def _cgroup_directories(root: Path, membership: Path) -> list[Path]:
    """This process's groups and their parents: each of them limits. Empty where there are no control groups."""
    if not membership.is_file():
        return []
    directories = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        # Inside a container the named path may lie outside what is mounted; the mount's root is then our own group.
        group = base / path.lstrip("/")
        directories += [base, *(p for p in (group, *group.parents) if base in p.parents and p.is_dir())]
    return directories


def _number(path: Path) -> int | None:
    """The integer in `path`; None if the file is missing or says "max"."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def _reclaimable(directory: Path) -> int:
    """File cache counted as used by a group, which the kernel gives up when memory is wanted."""
    path = directory / "memory.stat"
    if not path.is_file():
        return 0
    pairs = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", 0)))
