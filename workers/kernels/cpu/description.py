"""Descriptions of the kernels on a device. If descriptions differ, results may differ in their last bits."""

import logging

import torch

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.quantized_gemm import instructions as instructions_of_int8

_log = logging.getLogger("oarlock.kernels")

# The first two multiply bfloat16 if the ISA level can; the others compute in float32 for all dtypes.
KERNELS = ("gemm", "attention", "norm and rotary", "sampling")


def describe_kernels(device: torch.device) -> str:
    """Return a GPU's name and CUDA version, or a processor's vector instructions and C++ kernels if loaded."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} CUDA {torch.version.cuda}"
    loaded = library.loaded()
    return f"{torch.backends.cpu.get_cpu_capability()} {'torch' if loaded is None else loaded.stem}"


def log_kernels(dtype: torch.dtype, rounds_inputs: bool = False) -> None:
    """Log one line for each kernel with its ISA level and instructions, or one warning if there are no kernels.

    `rounds_inputs`: whether matmuls use 8-bit integers.
    """
    if (reason := library.why_not(dtype)) is not None:
        _log.warning("event=no_kernels reason=%r effect=%r", reason, "torch's slower operations are used")
        return
    level = library.isa_level()
    own = {"gemm": level.tiles or level.bfloat16, "attention": level.bfloat16} if dtype == torch.bfloat16 else {}
    if rounds_inputs:
        own["gemm"] = instructions_of_int8(level)
    for kernel in KERNELS:
        instructions = ", ".join(dict.fromkeys(filter(None, (level.vectors, own.get(kernel)))))
        _log.info("event=kernel kernel=%r level=%s instructions=%r", kernel, level.name, instructions)
