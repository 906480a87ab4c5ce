"""Whether the kernels in Triton can run on a device. Imports no Triton, which is on some machines only."""

import importlib.util
import os
from functools import cache

import torch

from oarlock.workers.platform.cuda_driver import LEAST_CAPABILITY, missing_to_launch


def why_not(device: torch.device) -> str | None:
    """None when they run there, in Triton's interpreter too; else the reason, as a phrase for the log."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it computes on CUDA devices and the model is on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "it wants compute capability {}.{} or higher".format(*LEAST_CAPABILITY)
    missing = missing_to_launch()
    return f"Triton cannot launch kernels without {' and '.join(missing)}" if missing else None


@cache
def can_serve(device: torch.device) -> bool:
    """Whether layers on `device` use them: never in the interpreter, which is for tests."""
    return device.type == "cuda" and why_not(device) is None


@cache
def amd_architecture() -> str | None:
    """Name of an AMD device's architecture, such as gfx942; None: devices are NVIDIA's."""
    return None if torch.version.hip is None else torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]


def float32_products(amd: str | None) -> str:
    """How kernels multiply float32 with no more than its own loss: TensorFloat-32 is of NVIDIA alone."""
    return "tf32x3" if amd is None else "ieee"


def options(warps: int, stages: int, amd: str | None) -> dict[str, int]:
    """Compile options of a kernel that has `stages` steps of its loop under way: AMD's devices hide more by waves, and
    have 64 KiB of shared memory."""
    return {"num_warps": warps, "num_stages": stages if amd is None else min(stages, 2)}
