"""NVIDIA's driver, the CUDA version of torch, and the requirements of Triton, without importing torch or Triton, which
takes seconds.

A program built for CUDA M.n runs on every driver that supports CUDA M.0 or later ("minor version compatibility" in
NVIDIA's guide to CUDA compatibility), so only the major version decides.

A torch that was built for ROCm calls AMD's devices `cuda` as well; its HIP library has the functions of CUDA's driver
under other names. Here it is asked only for the number of devices. ROCm has not been tried on a device.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import sysconfig
from pathlib import Path

# CUDA's major version -> the oldest Linux driver for it, from the release notes of the CUDA toolkit.
LEAST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def driver_version() -> str | None:
    """Return the newest CUDA version that the driver supports, as `12.8`; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def built_for(platform: str = "cuda") -> str | None:
    """Return the version of CUDA, or of `hip`, that the installed torch was built for, as `13.0`; None for another
    build."""
    for folder in _torch_folders():
        version = folder / "version.py"
        text = version.read_text("utf-8") if version.exists() else ""
        found = re.search(rf"^{platform}\b.*= *'([\d.]+)", text, re.M)
        if found is not None:
            return found[1]
    return None


def _torch_folders() -> list[Path]:
    torch = importlib.util.find_spec("torch")
    return [Path(folder) for folder in (torch.submodule_search_locations or [] if torch is not None else [])]


def why_too_old(driver: str, built: str) -> tuple[str, str] | None:
    """Return cause and fix, as phrases, if a driver for CUDA `driver` cannot run a torch for CUDA `built`; else
    None."""
    supported, needed = (int(version.split(".")[0]) for version in (driver, built))
    if supported >= needed:
        return None
    least = LEAST_DRIVERS.get(needed)
    newer = f"version {least} or later" if least is not None else f"one that supports CUDA {needed}"
    return (
        f"NVIDIA's driver supports CUDA {driver}, and the installed torch is built for CUDA {built}",
        f"Update the driver to {newer}, install torch's build for CUDA {supported}, or use --device cpu.",
    )


def device_count() -> int:
    """Return the number of devices that the driver offers and the installed torch can use; 0 without driver, device or
    a torch build for it."""
    for folder in _torch_folders():
        if (folder / "lib" / "libtorch_cuda.so").exists():
            return _counted("libcuda.so.1", "cuInit", "cuDeviceGetCount")
        if (folder / "lib" / "libtorch_hip.so").exists():
            bundled = folder / "lib" / "libamdhip64.so"
            return _counted(str(bundled) if bundled.exists() else "libamdhip64.so", "hipInit", "hipGetDeviceCount")
    return 0


def _counted(library: str, begin: str, count_devices: str) -> int:
    try:
        driver = ctypes.CDLL(library)
    except OSError:  # no driver on this machine
        return 0
    count = ctypes.c_int(0)
    if driver[begin](0) != 0 or driver[count_devices](ctypes.byref(count)) != 0:
        return 0
    return count.value


def lowest_capability(count: int) -> tuple[int, int]:
    """Return the lowest compute capability, such as (8, 0), of the first `count` devices, which must exist. AMD's
    devices have none, and are assumed to suffice."""
    if built_for("hip") is not None:
        return LEAST_CAPABILITY
    driver, number, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), []
    for device in range(count):
        pair = []
        for attribute in _CAPABILITY:
            assert driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) == 0
            pair.append(number.value)
        found.append((pair[0], pair[1]))
    return min(found)


def smallest_memory(count: int) -> int | None:
    """Return the memory in bytes of the smallest of the first `count` devices; None if the driver does not report it.
    AMD's is not asked."""
    if built_for("hip") is not None:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    size, found = ctypes.c_size_t(0), []
    for device in range(count):
        if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) != 0:
            return None
        found.append(size.value)
    return min(found, default=None)


LEAST_CAPABILITY = (8, 0)  # minimum of a device


def missing_to_launch() -> list[str]:
    """Return phrases for the tools that Triton needs to compile its launchers and that this machine lacks."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))) else ["a C compiler"]
    return missing if header.exists() else [*missing, "Python's headers"]


def why_not_triton(devices: int) -> tuple[str, str] | None:
    """Return cause and fix, as phrases, if Triton kernels cannot run on the first `devices` GPUs, which must exist;
    else None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed", "Install torch's build for CUDA, which brings it, or use --device cpu."
    missing = missing_to_launch()
    if missing:
        cause = f"Triton cannot launch them without {' and '.join(missing)}"
        return cause, "Install what is missing, or use --device cpu."
    found = lowest_capability(devices)
    if found < LEAST_CAPABILITY:
        needed, there = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, found))
        return (
            f"they need compute capability {needed}, but a device has {there}",
            "Use GPUs from Ampere on, --device cpu, or the model's unquantised checkpoint and no --quantization.",
        )
    return None
