"""Whether the Triton kernels can run on a device. Does not import Triton, which is not on every machine."""

import importlib.util
import os
from functools import cache

import torch

from oarlock.workers.platform.cuda_driver import LEAST_CAPABILITY, missing_to_launch


def why_not(device: torch.device) -> str | None:
    """Return None if the kernels run on `device` (also in Triton's interpreter), else a reason for the log."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it runs on CUDA devices, but the model is on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "it needs compute capability {}.{} or higher".format(*LEAST_CAPABILITY)
    missing = missing_to_launch()
    return f"Triton cannot launch kernels without {' and '.join(missing)}" if missing else None


@cache
def can_serve(device: torch.device) -> bool:
    """Return whether layers on `device` use the kernels: never in the interpreter, which is for tests."""
    return device.type == "cuda" and why_not(device) is None


@cache
def amd_architecture() -> str | None:
    """Return the architecture of an AMD device, such as gfx942; None: devices are NVIDIA's."""
    return None if torch.version.hip is None else torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]


def float32_precision(amd: str | None) -> str:
    """Return the matmul precision that loses no more than float32 itself. Only NVIDIA has TensorFloat-32."""
    return "tf32x3" if amd is None else "ieee"


def options(warps: int, stages: int, amd: str | None) -> dict[str, int]:
    """Return the compile options of a kernel with `stages` loop steps in flight.

    AMD devices get at most 2 stages: they hide latency by waves instead, and have 64 KiB of shared memory.
    """
    return {"num_warps": warps, "num_stages": stages if amd is None else min(stages, 2)}
