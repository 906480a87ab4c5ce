"""Process groups of gloo whose ranks are threads: torch's own functions know one group of a process alone."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist


def gloo_groups(size: int) -> list[dist.ProcessGroup]:
    """Process groups, one for each rank."""
    store = dist.HashStore()

    def join(rank: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as threads:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        return list(threads.map(join, range(size)))
