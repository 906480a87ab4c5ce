"""The machine of a plan: GPUs with the values of their data sheets, or a CPU whose memory is measured in a moment."""

import argparse
import os
import re
import threading
import time
from dataclasses import dataclass

from oarlock.base.host_memory import free_host_bytes, human_bytes
from oarlock.server.cli.arguments import UsageError
from oarlock.server.config.options import nearest, parse_size
from oarlock.workers.capacity import Memory

_FIX = "Write a number and a name or a size, such as --gpus 2xH100 or --gpus 2x24GB"
_MOST = 64  # GPUs
_NVLINK_SUM_S, _PCIE_SUM_S = 12e-6, 25e-6  # all-reduce of almost no data, over a few devices
_READ_BYTES = 96 << 20  # bytes that each measuring thread reads, more than caches hold
_PASSES = 6
_CPU_SUM_S = 6e-6  # all-reduce in shared memory


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. Sizes in bytes, speeds per second; None: not known."""

    name: str
    memory: int  # bytes reported by the driver
    bandwidth: float | None
    ops: float | None  # operations of dense 16-bit matmuls
    link: float  # bandwidth to one other device, in one direction

    @property
    def sum_s(self) -> float:
        return _NVLINK_SUM_S if self.link > _PCIE else _PCIE_SUM_S


_PCIE = 25e9  # bytes: 16 lanes of generation 4


def _gpu(name: str, memory_mib: int, gb_per_s: float, tflops: float, link_gb_per_s: float = 25) -> Gpu:
    return Gpu(name, memory_mib << 20, gb_per_s * 1e9, tflops * 1e12, link_gb_per_s * 1e9)


# Memory in MiB, GB/s, TFLOP/s of dense bfloat16 (float16 if it is not supported), GB/s to another device.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 183_359, 8000, 2250, 900),
        _gpu("H200", 143_771, 4800, 989, 450),
        _gpu("GH200", 97_871, 4000, 989, 450),
        _gpu("H100", 81_559, 3350, 989, 450),
        _gpu("H100-PCIe", 81_559, 2000, 756),
        _gpu("H100-NVL", 95_830, 3938, 835, 300),
        _gpu("A100-80GB", 81_920, 2039, 312, 300),
        _gpu("A100-40GB", 40_960, 1555, 312, 300),
        _gpu("A100-PCIe-80GB", 81_920, 1935, 312),
        _gpu("L40S", 46_068, 864, 362),
        _gpu("L40", 46_068, 864, 181),
        _gpu("L4", 23_034, 300, 121),
        _gpu("A40", 46_068, 696, 150),
        _gpu("A30", 24_576, 933, 165),
        _gpu("A10", 23_028, 600, 125),
        _gpu("A10G", 23_028, 600, 70),
        _gpu("T4", 15_360, 320, 65),
        _gpu("V100-16GB", 16_384, 900, 125, 150),
        _gpu("V100-32GB", 32_768, 900, 125, 150),
        _gpu("RTX-PRO-6000", 97_887, 1792, 500, 50),
        _gpu("RTX-6000-Ada", 49_140, 960, 364),
        _gpu("A6000", 49_140, 768, 155, 56),
        _gpu("5090", 32_607, 1792, 210, 50),
        _gpu("5080", 16_303, 960, 113, 50),
        _gpu("4090", 24_564, 1008, 165),
        _gpu("4080", 16_376, 717, 97),
        _gpu("3090", 24_576, 936, 71),
        _gpu("3080", 10_240, 760, 60),
    )
}
_SPOKEN = {"a100": "A100-80GB", "h100-sxm": "H100", "v100": "V100-16GB", "a100-sxm-80gb": "A100-80GB"}


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Parse `2xH100`, `4090` or `2x24GB`: the number of GPUs, and their kind. Raises `UsageError`."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?(\S.*?)\s*", text)
    if match is None:
        raise UsageError("--gpus is empty.", f"{_FIX}.")
    count, kind = int(match[1] or 1), match[2]
    if not 1 <= count <= _MOST:
        raise UsageError(f"--gpus {text}: {count} is not a number of GPUs from 1 to {_MOST}.", f"{_FIX}.")
    if re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B", kind, re.IGNORECASE):
        return count, Gpu(kind, parse_size(kind), None, None, _PCIE)
    found = _named(kind)
    if found is None:
        near = nearest(_plain(kind), [_plain(name) for name in GPUS])
        hint = next((f" Did you mean {name}?" for name in GPUS if near and _plain(name) == near), "")
        raise UsageError(
            f"--gpus {text}: no GPU is known by the name {kind!r}.{hint}",
            f"{_FIX}, with --bandwidth for one that is not among {', '.join(GPUS)}.",
        )
    return count, found


def _named(kind: str) -> Gpu | None:
    plain = _plain(kind)
    for name, gpu in GPUS.items():
        if _plain(name) == plain:
            return gpu
    return next((GPUS[name] for spoken, name in _SPOKEN.items() if _plain(spoken) == plain), None)


def _plain(name: str) -> str:
    """Return the name of a GPU in lower case, without white space, dashes and the brand before it."""
    name = re.sub(r"[\s_-]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|tesla)*(rtx(?=\d{4}$))?", "", name)


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine of a plan. `bandwidth`, `ops`: of one device, or of the host; per second; None: not known."""

    text: str
    memory: Memory
    count: int  # devices; 1 for a CPU
    bandwidth: float | None
    ops: float | None  # None on a CPU: depends on the dtype of the model's computations
    link: float
    sum_s: float


def machine_of(arguments: argparse.Namespace, *, has_vectors: bool = False) -> Machine:
    """Return the machine that the flags describe. `has_vectors`: whether the model returns vectors. Raises
    `UsageError`."""
    memory, bandwidth = _size(arguments.memory, "--memory", "24GB"), _size(arguments.bandwidth, "--bandwidth", "1008GB")
    ops = _tflops(arguments.tflops)
    if arguments.gpus is not None and arguments.cpu:
        raise UsageError("--gpus and --cpu exclude one another.", "Give one of them.")
    if arguments.gpus is not None:
        count, gpu = parse_gpus(arguments.gpus)
        memory, speed = memory or gpu.memory, bandwidth or gpu.bandwidth
        rate = f"{speed / 1e9:,.0f} GB/s" if speed else "a bandwidth that is not known"
        text = f"{count} x {gpu.name}: {human_bytes(memory)} and {rate} each"
        return Machine(text, Memory("cuda", memory, has_vectors), count, speed, ops or gpu.ops, gpu.link, gpu.sum_s)
    is_measured = bandwidth is None
    speed = bandwidth or measured_bandwidth()
    total = memory or free_host_bytes()
    free = "" if memory else " free"
    how = "measured" if is_measured else "given"
    text = f"CPU: {human_bytes(total)} of memory{free}, read at {speed / 1e9:,.1f} GB/s ({how})"
    return Machine(text, Memory("cpu", total, has_vectors), 1, speed, ops, 0.0, _CPU_SUM_S)


def measured_bandwidth() -> float:
    """Return the bytes per second that all cores read together: the best of a few passes, in a fraction of a second."""
    import numpy as np

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [np.ones(_READ_BYTES // 8, np.uint64) for _ in range(threads)]

    def read() -> float:
        readers = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
        begun = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return threads * _READ_BYTES / (time.perf_counter() - begun)

    return max(read() for _ in range(_PASSES))


def _size(text: str | None, flag: str, example: str) -> int | None:
    if text is None:
        return None
    try:
        size = parse_size(re.sub(r"/s(ec)?$", "", text))
    except ValueError:
        size = 0
    if size <= 0:
        raise UsageError(f"{flag} is {text!r}, which is no size above 0.", f"For example: {flag} {example}.")
    return size


def _tflops(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UsageError(f"--tflops is {text!r}, which is no number above 0.", "For example: --tflops 165.")
    return 1e12 * value
