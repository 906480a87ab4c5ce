"""NVIDIA's driver, the CUDA that torch was built for, and what Triton needs, without importing either: it takes
seconds.

A program built for CUDA M.n runs on every driver that supports CUDA M.0 or later ("minor version compatibility" in
NVIDIA's guide to CUDA compatibility), so only the major version decides.
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
    """The newest CUDA version that the driver supports, as `12.8`; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def built_for() -> str | None:
    """The CUDA version that the installed torch was built for, as `13.0`; None if it was built for CPUs."""
    torch = importlib.util.find_spec("torch")
    for folder in (torch.submodule_search_locations or []) if torch is not None else []:
        version = Path(folder) / "version.py"
        found = re.search(r"^cuda\b.*= *'([\d.]+)'", version.read_text("utf-8") if version.exists() else "", re.M)
        if found is not None:
            return found[1]
    return None


def why_too_old(driver: str, built: str) -> tuple[str, str] | None:
    """Cause and fix, as phrases, where a driver for CUDA `driver` cannot run a torch for CUDA `built`; else None."""
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
    """Devices the CUDA driver offers and the installed torch can use; 0 without driver, device or CUDA build."""
    torch = importlib.util.find_spec("torch")
    folders = list(torch.submodule_search_locations or []) if torch is not None else []
    if not any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver on this machine
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def lowest_capability(count: int) -> tuple[int, int]:
    """The lowest compute capability, as (8, 0), of the first `count` devices, which there must be."""
    driver, number, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), []
    for device in range(count):
        pair = []
        for attribute in _CAPABILITY:
            assert driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) == 0
            pair.append(number.value)
        found.append((pair[0], pair[1]))
    return min(found)


LEAST_CAPABILITY = (8, 0)  # of a device


def missing_to_launch() -> list[str]:
    """Phrases for the tools that Triton compiles its launchers with and this machine lacks."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))) else ["a C compiler"]
    return missing if header.exists() else [*missing, "Python's headers"]


def why_not_triton(devices: int) -> tuple[str, str] | None:
    """Cause and fix, as phrases, where kernels cannot run on the first `devices` GPUs, which must exist; else None."""
    if importlib.util.find_spec("triton") is None:
        return "it is not installed", "Install torch's build for CUDA, which brings it, or use --device cpu."
    missing = missing_to_launch()
    if missing:
        return f"it cannot launch them without {' and '.join(missing)}", "Install what is missing, or use --device cpu."
    found = lowest_capability(devices)
    if found < LEAST_CAPABILITY:
        needed, there = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, found))
        return (
            f"they want compute capability {needed}, and a device has {there}",
            "Use GPUs from Ampere on, --device cpu, or the model's unquantised checkpoint and no --quantization.",
        )
    return None
