"""Checks whether blocks can be kept beyond the pool as asked, and chooses the sizes that are not given."""

from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import StartupError
from oarlock.workers.kv_offload import DEFAULT_SLOT_BYTES
from oarlock.workers.kv_tiers.directory import check_directory, disk_limit
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.platform.host_memory import free_host_bytes, human_bytes

_LEAST_DISK_BYTES = 1 << 20


def with_kv_offload(config: WorkerConfig, spec: DecoderSpec) -> WorkerConfig:
    """`config` with the sizes of the tiers below the pool. Raises `StartupError`."""
    if not config.offloads_kv:
        return config
    if config.nnodes > 1:
        raise StartupError(
            f"--kv-offload-memory and --kv-offload-path need all ranks on one host, and --nnodes is {config.nnodes}.",
            "Leave them out, or run a replica on each host.",
        )
    if spec.longest_window is not None:
        raise StartupError(
            f"Every layer of this model has a sliding window, of up to {spec.longest_window} tokens: blocks before it "
            "are not kept, so --kv-offload-memory and --kv-offload-path would load none.",
            "Leave them out.",
        )
    memory, disk = config.kv_offload_bytes, config.kv_offload_disk_bytes
    if config.kv_offload_path is not None:
        memory = memory or DEFAULT_SLOT_BYTES
        check_directory(config.kv_offload_path)
        disk = disk_limit(config.kv_offload_path, disk)
        if disk < _LEAST_DISK_BYTES:
            raise StartupError(
                f"kv_offload_path {config.kv_offload_path} has no room: {human_bytes(disk)} of its disk can be used.",
                "Free space on it, choose another disk, or raise --kv-offload-disk.",
            )
    assert memory is not None
    wanted = memory * config.ranks_on_host
    free = free_host_bytes() if config.host_free_bytes is None else config.host_free_bytes
    if wanted > free:
        raise StartupError(
            f"kv_offload_memory wants {human_bytes(wanted)} of host memory ({config.ranks_on_host} rank(s) x "
            f"{human_bytes(memory)}), and {human_bytes(free)} is free.",
            "Lower --kv-offload-memory.",
        )
    return config.with_(kv_offload_bytes=memory, kv_offload_disk_bytes=disk)
