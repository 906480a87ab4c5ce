"""Checks of settings by themselves: known names, numbers in range, ranks that can be dealt to hosts."""

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.errors import StartupError
from oarlock.workers.models.hf_quantization import GGUF
from oarlock.workers.platform.dtypes import ITEM_BYTES, KV_CACHE_DTYPES
from oarlock.workers.quantization.formats.registry import STORED
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.ranks.cpu_affinity import check_affinity

_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", *ITEM_BYTES),
    "quantization": (*QUANTIZATIONS, *STORED, GGUF),
    "load_format": ("auto", "safetensors", "dummy"),
    "kv_cache_dtype": (*KV_CACHE_DTYPES, *ITEM_BYTES),
    "attention_backend": ("auto", "cpp", "torch", "triton", "reference"),
}
_COUNTS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "nnodes",
    "data_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
)
_MAX_BLOCK_SIZE = 1024


def check_limits(config: WorkerConfig) -> None:
    """Checks the limits of a configuration against each other. Raises `StartupError`."""
    for field, choices in _CHOICES.items():
        value = getattr(config, field)
        if value not in choices:
            raise StartupError(f"{field} is {value!r}.", f"Choose one of {', '.join(choices)}.")
    for field in _COUNTS:
        _check_at_least_one(field, getattr(config, field))
    for field in ("max_model_len", "num_threads", "kv_cache_bytes", "num_kv_blocks"):
        if getattr(config, field) is not None:
            _check_at_least_one(field, getattr(config, field))
    if config.max_num_seqs > config.max_num_batched_tokens:
        raise StartupError(
            f"max_num_seqs {config.max_num_seqs} is larger than max_num_batched_tokens "
            f"{config.max_num_batched_tokens}, so not every sequence could get a token in a step.",
            "Lower max_num_seqs or raise max_num_batched_tokens.",
        )
    if config.block_size > _MAX_BLOCK_SIZE:
        raise StartupError(f"block_size {config.block_size} is too large.", f"Use at most {_MAX_BLOCK_SIZE}.")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise StartupError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization}.", "Use a share above 0 and up to 1."
        )
    if not config.step_timeout_s > 0:
        raise StartupError(f"step_timeout_s is {config.step_timeout_s}.", "Use a number of seconds above 0.")
    Topology.of(config).check()
    if config.data_parallel_size > 1 and config.nnodes > 1:
        raise StartupError(
            f"--data-parallel-size {config.data_parallel_size} with --nnodes {config.nnodes}: replicas share one host.",
            "Start one server for each group of hosts, without --data-parallel-size, behind a proxy.",
        )
    check_affinity(config)


def _check_at_least_one(field: str, value: int) -> None:
    if value < 1:
        raise StartupError(f"{field} is {value}.", "It must be at least 1.")
