"""Checks of the machine: processor, kernels, limits of this user, and the connection to other hosts.

python -m oarlock.workers.doctor.machine DESCRIPTOR RANK RANKS     # another rank of a measured all-reduce
"""

import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from oarlock.base.errors import StartupError
from oarlock.base.host_memory import free_host_bytes, human_bytes
from oarlock.base.python_child import start_python
from oarlock.workers.config import NodesConfig
from oarlock.workers.distributed.all_reduce import SharedMemoryGroup
from oarlock.workers.distributed.shm_layout import total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.doctor.finding import ERROR, NOTE, WARNING, Finding
from oarlock.workers.kernels.cpu import build
from oarlock.workers.kernels.cpu.build import KernelsUnavailable
from oarlock.workers.kernels.cpu.fused_layer import ALL_ARRIVED, all_reduce_of
from oarlock.workers.kernels.cpu.library import library
from oarlock.workers.node import check_network
from oarlock.workers.platform import processor
from oarlock.workers.platform.huge_pages import why_not as why_no_huge_pages
from oarlock.workers.platform.processor import allowed_cpus, fast_cores, format_cpu_list, physical_cores, within_quota
from oarlock.workers.ranks.nodes import own_interface

_LEAST_SHARED_MEMORY = 1 << 30  # NCCL's buffers of a few ranks; Docker gives a container 64 MiB
_LEAST_DISK = 2 << 30  # compiled kernels are small; a model fetched from the hub is not
_LEAST_FILES = 4096  # descriptors, including some dozens that are not connections


def cores() -> Finding:
    """Report the physical cores that ranks may use, and the cores that are left out."""
    every = physical_cores(allowed_cpus())
    fast = fast_cores(every)
    paid = within_quota(len(fast))
    nodes = sorted({core.node for core in every})
    text = f"{paid} cores for the ranks: CPUs {format_cpu_list([cpu for core in fast for cpu in core.cpus])}"
    left_out = []
    if len(every) > len(fast):
        left_out.append(f"{len(every) - len(fast)} efficiency cores are not used")
    if len(nodes) > 1:
        left_out.append(f"{len(nodes)} NUMA nodes: a rank stays on one")
    facts = {"cores": paid, "physical": len(every), "efficiency": len(every) - len(fast), "numa_nodes": len(nodes)}
    text = "; ".join([text, *left_out])
    if paid < len(fast):
        quota = f"{text}; a CPU quota allows {paid} of {len(fast)} cores, so ranks cannot be pinned"
        return Finding("cores", quota, WARNING, "Raise the container's CPU quota, or use a cpuset in its place.", facts)
    return Finding("cores", text, facts=facts)


def memory() -> Finding:
    """Report the free memory, within the limits of containers and of this user."""
    free, total = free_host_bytes(), psutil.virtual_memory().total
    text = f"{human_bytes(free)} free of {human_bytes(total)}"
    facts = {"free_bytes": free, "total_bytes": total}
    if psutil.swap_memory().used > 1 << 30:
        text += f"; {human_bytes(psutil.swap_memory().used)} is swapped out"
        return Finding(
            "memory", text, WARNING, "Free memory before serving: weights that are swapped out stall.", facts
        )
    return Finding("memory", text, facts=facts)


def huge_pages() -> Finding:
    reason = why_no_huge_pages()
    if reason is None:
        return Finding("huge pages", "used for weights and KV pages")
    setting = "/sys/kernel/mm/transparent_hugepage/enabled"
    fix = f"As root: echo madvise > {setting}"
    return Finding("huge pages", f"not used: {reason}; reading weights causes more TLB misses", WARNING, fix)


def shared_memory(folder: Path = Path("/dev/shm"), *, ranks: int = 1, device: str = "cpu") -> Finding:
    """Report /dev/shm, which NCCL uses. The engine and CPU ranks share anonymous memory, which it does not limit."""
    if not folder.is_dir():
        return Finding("/dev/shm", "none; ranks on CPUs use anonymous memory instead", NOTE)
    size = shutil.disk_usage(folder).total
    facts = {"bytes": size}
    if device == "cuda" and ranks > 1 and size < _LEAST_SHARED_MEMORY:
        text = f"{human_bytes(size)}, and NCCL's buffers of {ranks} ranks may not fit"
        return Finding("/dev/shm", text, WARNING, "docker run --shm-size 2g (docker-compose.yml: shm_size).", facts)
    return Finding("/dev/shm", human_bytes(size), facts=facts)


def locked_memory(*, device: str) -> Finding:
    """Report the limit of pinned memory, which is used for copies to a GPU."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    text = "no limit" if unlimited else f"at most {human_bytes(limit)}"
    facts = {"bytes": None if unlimited else limit}
    if device == "cuda" and not unlimited and limit < 64 << 20:
        fix = "ulimit -l unlimited (docker-compose.yml: ulimits: memlock: -1)."
        return Finding("locked memory", f"{text}; network transports of NCCL may refuse it", WARNING, fix, facts)
    return Finding("locked memory", text, facts=facts)


def open_files() -> Finding:
    """Report the limit of open files: each connection of a client takes a descriptor."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"limit": limit}
    if limit != resource.RLIM_INFINITY and limit < _LEAST_FILES:
        more = _LEAST_FILES if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        text = f"at most {limit}, and each connection needs one"
        return Finding("open files", text, WARNING, f"ulimit -n {max(more, limit)}", facts)
    return Finding("open files", f"at most {limit}", facts=facts)


def disk(check: str, folder: Path) -> Finding:
    """Report whether a cache can be written, and the free space on its disk."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{folder} cannot be written"
        return Finding(
            check, text, WARNING, "Give this user the directory, or set XDG_CACHE_HOME (HF_HOME) to another."
        )
    free = shutil.disk_usage(existing).free
    facts = {"path": str(folder), "free_bytes": free}
    if free < _LEAST_DISK:
        text = f"{human_bytes(free)} free in {folder}"
        return Finding(check, text, WARNING, "Free some space, or set XDG_CACHE_HOME (HF_HOME) to another disk.", facts)
    return Finding(check, f"{human_bytes(free)} free in {folder}", facts=facts)


def port(host: str, number: int) -> Finding:
    """Report whether a server could listen there now."""
    check = f"port {number}"
    try:
        family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, number), family=family):
            return Finding(check, f"free on {host}")
    except OSError as error:
        fix = f"Use another: --port {number + 1 if number < 65_535 else 8000}, or stop what listens there."
        return Finding(check, f"cannot be used on {host}: {error.strerror or error}", ERROR, fix)


def level() -> Finding:
    """Report the ISA level in use, and the better levels that this processor lacks."""
    try:
        chosen = build.chosen()
    except StartupError as error:
        return Finding("CPU level", error.cause, ERROR, error.fix)
    if chosen is None:
        text = f"{platform.machine()} has no ISA level that the kernels support: torch's operations are used"
        fix = "Use a processor with AVX2, AVX-512 or NEON, or a GPU."
        return Finding("CPU level", text, WARNING, fix)
    lacking = [
        f"{better.name} ({build.why_not_better(better)})"
        for better in build.LEVELS[: build.LEVELS.index(chosen)]
        if better.machine == chosen.machine
    ]
    used = ", ".join(dict.fromkeys(filter(None, (chosen.vectors, chosen.bfloat16, chosen.tiles))))
    text = f"{chosen.name}: {used}" + (f"; not {', '.join(lacking)}" if lacking else "")
    if chosen not in build.available()[:1]:
        best = build.available()[0].name
        text = f"{chosen.name}: {used}; {build.ENVIRONMENT} names it, and this processor has {best}"
        return Finding("CPU level", text, WARNING, f"Unset {build.ENVIRONMENT}.", {"level": chosen.name})
    return Finding("CPU level", text, facts={"level": chosen.name, "lacking": lacking})


def number_types() -> Finding:
    """Report the 16-bit dtypes that the processor multiplies; others are widened to float32 as they are read."""
    cpu = processor.here()
    native = [name for name in ("bfloat16", "float16") if cpu.multiplies(name)]
    if native:
        return Finding("16-bit types", f"{' and '.join(native)} in hardware", facts={"native": native})
    text = f"{cpu.name}: 16-bit weights are widened when they are read, and matmuls compute in float32"
    return Finding("16-bit types", text, NOTE, facts={"native": native})


def compiler() -> Finding:
    """Report the C++ compiler, and whether the kernels exist already."""
    chosen = build.chosen()
    if chosen is None:
        return Finding("kernels", "none for this processor", NOTE)
    reason = build.why_not_obtainable(chosen)
    if reason is not None:
        fix = "Install g++ (apt install g++), or a wheel of `make wheel`, which has them."
        return Finding("kernels", f"{reason}; torch's slower operations are used", WARNING, fix)
    if build.prebuilt(chosen).exists():
        return Finding("kernels", "came with the installation", facts={"ready": True})
    found = build.compiler()
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[
        0
    ]
    ready = [name for name in ("bfloat16", "float16", "float32") if _is_compiled(build.of_one_type(chosen, name))]
    if build.existing(chosen) is not None:
        ready = ["all types"]
    done = f"compiled for {', '.join(ready)}" if ready else "to be compiled by the first start: about a minute"
    facts = {"compiler": found, "version": version, "ready": bool(ready)}
    return Finding("kernels", f"{done}; compiler {version or found}", facts=facts)


def _is_compiled(level: build.ISALevel) -> bool:
    return build.existing(level) is not None


def cache() -> Path | None:
    """Return the directory of compiled kernels; None if there can be none."""
    try:
        return build.cache_directory()
    except KernelsUnavailable:
        return None


def reachable(nodes: NodesConfig) -> Finding:
    """Report the interface towards the other hosts; on the head, whether it can listen there."""
    try:
        check_network(nodes, lambda *progress: None)
        own = own_interface(nodes)
    except StartupError as error:
        return wrong_nodes(error.cause, error.fix)
    role = "the head" if nodes.node_rank == 0 else f"which joins {nodes.address}, port {nodes.port}"
    text = f"node {nodes.node_rank} of {nodes.nnodes}, {role}, through {own.name} ({own.address})"
    facts = {"node_rank": nodes.node_rank, "nnodes": nodes.nnodes, "interface": own.name, "address": own.address}
    return Finding("hosts", text, facts=facts)


def wrong_nodes(cause: str, fix: str) -> Finding:
    """Report that the settings of several hosts are incomplete, or do not fit this host."""
    return Finding("hosts", cause, ERROR, fix)


_READ_BYTES = 1 << 30  # more than any cache holds
_PASSES = 7
_SUMS = 300  # all-reduces of one size in one round
_ROUNDS = 9
_TIMEOUT_S = 60.0  # includes the start of a rank
_SIZES = (4 << 10, 16 << 10, 64 << 10, 1 << 20)  # bytes of float32


def memory_speed() -> Finding:
    """Measure reading memory once from start to end with all threads. It bounds the speed of a decode step."""
    memory = torch.ones(_READ_BYTES // 8, dtype=torch.float64)
    best = 0.0
    for _ in range(_PASSES):
        started = time.perf_counter()
        memory.sum()
        best = max(best, _READ_BYTES / (time.perf_counter() - started))
    text = f"{best / 1e9:.1f} GB/s read by {torch.get_num_threads()} threads, the best of {_PASSES} passes"
    return Finding("memory speed", text, facts={"bytes_per_s": best, "threads": torch.get_num_threads()})


def all_reduce_time(ranks: int) -> Finding:
    """Measure the microseconds of an all-reduce over `ranks` processes in shared memory, by size. Every layer has
    two."""
    library()  # compiled before a rank waits for another
    memory_fd = anonymous_memory(total_bytes(ranks, max(_SIZES)))
    module = "oarlock.workers.doctor.machine"
    peers = [
        start_python(["-m", module, str(memory_fd), str(rank), str(ranks)], pass_fds=[memory_fd])
        for rank in range(1, ranks)
    ]
    try:
        found = _times(memory_fd, 0, ranks)
        for peer in peers:
            peer.wait(_TIMEOUT_S)
    finally:
        for peer in peers:
            peer.kill()
    parts = [f"{size >> 10} KiB {seconds * 1e6:.0f} us" for size, seconds in found.items()]
    text = f"{', '.join(parts)}, over {ranks} ranks in shared memory"
    return Finding("all-reduce", text, facts={"seconds_by_bytes": {str(size): found[size] for size in found}})


def _times(memory_fd: int, rank: int, ranks: int) -> dict[int, float]:
    """Return bytes -> seconds of an all-reduce, measured by one rank: the median over rounds of each round's mean."""
    torch.set_num_threads(1)
    group = SharedMemoryGroup(memory_fd, rank, ranks, max(_SIZES), timeout_s=_TIMEOUT_S)
    add = all_reduce_of(library())
    found = {}
    for size in _SIZES:
        x = torch.zeros(size // 4)
        means = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            for _ in range(_SUMS):
                missing = add(group.address, x.data_ptr(), len(x))
                if missing != ALL_ARRIVED:
                    raise group.lost(missing)
            means.append((time.perf_counter() - started) / _SUMS)
        found[size] = statistics.median(means[1:])
    return found


if __name__ == "__main__":
    _times(*map(int, sys.argv[1:]))
