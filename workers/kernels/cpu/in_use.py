"""Describes what computes on a device: between different descriptions, results may differ in their last bits."""

import logging

import torch

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.quantized_gemm import instructions as instructions_of_int8

_log = logging.getLogger("oarlock.kernels")

# The first two multiply bfloat16 where the level can; the others compute in float32 whatever they read.
KERNELS = ("gemm", "attention", "norm and rotary", "sampling")


def kernels_in_use(device: torch.device) -> str:
    """The GPU and CUDA version, or the processor's vector instructions and the file of the C++ kernels if loaded."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} CUDA {torch.version.cuda}"
    loaded = library.loaded()
    return f"{torch.backends.cpu.get_cpu_capability()} {'torch' if loaded is None else loaded.stem}"


def log_kernels(dtype: torch.dtype, rounds_inputs: bool = False) -> None:
    """One line for each kernel: its level and instructions. Without kernels one line: why, what is slow, what helps.

    `rounds_inputs`: whether products are of whole numbers of 8 bits.
    """
    if (reason := library.why_not(dtype)) is not None:
        _log.warning("event=no_kernels reason=%r effect=%r", reason, "torch's operations serve, which are slower")
        return
    level = library.level()
    own = {"gemm": level.tiles or level.bfloat16, "attention": level.bfloat16} if dtype == torch.bfloat16 else {}
    if rounds_inputs:
        own["gemm"] = instructions_of_int8(level)
    for kernel in KERNELS:
        instructions = ", ".join(dict.fromkeys(filter(None, (level.vectors, own.get(kernel)))))
        _log.info("event=kernel kernel=%r level=%s instructions=%r", kernel, level.name, instructions)
