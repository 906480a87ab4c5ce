"""Checks a machine for all that our kernels in Triton need, without importing torch or Triton, which takes seconds."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from oarlock.workers.platform import cuda_driver

LEAST_CAPABILITY = (8, 0)  # of a device


def missing_to_launch() -> list[str]:
    """Phrases for the tools that Triton compiles its launchers with and this machine lacks."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))) else ["a C compiler"]
    return missing if header.exists() else [*missing, "Python's headers"]


def why_not(devices: int) -> tuple[str, str] | None:
    """Cause and fix, as phrases, where kernels cannot run on the first `devices` GPUs, which must exist; else None."""
    if importlib.util.find_spec("triton") is None:
        return "it is not installed", "Install torch's build for CUDA, which brings it, or use --device cpu."
    missing = missing_to_launch()
    if missing:
        return f"it cannot launch them without {' and '.join(missing)}", "Install what is missing, or use --device cpu."
    found = cuda_driver.lowest_capability(devices)
    if found < LEAST_CAPABILITY:
        needed, there = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, found))
        return (
            f"they want compute capability {needed}, and a device has {there}",
            "Use GPUs from Ampere on, --device cpu, or the model's unquantised checkpoint and no --quantization.",
        )
    return None
