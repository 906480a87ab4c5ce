"""Describes what computes on a device: between different descriptions, results may differ in their last bits."""

from pathlib import Path

import torch

from workers.kernels.cpu import library


def kernels_in_use(device: torch.device) -> str:
    """The GPU and CUDA version, or the processor's vector instructions and the hash of the C++ kernels if loaded."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} CUDA {torch.version.cuda}"
    # Calling `library()` would compile it, even for a model that does not use it.
    is_loaded = library.load.cache_info().currsize > 0
    ours = Path(library.library()._name).stem if is_loaded else "torch"
    return f"{torch.backends.cpu.get_cpu_capability()} {ours}"
