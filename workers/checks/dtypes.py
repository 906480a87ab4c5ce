"""The number types of weights, activations and KV memory, where the operator has not chosen them."""

import logging
from dataclasses import replace

from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import StartupError
from oarlock.workers.kernels.cpu import build, levels
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.platform import processor
from oarlock.workers.platform.dtypes import ITEM_BYTES, KV_CACHE_DTYPES, SAFETENSORS_DTYPES
from oarlock.workers.platform.host_memory import free_host_bytes, human_bytes
from oarlock.workers.quantization.formats.form import WeightForms
from oarlock.workers.runner.memory_needs import weight_bytes
from oarlock.workers.weights.checkpoint import Checkpoint

logger = logging.getLogger("oarlock.preflight")


def resolve_dtype(
    config: WorkerConfig,
    device: str,
    spec: DecoderSpec,
    checkpoint: Checkpoint | None,
    forms: WeightForms,
    cpu: processor.Processor,
) -> str:
    """The dtype that was asked for, else what config.json declares, else that of the stored embedding.

    Where a CPU would emulate a 16-bit type, a model of that type runs in float32 unless the type is asked for. The C++
    kernels emulate none: they widen 16-bit numbers as they read them, at every level of instruction set.
    """
    asked = config.dtype
    if asked != "auto":
        if device == "cpu" and not cpu.multiplies(asked):
            logger.warning(
                "event=slow_dtype dtype=%s reason=%r",
                asked,
                f"{cpu.name}, so {asked} products are emulated, many times slower than float32: --dtype auto "
                "chooses that",
            )
        return asked
    found = checkpoint.find("model.embed_tokens.weight") if checkpoint is not None else None
    stored = "float32" if found is None else SAFETENSORS_DTYPES.get(found.entry.dtype, "bfloat16")
    declared = spec.dtype or stored
    chosen = served_dtype(config, declared, device, forms, spec, cpu)
    if device != "cpu" or cpu.multiplies(declared):
        return chosen
    slow = f"{declared} products are slow here ({cpu.name})"
    wide, narrow = (human_bytes(weight_bytes(spec, dtype, forms)) for dtype in ("float32", declared))
    if chosen == declared:
        reason = f"{slow}, but float32 weights take {wide} and there is less"
        logger.warning("event=dtype_chosen dtype=%s reason=%r", chosen, reason)
    else:
        reason = f"{slow}: weights take {wide} instead of {narrow}, and KV memory twice as much for each token"
        logger.info("event=dtype_chosen dtype=%s reason=%r", chosen, reason)
    return chosen


def served_dtype(
    config: WorkerConfig,
    declared: str,
    device: str,
    forms: WeightForms,
    spec: DecoderSpec,
    cpu: processor.Processor,
) -> str:
    """The dtype for a model that declares `declared`, where the operator has not chosen one.

    Of several hosts each holds its part of the weights, of several replicas each all of them.
    """
    if device != "cpu" or cpu.multiplies(declared):
        return declared
    wide, narrow = (weight_bytes(spec, dtype, forms) // config.nnodes for dtype in ("float32", declared))
    free = free_host_bytes() if config.host_free_bytes is None else config.host_free_bytes
    does_not_fit = wide > free // config.data_parallel_size > narrow
    return declared if does_not_fit else "float32"


def this_cpu() -> processor.Processor:
    """The 16-bit types that are not slow on this machine's CPU, and why others are."""
    level = levels.chosen()
    if level is not None and build.why_not_obtainable(level) is None:
        return processor.Processor(bfloat16=True, float16=True, name="")
    cpu = processor.here()
    return replace(cpu, name=f"{cpu.name}, and no C++ kernels")  # the rank logs why


def resolve_kv_cache_dtype(asked: str, dtype: str) -> str:
    form = KV_CACHE_DTYPES.get(asked, asked)
    if form == "auto":
        return dtype
    if form in ITEM_BYTES and form != dtype:
        raise StartupError(
            f"kv_cache_dtype {form} is not the model's dtype, {dtype}.", "Use auto, or a form in 8 bits: int8 or fp8."
        )
    return form
