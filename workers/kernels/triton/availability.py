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
