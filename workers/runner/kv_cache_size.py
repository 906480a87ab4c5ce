"""Computes how many KV blocks a rank has memory for; if one sequence does not fit, the error shows the arithmetic.

Knows the memory of the machine and the bytes of a block, not the layout of pages (the attention backend owns it).
Torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec, layers_of_stage
from oarlock.workers.platform.dtypes import ITEM_BYTES, KV_CACHE_DTYPES, KVShape
from oarlock.workers.platform.host_memory import free_host_bytes, human_bytes

if TYPE_CHECKING:
    from oarlock.workers.runner.device import MemoryMeter

# Share of the memory that is free once the weights are loaded; the rest is for other processes and the page cache.
CPU_SHARE = 0.25
# Block 0 is the null block, and a backend may keep one page that is never written.
RESERVED_BLOCKS = 2


class KVRoom(NamedTuple):
    """Bytes this rank may use for KV memory, and where the number comes from, in words that end before it."""

    available: int
    source: str


def room_for_kv(
    config: WorkerConfig, meter: MemoryMeter | None, step_bytes: int, graph_bytes: int = 0, weight_bytes: int = 0
) -> KVRoom:
    """Memory for KV blocks: the size that is given, or else measured once the weights are loaded and the largest step
    has run, which took `step_bytes`.

    `graph_bytes`: of decode graphs. `meter`: of the device; None for the host's memory. Where replicas load side by
    side, the host's free memory was measured before: each replica then takes another `weight_bytes` from it.
    """
    if config.kv_cache_bytes is not None:
        return room_given(config)
    if meter is not None:
        total = meter.total_bytes()
        return room_on_device(config, total, total - meter.free_bytes(), step_bytes, graph_bytes)
    if config.host_free_bytes is None:
        return room_on_host(config, free_host_bytes())
    return room_on_host(config, max(0, config.host_free_bytes - config.data_parallel_size * weight_bytes))


def room_given(config: WorkerConfig) -> KVRoom:
    """Memory for KV blocks that `--kv-cache-memory` gives."""
    assert config.kv_cache_bytes is not None
    return KVRoom(config.kv_cache_bytes, "--kv-cache-memory gives")


def room_on_device(config: WorkerConfig, total: int, used: int, step_bytes: int, graph_bytes: int = 0) -> KVRoom:
    """Memory for KV blocks on a device with `total` bytes, of which `used` are taken when the weights are loaded."""
    share = config.gpu_memory_utilization
    graphs = f", {human_bytes(graph_bytes)} for decode graphs" if graph_bytes else ""
    source = (
        f"--gpu-memory-utilization {share} of {human_bytes(total)} leaves, beside {human_bytes(used)} in use"
        f"{graphs} and {human_bytes(step_bytes)} for a step of {config.max_num_batched_tokens} tokens,"
    )
    # The rest is for libraries and other processes.
    return KVRoom(max(0, int(share * total) - used - step_bytes - graph_bytes), source)


def room_on_host(config: WorkerConfig, free: int) -> KVRoom:
    """Memory for a rank's KV blocks on a host with `free` bytes when the weights of all its ranks are loaded."""
    ranks = config.ranks_on_host
    free = max(0, free - (config.kv_offload_bytes or 0) * ranks)
    return KVRoom(int(free * CPU_SHARE) // ranks, f"{CPU_SHARE:.0%} of free memory shared by {ranks} rank(s) is")


def kv_shape(config: WorkerConfig, spec: DecoderSpec, stage: int = 0) -> KVShape:
    """KV memory of a rank of `stage`; the first has the most layers. `config`: with its dtype and lengths resolved."""
    attention = spec.attention
    return KVShape(
        num_layers=len(layers_of_stage(spec.num_layers, stage, config.pipeline_parallel_size)),
        num_kv_heads=attention.kv_heads_of_rank(config.tensor_parallel_size),
        head_dim=attention.head_dim,
        block_size=config.block_size,
        item_bytes=ITEM_BYTES[config.dtype],
        cache_dtype=KV_CACHE_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype),
    )


def blocks_that_fit(spec: KVShape, config: WorkerConfig, room: KVRoom) -> int:
    """Blocks to allocate, the null block included: at least one full sequence's, or any at all where its length is
    fitted to them, else `StartupError` (exit code 4).

    Of measured host memory at most what `max_num_seqs` full sequences can use is taken. A given size and device memory
    are used whole, because spare blocks keep cached prefixes for later requests.
    """
    assert config.max_model_len is not None, "preflight resolves the context length"
    per_sequence = -(-config.max_model_len // spec.block_size)
    fitting = room.available // spec.bytes_per_block
    least = 1 if config.fit_model_len else per_sequence
    if fitting < least + RESERVED_BLOCKS:
        raise _too_small(spec, config, room, per_sequence)
    blocks = fitting - RESERVED_BLOCKS + 1
    if config.kv_cache_bytes is None and config.device != "cuda":
        blocks = min(blocks, config.max_num_seqs * per_sequence + 1)
    return blocks


def fitted_length(config: WorkerConfig, num_blocks: int) -> int:
    """Find the longest sequence of a pool of `num_blocks`, the null block included, where it may be fitted."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    if not config.fit_model_len:
        return config.max_model_len
    return min(config.max_model_len, (num_blocks - 1) * config.block_size)


def check_given_size(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Checks that `--kv-cache-memory` holds one sequence, as far as that can be known before a rank starts."""
    blocks_that_fit(kv_shape(config, spec), config, room_given(config))


def _too_small(spec: KVShape, config: WorkerConfig, room: KVRoom, per_sequence: int) -> StartupError:
    available, need = room.available, (per_sequence + RESERVED_BLOCKS) * spec.bytes_per_block
    largest = max(0, (available // spec.bytes_per_block - RESERVED_BLOCKS) * spec.block_size)
    cause = (
        f"Not enough KV memory for one sequence of {config.max_model_len} tokens: it needs {human_bytes(need)} per "
        f"rank ({per_sequence} + {RESERVED_BLOCKS} blocks x {spec.block_size} tokens x {spec.bytes_per_token} bytes = "
        f"2 x {spec.num_layers} layers x {spec.num_kv_heads} KV heads x {_row(spec)} bytes a token), and {room.source} "
        f"{human_bytes(available)}."
    )
    eight = "use --kv-cache-dtype int8, " if not spec.is_rounded and config.device != "cuda" else ""
    shorter = f"lower --max-model-len to {largest} or less" if largest else "free memory or use a smaller model"
    if config.device == "cuda" and config.kv_cache_bytes is None:
        fix = (
            "Lower --max-num-batched-tokens, raise --gpu-memory-utilization, use more ranks (--tensor-parallel-size), "
            f"or {shorter}."
        )
    else:
        fix = f"Raise --kv-cache-memory to {-(-need // 2**20)}MiB, {eight}or {shorter}."
    return StartupError(cause, fix, EXIT_OUT_OF_MEMORY)


def _row(spec: KVShape) -> str:
    """The bytes of one KV head's key, or value, of one token, in factors."""
    item, scale = divmod(spec.bytes_per_row, spec.head_dim)
    return f"({spec.head_dim} x {item} + {scale})" if scale else f"{spec.head_dim} x {item}"
