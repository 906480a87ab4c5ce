"""Checks a configuration against an encoder, and resolves its settings. Torch-free."""

import logging
from pathlib import Path

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.base.host_memory import human_bytes
from oarlock.workers.checks.devices import ranks_here, resolve_device, this_cpu
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.sharding import supported_tp_sizes
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.models.encoders.registry import describe_encoder, is_ignorable, read_encoder
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.platform import cuda_driver
from oarlock.workers.platform.dtypes import SAFETENSORS_DTYPES
from oarlock.workers.ranks.cpu_affinity import with_cpus
from oarlock.workers.runner.memory_needs import encoder_step_bytes, encoder_weight_bytes, free_before_load

logger = logging.getLogger("oarlock.preflight")

# Settings that an encoder does not have: the value that means "not set", and the reason.
_WITHOUT = {
    "quantization": ("none", "the weights of an encoder are served in the dtype of the checkpoint"),
    "dequantize": (False, "the weights of an encoder are served in the dtype of the checkpoint"),
    "pipeline_parallel_size": (1, "encoders support tensor parallelism only"),
    "kv_offload_bytes": (None, "an encoder has no KV cache"),
    "kv_offload_path": (None, "an encoder has no KV cache"),
    "kv_cache_bytes": (None, "an encoder has no KV cache"),
    "kv_cache_dtype": ("auto", "an encoder has no KV cache"),
    "attention_backend": ("auto", "encoders have only one attention backend"),
    "num_speculative_tokens": (0, "an encoder generates no tokens"),
    "max_loras": (0, "adapters of encoders are not supported"),
}
_OWN_CODE = ("auto", "oarlock")  # values of `model_impl` with which an encoder is served
_FLAGS = {
    "kv_offload_bytes": "--kv-offload-memory",
    "kv_cache_bytes": "--kv-cache-memory",
    "num_speculative_tokens": "--speculative-config",
    "max_loras": "--enable-lora",
}


def check_encoder(config: WorkerConfig) -> EncoderSpec:
    """Return the description of a configuration's encoder. Raises `StartupError` for settings that encoders do not
    support."""
    spec = describe_encoder(read_config(Path(config.model_path)))
    for field, (neutral, reason) in _WITHOUT.items():
        value = getattr(config, field)
        if value != neutral:
            flag = _FLAGS.get(field, "--" + field.replace("_", "-"))
            raise StartupError(f"{flag} with {spec.architecture}: {reason}.", f"Leave {flag} out.")
    if config.model_impl not in _OWN_CODE:
        raise StartupError(
            f"--model-impl {config.model_impl} with {spec.architecture}: only the described code computes encoders.",
            "Leave --model-impl out.",
        )
    working = supported_tp_sizes(spec.num_heads, spec.num_heads, spec.intermediate_size)
    if config.tensor_parallel_size not in working:
        raise StartupError(
            f"tensor_parallel_size {config.tensor_parallel_size} does not fit this model: {spec.num_heads} heads, "
            f"intermediate size {spec.intermediate_size}.",
            f"Sizes that work: {', '.join(map(str, working))}.",
        )
    if config.max_model_len is not None and config.max_model_len > spec.max_positions:
        raise StartupError(
            f"max_model_len {config.max_model_len} is more than the model's {spec.max_positions} positions.",
            f"Use at most {spec.max_positions}.",
        )
    _checked_length(config, spec)
    return spec


def encoder_preflight(config: WorkerConfig) -> WorkerConfig:
    """Return `config` with everything resolved, as `oarlock.workers.preflight.preflight`."""
    check_encoder(config)
    checkpoint = None if config.load_format == "dummy" else Checkpoint.open(Path(config.model_path))
    spec = read_encoder(config.model_path, checkpoint)
    if checkpoint is not None:
        _check_tensors(checkpoint, spec)
    device = resolve_device(config)
    dtype = _resolve_dtype(config, device, spec, checkpoint)
    if device != "cuda":
        _check_memory(config, spec, dtype)
    length = _checked_length(config, spec)
    return with_cpus(config, device).with_(
        device=device,
        dtype=dtype,
        max_model_len=length,
        # Texts are not divided, so a step has room for the longest one.
        max_num_batched_tokens=max(config.max_num_batched_tokens, length),
        lower_step_size=False,
        load_format="safetensors" if config.load_format == "auto" else config.load_format,
        share_device=device == "cuda" and cuda_driver.device_count() < ranks_here(config),
        tie_word_embeddings=False,
        hidden_size=spec.hidden_size,
        whole_texts=True,
    )


def encoder_is_not_planned(config: WorkerConfig) -> StartupError:
    """Return the error of `oarlock plan` for an encoder, which has no KV memory to plan. It reports the required
    memory."""
    spec = describe_encoder(read_config(Path(config.model_path)))
    dtype = config.dtype if config.dtype != "auto" else spec.dtype or "float32"
    weights, tokens = encoder_weight_bytes(spec, dtype), max(config.max_num_batched_tokens, spec.max_positions)
    step = encoder_step_bytes(spec, 1, tokens)
    return StartupError(
        f"{spec.architecture} is an encoder: there is no KV memory to plan. In {dtype} its weights take "
        f"{human_bytes(weights)}, and a step of {tokens} tokens about {human_bytes(step)}.",
        "Serve it on a machine with that much free memory.",
    )


def _checked_length(config: WorkerConfig, spec: EncoderSpec) -> int:
    """Return the tokens of the longest text. Raises `StartupError` if the operator has chosen a smaller step."""
    length, step = config.max_model_len or spec.max_positions, config.max_num_batched_tokens
    if step < length and not config.lower_step_size:
        raise StartupError(
            f"--max-num-batched-tokens {step} is less than a text of {length} tokens, which an encoder computes whole.",
            f"Leave it out, raise it to {length}, or lower --max-model-len.",
        )
    return length


def _resolve_dtype(config: WorkerConfig, device: str, spec: EncoderSpec, checkpoint: Checkpoint | None) -> str:
    """Return the requested dtype, else the dtype of config.json or of the embedding; float32 if the processor would
    emulate it."""
    if config.dtype != "auto":
        return config.dtype
    found = None if checkpoint is None else checkpoint.find(f"{spec.prefix}{spec.names.word_embeddings}.weight")
    stored = "float32" if found is None else SAFETENSORS_DTYPES.get(found.entry.dtype, "float32")
    declared, cpu = spec.dtype or stored, this_cpu()
    if device != "cpu" or cpu.multiplies(declared):
        return declared
    logger.info("event=dtype_chosen dtype=float32 reason=%r", f"{declared} matmuls are slow here ({cpu.name})")
    return "float32"


def _check_memory(config: WorkerConfig, spec: EncoderSpec, dtype: str) -> None:
    replicas = config.data_parallel_size
    need, free = replicas * encoder_weight_bytes(spec, dtype) // config.nnodes, free_before_load(config)
    if need > free:
        raise StartupError(
            f"Not enough memory for the weights: {spec.num_parameters:,} parameters in {dtype} need "
            f"{human_bytes(need)}, and {human_bytes(free)} is free.",
            "Free memory, or use a smaller model.",
            EXIT_OUT_OF_MEMORY,
        )


def _check_tensors(checkpoint: Checkpoint, spec: EncoderSpec) -> None:
    """Check that every tensor of the model is there in its shape, and no other. Ranks check again as they load."""
    left = dict(checkpoint.tensors)
    for name, shape in spec.tensor_shapes().items():
        found = left.pop(name, None)
        if found is None:
            raise StartupError(
                f"{checkpoint.directory} holds no tensor {name!r}, which {spec.architecture} needs.",
                "Use a complete checkpoint whose config.json names the right architecture.",
            )
        if tuple(found.entry.shape) != shape:
            raise StartupError(
                f"{found.path}: tensor {name!r} has shape {list(found.entry.shape)}, but config.json implies "
                f"{list(shape)}.",
                "Use the config.json that belongs to these weights.",
            )
        if found.entry.dtype not in SAFETENSORS_DTYPES:
            raise StartupError(
                f"{found.path}: tensor {name!r} is {found.entry.dtype}, which is not supported.",
                "Use the model's bfloat16, float16 or float32 checkpoint.",
            )
    extra = sorted(name for name in left if not is_ignorable(spec, name))
    if extra:
        raise StartupError(
            f"{left[extra[0]].path} holds tensor {extra[0]!r}, which {spec.architecture} does not use"
            f"{f' ({len(extra)} such tensors)' if len(extra) > 1 else ''}.",
            "Use a checkpoint whose config.json names the right architecture.",
        )
