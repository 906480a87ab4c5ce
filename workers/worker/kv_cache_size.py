"""How many KV blocks a rank has memory for, and the error with the arithmetic when one sequence does not fit.

Knows the memory of the machine and the bytes of a block, not the layout of pages (the attention backend owns it).
"""

import torch

from workers.attention.backend import KVSpec
from workers.config import WorkerConfig
from workers.errors import StartupError
from workers.layers.decoder_spec import DecoderSpec
from workers.platform.dtypes import KV_CACHE_DTYPES
from workers.platform.host_memory import free_host_bytes, human_bytes
from workers.worker.memory_needs import OUT_OF_MEMORY

# Of the memory that is free once the weights are loaded; the rest is for other processes and the page cache.
CPU_SHARE = 0.25
# Block 0 is the null block, and a backend may keep one page that is never written.
RESERVED_BLOCKS = 2


def available_kv_bytes(config: WorkerConfig, device: torch.device) -> int:
    """Bytes this rank may use for KV memory, measured after its weights are loaded, unless a size is given."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        # The rest is for activations, libraries and other processes.
        return max(0, int(config.gpu_memory_utilization * total) - (total - free))
    return int(free_host_bytes() * CPU_SHARE) // config.tensor_parallel_size


def free_bytes(device: torch.device) -> int:
    """Free bytes of the memory of `device`."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def blocks_that_fit(spec: KVSpec, config: WorkerConfig, available_bytes: int) -> int:
    """Blocks to allocate, the null block included: at least one full sequence's, else `StartupError` (exit code 4).

    Of measured host memory at most what `max_num_seqs` full sequences can use is taken. A given size and device memory
    are used whole, because spare blocks keep cached prefixes for later requests.
    """
    assert config.max_model_len is not None, "preflight resolves the context length"
    per_sequence = -(-config.max_model_len // spec.block_size)
    fitting = available_bytes // spec.bytes_per_block
    if fitting < per_sequence + RESERVED_BLOCKS:
        raise _too_small(spec, config, available_bytes, per_sequence)
    blocks = fitting - RESERVED_BLOCKS + 1
    if config.kv_cache_bytes is None and spec.device.type == "cpu":
        blocks = min(blocks, config.max_num_seqs * per_sequence + 1)
    return blocks


def check_given_size(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Whether `--kv-cache-memory` holds one sequence, as far as that can be known before a rank starts."""
    assert config.kv_cache_bytes is not None, "only a given size can be checked beforehand"
    kv_spec = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=max(1, spec.num_kv_heads // config.tensor_parallel_size),
        head_dim=spec.head_dim,
        block_size=config.block_size,
        dtype=getattr(torch, config.dtype),
        device=torch.device(config.device),
        cache_dtype=KV_CACHE_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype),
    )
    blocks_that_fit(kv_spec, config, config.kv_cache_bytes)


def _too_small(spec: KVSpec, config: WorkerConfig, available: int, per_sequence: int) -> StartupError:
    need = (per_sequence + RESERVED_BLOCKS) * spec.bytes_per_block
    largest = max(0, (available // spec.bytes_per_block - RESERVED_BLOCKS) * spec.block_size)
    if config.kv_cache_bytes is not None:
        source = "--kv-cache-memory gives"
    elif spec.device.type == "cuda":
        source = f"--gpu-memory-utilization {config.gpu_memory_utilization} leaves"
    else:
        source = f"{CPU_SHARE:.0%} of free memory shared by {config.tensor_parallel_size} rank(s) is"
    cause = (
        f"Not enough KV memory for one sequence of {config.max_model_len} tokens: it needs {human_bytes(need)} per "
        f"rank ({per_sequence} + {RESERVED_BLOCKS} blocks x {spec.block_size} tokens x {spec.bytes_per_token} bytes = "
        f"2 x {spec.num_layers} layers x {spec.num_kv_heads} KV heads x {_row(spec)} bytes a token), and {source} "
        f"{human_bytes(available)}."
    )
    eight = "use --kv-cache-dtype int8, " if not spec.is_rounded and spec.device.type == "cpu" else ""
    shorter = f"lower --max-model-len to {largest} or less" if largest else "free memory or use a smaller model"
    fix = f"Raise --kv-cache-memory to {-(-need // 2**20)}MiB, {eight}or {shorter}."
    return StartupError(cause, fix, OUT_OF_MEMORY)


def _row(spec: KVSpec) -> str:
    """The bytes of one KV head's key, or value, of one token, in factors."""
    item = spec.form.dtype(spec.dtype).itemsize
    scale = spec.bytes_per_row - spec.head_dim * item
    return f"({spec.head_dim} x {item} + {scale})" if scale else f"{spec.head_dim} x {item}"
