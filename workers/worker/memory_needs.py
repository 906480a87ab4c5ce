"""Estimates of the memory of weights and of a step, and the errors that show them. Torch-free; allocates nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workers.errors import StartupError
from workers.layers.decoder_spec import tensor_shapes
from workers.layers.quantization.registry import NONE
from workers.platform.dtypes import ITEM_BYTES
from workers.platform.host_memory import free_host_bytes, human_bytes
from workers.weights.tied import EMBEDDING, HEAD

if TYPE_CHECKING:
    from workers.config import WorkerConfig
    from workers.layers.decoder_spec import DecoderSpec
    from workers.layers.quantization.formats.form import WeightForms

OUT_OF_MEMORY = 4  # exit code
# Parts of the messages of torch's CPU and CUDA allocators and of the system.
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch raises its own kinds of `RuntimeError`, numpy a `MemoryError`."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError | ImportError) and any(message in text for message in _MESSAGES)


def weight_bytes(spec: DecoderSpec, dtype: str, forms: WeightForms = NONE) -> int:
    """Bytes of the weights of the whole model, over all ranks."""
    item, total = ITEM_BYTES[dtype], 0
    for name, shape in tensor_shapes(spec).items():
        if len(shape) == 2:
            own = forms.of_head if name in (EMBEDDING, HEAD) else forms
            total += own.form_of(name.removesuffix(".weight")).weight_bytes(*shape, item)
        else:
            total += math.prod(shape) * item
    return total


def step_bytes(config: WorkerConfig, spec: DecoderSpec) -> int:
    """Bytes of the tensors of the largest step that exist at the same time on one rank: a few of hidden size, the
    MLP's, and float32 logits."""
    size, item = config.tensor_parallel_size, ITEM_BYTES[config.dtype]
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    row = 4 * spec.hidden_size + (heads + 3 * spec.intermediate_size) // size
    rows_of_logits = min(config.max_num_batched_tokens, 128)
    return config.max_num_batched_tokens * row * item + rows_of_logits * spec.vocab_size // size * 4


def check_weights_fit(config: WorkerConfig, spec: DecoderSpec, dtype: str, forms: WeightForms) -> None:
    """On the CPU, where all ranks share the memory. Raises `StartupError` (exit code 4) with the arithmetic."""
    need, free = weight_bytes(spec, dtype, forms), free_host_bytes()
    if need > free:
        raise StartupError(
            f"Not enough memory for the weights: {spec.num_parameters:,} parameters in {form_name(config, dtype)} need "
            f"{human_bytes(need)}, and {human_bytes(free)} is free.",
            _smaller(config, dtype, "Free memory") + ".",
            OUT_OF_MEMORY,
        )


def out_of_memory(
    config: WorkerConfig, spec: DecoderSpec, forms: WeightForms, doing: str, kv_bytes: int | None, free_bytes: int
) -> StartupError:
    """The error for an allocation that failed while `doing`. `kv_bytes`: of KV memory, once it is known."""
    weights = weight_bytes(spec, config.dtype, forms) // config.tensor_parallel_size
    parts = [
        f"{human_bytes(weights)} of weights ({form_name(config, config.dtype)})",
        f"about {human_bytes(step_bytes(config, spec))} for a step of {config.max_num_batched_tokens} tokens",
    ]
    if kv_bytes is not None:
        parts.append(f"{human_bytes(kv_bytes)} of KV memory")
    ranks = "" if config.tensor_parallel_size == 1 else f" of {config.tensor_parallel_size}"
    first = "Lower --kv-cache-memory, --max-model-len or --max-num-batched-tokens"
    if config.device == "cuda":
        fix = (
            f"{first}, or use more ranks (--tensor-parallel-size), a lower --gpu-memory-utilization or a smaller model."
        )
    else:
        fix = f"{_smaller(config, config.dtype, first)}."
    return StartupError(
        f"Out of memory while {doing}: each rank{ranks} needs {', '.join(parts)}, and {human_bytes(free_bytes)} is "
        "free.",
        fix,
        OUT_OF_MEMORY,
    )


def form_name(config: WorkerConfig, dtype: str) -> str:
    """What the weights are in, for messages."""
    return dtype if config.quantization == "none" else f"{config.quantization} and {dtype}"


def _smaller(config: WorkerConfig, dtype: str, first: str) -> str:
    sixteen = ", or --dtype bfloat16, which is half as large" if dtype == "float32" else ""
    fewer = {"none": "int8 or int4", "int8": "int4"}.get(config.quantization)
    rounded = f", or --quantization {fewer}" if fewer and config.device != "cuda" else ""
    return f"{first}, use a smaller model{sixteen}{rounded}"
