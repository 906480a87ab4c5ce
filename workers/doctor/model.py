"""Checks of a model with its settings: the checks and choices of `serve` before it reads weights."""

from pathlib import Path

import torch

from oarlock.base.errors import StartupError
from oarlock.base.host_memory import human_bytes
from oarlock.workers.attention.backend import KVSpec
from oarlock.workers.attention.selector import candidates
from oarlock.workers.catalogue import code_line
from oarlock.workers.config import NO_ATTENTION, WorkerConfig
from oarlock.workers.doctor.finding import ERROR, NOTE, OK, Finding
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.layers.memory_spec import MemoryGroup, PagesSpec, SlotsSpec
from oarlock.workers.models.encoders.registry import read_encoder
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import stored_quantization, weight_formats
from oarlock.workers.preflight import preflight
from oarlock.workers.quantization.formats.checkpoint_formats import served_formats
from oarlock.workers.runner.memory_needs import encoder_weight_bytes as encoder_bytes
from oarlock.workers.runner.memory_needs import weight_bytes
from oarlock.workers.transformers_backend.choice import resolved_spec


def findings(config: WorkerConfig) -> list[Finding]:
    """Check the model. `config`: from the settings, with its "auto" values."""
    try:
        resolved = preflight(config)
    except StartupError as error:
        return [Finding("model", error.cause, ERROR, error.fix)]
    if resolved.whole_texts:
        return [_encoder(resolved), _threads(resolved)]
    return [_model(resolved), *_code(resolved), *_adapters(resolved), _threads(resolved), _attention(resolved)]


def described(text: str, fix: str) -> Finding:
    """Report the class that describes the model, or with a `fix` why no class does."""
    return Finding("description", text, ERROR if fix else OK, fix)


def wrong(cause: str, fix: str) -> Finding:
    """Report that the model is on this machine, but its files for the server are damaged or do not belong together."""
    return Finding("model", cause, ERROR, fix)


def missing(reason: str) -> Finding:
    """Report that the model is not on this machine, so that findings about it are missing."""
    return Finding("model", f"not checked: {reason}", NOTE)


def _model(config: WorkerConfig) -> Finding:
    directory = Path(config.model_path)
    spec = resolved_spec(config)
    checkpoint = None if config.load_format == "dummy" else open_checkpoint(directory, spec.names)
    formats = weight_formats(config.quantization, stored_quantization(directory, read_config(directory)), checkpoint)
    formats = served_formats(formats, config.device, dequantize=config.dequantize)
    size = weight_bytes(spec, config.dtype, formats)
    facts = {"dtype": config.dtype, "device": config.device, "weight_bytes": size, "architecture": spec.architecture}
    text = f"{spec.architecture}, {spec.num_parameters:,} parameters, {config.dtype} on {config.device}, "
    return Finding(
        "model", f"{text}{human_bytes(size)} of weights over {config.tensor_parallel_size} rank(s)", facts=facts
    )


def _code(config: WorkerConfig) -> list[Finding]:
    """Report the code that computes a class without a description, and its costs."""
    spec = resolved_spec(config)
    if spec.served_by == "oarlock":
        return []
    is_replicated = config.tensor_parallel_size > 1 and spec.is_replicated
    text = code_line(spec.architecture, spec.served_by, is_replicated=is_replicated)
    return [Finding("code", text, NOTE, facts={"served_by": spec.served_by, "is_replicated": is_replicated})]


def _adapters(config: WorkerConfig) -> list[Finding]:
    """Report the memory of LoRA adapters, if they are served, and the adapters that were found to fit."""
    if not config.max_loras:
        return []
    size, names = human_bytes(config.adapter_slot_bytes), [name for name, _ in config.lora_adapters]
    text = (
        f"{config.max_loras} slot(s) of {size} on each rank, for rank {config.max_lora_rank}; up to "
        f"{config.num_host_adapters} copies in host memory; {', '.join(names) or 'none'} from the start"
    )
    facts = {"slots": config.max_loras, "slot_bytes": config.adapter_slot_bytes, "adapters": names}
    return [Finding("adapters", text, facts=facts)]


def _encoder(config: WorkerConfig) -> Finding:
    spec = read_encoder(config.model_path, None)
    size = encoder_bytes(spec, config.dtype)
    facts = {"dtype": config.dtype, "device": config.device, "weight_bytes": size, "architecture": spec.architecture}
    text = f"{spec.architecture}, {spec.num_parameters:,} parameters, {config.dtype} on {config.device}, "
    ranks = f"{config.tensor_parallel_size} rank(s)"
    return Finding("model", f"{text}{human_bytes(size)} of weights over {ranks}, no KV memory", facts=facts)


def _threads(config: WorkerConfig) -> Finding:
    where = "on any CPU" if config.cpu_affinity == "none" else f"on CPUs {config.cpu_affinity}"
    facts = {"threads_per_rank": config.num_threads, "cpu_affinity": config.cpu_affinity}
    return Finding("threads", f"{config.num_threads} for each rank, {where}", facts=facts)


def _attention(config: WorkerConfig) -> Finding:
    """Report the chosen attention backend, and why better ones are refused."""
    spec = resolved_spec(config)
    refused: dict[str, str] = {}
    chosen: list[str] = []
    for group in spec.groups:
        if isinstance(group.memory, SlotsSpec):
            continue
        name = _backend(config, group, refused)
        if name is None:
            text = "; ".join(f"{name}: {why}" for name, why in refused.items())
            return Finding("attention", f"no backend can be used: {text}", ERROR, "Leave --attention-backend out.")
        chosen.append(name)
    names = ", ".join(dict.fromkeys(chosen)) or NO_ATTENTION
    text = "; ".join([names, *(f"not {name}: {why}" for name, why in refused.items())])
    return Finding("attention", text, NOTE if refused else "ok", facts={"backend": names, "refused": refused})


def _backend(config: WorkerConfig, group: MemoryGroup, refused: dict[str, str]) -> str | None:
    """Return the backend of a group of pages, or None if there is none. Adds the backends that are refused, with the
    reason."""
    memory = group.memory
    assert isinstance(memory, PagesSpec)
    kv = KVSpec(
        num_layers=len(group.layers),
        num_kv_heads=memory.heads_of_rank(config.tensor_parallel_size),
        head_dim=memory.key_width,
        block_size=config.block_size,
        dtype=getattr(torch, config.dtype),
        device=torch.device(config.device),
        cache_dtype=config.kv_cache_dtype,
        value_dim=memory.value_width,
        value_in_key=memory.value_in_key,
    )
    for backend in candidates(kv, config.attention_backend):
        reason = backend.why_not(kv)
        if reason is None:
            return backend.name
        refused[backend.name] = reason
    return None
