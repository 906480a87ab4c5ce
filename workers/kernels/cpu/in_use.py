"""What computes here, in one line: where it differs, numbers may differ in their last bits."""

from pathlib import Path

import torch

from workers.kernels.cpu import build


def kernels_in_use(device: torch.device) -> str:
    """The kind of device and its library, or of processor; with our kernels, if they are loaded, by their hash."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} CUDA {torch.version.cuda}"
    # Asking for the library would compile it, also for a model that does not use it.
    is_loaded = build.library.cache_info().currsize > 0
    ours = Path(build.library()._name).stem if is_loaded else "torch"
    return f"{torch.backends.cpu.get_cpu_capability()} {ours}"
