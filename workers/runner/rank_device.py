"""The device of a rank, which every thread of the process that calls CUDA must have made its own before.

CUDA keeps the current device for each thread, and begins with device 0. A stream, an event, a collective or a launch
means that one unless told otherwise, whatever device its tensors are on; and a thread that only waits for an event
would take some hundred MB there.
"""

import torch

from oarlock.workers.config import WorkerConfig


def device_of(config: WorkerConfig, rank: int) -> torch.device:
    """The device of `rank`, its place among the replica's ranks of this host: its own GPU, one that it shares, or the
    CPU."""
    if config.device != "cuda":
        return torch.device("cpu")
    place = config.first_on_host + rank
    return torch.device("cuda", place % torch.cuda.device_count() if config.share_device else place)


def use_device(config: WorkerConfig, rank: int) -> torch.device:
    """Makes `device_of` the calling thread's CUDA device, and returns it."""
    device = device_of(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
