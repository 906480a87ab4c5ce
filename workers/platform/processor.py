"""The processor: dtypes that it multiplies in hardware, its cores and their NUMA nodes. Torch-free.

A second hardware thread adds nothing to kernels that keep a core's arithmetic units or its memory port busy, and a
parallel loop with equal parts waits for its slowest core. So physical cores are counted, without efficiency cores.
"""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Processor:
    """16-bit dtypes for which the processor has instructions. Libraries emulate the others in float32."""

    bfloat16: bool
    float16: bool
    name: str  # missing features, as a phrase for messages

    def multiplies(self, dtype: str) -> bool:
        """Return whether matmuls of `dtype` (named as in settings) are not emulated."""
        return {"bfloat16": self.bfloat16, "float16": self.float16}.get(dtype, True)


@cache
def here() -> Processor:
    """Return the processor of this machine."""
    return of(platform.machine(), features())


def of(machine: str, flags: frozenset[str]) -> Processor:
    """Return the processor of `machine` (as in `platform.machine()`) with the feature names `flags` of Linux."""
    if machine in _X86:
        bfloat16 = bool(flags & {"avx512_bf16", "amx_bf16"})
        return Processor(bfloat16, bool(flags & {"avx512_fp16", "amx_fp16"}), "no AVX512-BF16 or AMX")
    if machine in _ARM:
        return Processor("bf16" in flags, bool(flags & {"asimdhp", "fphp"}), "no BF16 extension")
    return Processor(False, False, f"it is {machine}")


def features() -> frozenset[str]:
    """Return the features of the first processor; empty if the system does not list them."""
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"], capture_output=True, text=True, check=False
        )
        return frozenset({"asimdhp", "fphp", *(["bf16"] if asked.stdout.strip() == "1" else [])})
    return frozenset(_first_of("flags", "Features").split())


def vendor() -> str:
    """Return the maker in the notation of x86 processors, such as `GenuineIntel`; empty if the system does not list
    it."""
    return _first_of("vendor_id")


def widens_faster(flags: frozenset[str], maker: str) -> bool:
    """Return whether a processor with AVX-512 multiplies bfloat16 faster in float32 than with AVX512-BF16.

    This is the case on Intel's cores since Sapphire Rapids, which are recognized by AVX512-FP16. Their fast bfloat16
    matmuls use AMX, which a virtual machine may hide, and `vdpbf16ps` completes fewer operations per second than FMA
    (docs/performance.md).
    """
    return maker == "GenuineIntel" and {"avx512_bf16", "avx512_fp16"} <= flags


def _first_of(*names: str) -> str:
    """Return the system's value for the first processor under any of these names; empty if there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # constants of Linux on x86-64


@cache
def may_use_tiles() -> bool:
    """Ask the kernel to let this process and all its threads use AMX's tile registers, and return whether it does.
    Needs Linux 5.16 or newer."""
    if sys.platform != "linux" or platform.machine() not in _X86:
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


_SYSTEM = Path("/sys/devices")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# Cores below this fraction of the largest capacity (ARM) or highest frequency are efficiency cores.
_LEAST_SHARE = 0.75
_MOST_CPUS = 1 << 16  # more than any machine has; a longer list is a mistake


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]  # its hardware threads that this process may use
    is_efficient: bool  # an efficiency core: slower, with low power
    node: int = 0  # NUMA node, whose memory is near


def allowed_cpus() -> set[int]:
    """Return the hardware threads that this thread may run on."""
    return set(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def available_cores() -> int:
    """Return the number of physical cores, without efficiency cores, within the affinity and the container's quota."""
    return within_quota(len(fast_cores(physical_cores(allowed_cpus()))))


def physical_cores(cpus: Collection[int], system: Path = _SYSTEM) -> list[Core]:
    """Return the cores that the hardware threads `cpus` belong to, ordered by first thread. Offline threads are left
    out.

    If the system has no topology information, each thread is its own core, on node 0.
    """
    cpus = sorted(_numbers(system / "system/cpu/online").intersection(cpus) or cpus)
    atoms = _numbers(system / "cpu_atom/cpus")  # Intel's hybrid processors
    speeds = {cpu: _speed(system / f"system/cpu/cpu{cpu}") for cpu in cpus}
    fastest = max(speeds.values(), default=0)
    nodes = _nodes(system / "system/node")
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        siblings = _numbers(system / f"system/cpu/cpu{cpu}/topology/thread_siblings_list") or {cpu}
        cores.setdefault(tuple(sorted(siblings)), []).append(cpu)
    return [
        Core(tuple(own), own[0] in atoms or speeds[own[0]] < _LEAST_SHARE * fastest, nodes.get(own[0], 0))
        for own in cores.values()
    ]


def fast_cores(cores: list[Core]) -> list[Core]:
    """Return the cores that are not efficiency cores, or all cores if there are no others."""
    return [core for core in cores if not core.is_efficient] or cores


def within_quota(cores: int, quota_file: Path = _QUOTA) -> int:
    """Return `cores`, or the number of whole cores that a container's CPU quota (cgroup v2) pays for; at least 1."""
    try:
        quota, period = quota_file.read_text().split()
    except (OSError, ValueError):  # no cgroup v2
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers of a list such as `0-3,8`. Raises `ValueError`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < _MOST_CPUS:
            raise ValueError(text)
        found.update(range(low, high + 1))
    return found


def is_present(cpu: int, system: Path = _SYSTEM) -> bool:
    """Return whether the machine has this hardware thread, which may be offline or not allowed for this process."""
    return (system / f"system/cpu/cpu{cpu}").exists()


def format_cpu_list(cpus: Collection[int]) -> str:
    """Return `0-3,8` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _speed(cpu: Path) -> int:
    """Return the relative speed of a core: its capacity, or else its highest frequency; 0 if both are unknown."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        try:
            return int((cpu / name).read_text())
        except (OSError, ValueError):
            continue
    return 0


def _nodes(folder: Path) -> dict[int, int]:
    """Return CPU -> its NUMA node; empty if the system lists none."""
    return {
        cpu: int(node.name.removeprefix("node"))
        for node in folder.glob("node[0-9]*")
        for cpu in _numbers(node / "cpulist")
    }


def _numbers(path: Path) -> set[int]:
    """Return the numbers that a file lists; empty if there is no such file."""
    try:
        return parse_cpu_list(path.read_text())
    except OSError:
        return set()
