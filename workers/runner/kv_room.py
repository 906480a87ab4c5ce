"""Memory that a rank may use for keys, values and recurrent state: a given size, or a measurement. Torch-free."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from oarlock.base.host_memory import free_host_bytes, human_bytes
from oarlock.workers.config import WorkerConfig

# Share of the memory that is free after loading; the rest is for other processes and the page cache.
CPU_SHARE = 0.25


class MemoryMeter(Protocol):
    """Memory of one device, in bytes."""

    def total_bytes(self) -> int:
        """Return the bytes of the whole device."""

    def free_bytes(self) -> int:
        """Return the bytes that no process holds, after this process has freed its unused memory."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """Return the most memory that `run` took in addition to the memory held before; it is freed afterwards."""


class KVRoom(NamedTuple):
    """Bytes that this rank may use for pages and slots, and the source of this number: a phrase that precedes it in
    messages."""

    available: int
    source: str


def room_for_kv(
    config: WorkerConfig, meter: MemoryMeter | None, step_bytes: int, graph_bytes: int = 0, loaded_bytes: int = 0
) -> KVRoom:
    """Return the memory for pages and slots: the given size, or as measured after loading and running the largest step.

    `step_bytes`: bytes that the largest step took. `graph_bytes`: bytes of all graphs. `meter`: meter of the device, or
    None for host memory. If replicas load at the same time, the host's free memory was measured before they loaded, and
    each of them takes `loaded_bytes` of it.
    """
    if config.kv_cache_bytes is not None:
        return room_given(config)
    if meter is not None:
        total = meter.total_bytes()
        return room_on_device(config, total, total - meter.free_bytes(), step_bytes, graph_bytes)
    if config.host_free_bytes is None:
        return room_on_host(config, free_host_bytes())
    return room_on_host(config, max(0, config.host_free_bytes - config.data_parallel_size * loaded_bytes))


def room_given(config: WorkerConfig) -> KVRoom:
    """Return the memory for pages and slots that `--kv-cache-memory` sets."""
    assert config.kv_cache_bytes is not None
    return KVRoom(config.kv_cache_bytes, "--kv-cache-memory gives")


def room_on_device(config: WorkerConfig, total: int, used: int, step_bytes: int, graph_bytes: int = 0) -> KVRoom:
    """Return the memory for pages and slots on a device of `total` bytes, of which `used` are in use after loading."""
    share = config.gpu_memory_utilization
    graphs = f", {human_bytes(graph_bytes)} for graphs" if graph_bytes else ""
    source = (
        f"--gpu-memory-utilization {share} of {human_bytes(total)} leaves, in addition to {human_bytes(used)} in use"
        f"{graphs} and {human_bytes(step_bytes)} for a step of {config.max_num_batched_tokens} tokens,"
    )
    # The rest of the device is for libraries and other processes.
    return KVRoom(max(0, int(share * total) - used - step_bytes - graph_bytes), source)


def room_on_host(config: WorkerConfig, free: int) -> KVRoom:
    """Return the memory for a rank's pages and slots on a host with `free` bytes after all its ranks have loaded."""
    ranks = config.ranks_on_host
    free = max(0, free - ((config.kv_offload_bytes or 0) + config.adapter_copies_bytes) * ranks)
    return KVRoom(int(free * CPU_SHARE) // ranks, f"{CPU_SHARE:.0%} of free memory shared by {ranks} rank(s) is")
