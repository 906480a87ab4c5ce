"""Loading of one decoder rank: the model's description, the weights, and the attention backend."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from oarlock.workers.attention.backend import AttentionBackend
from oarlock.workers.attention.selector import choose
from oarlock.workers.attention.triton_tiles import fixed_span
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.kernels.cpu.description import log_kernels
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.decoder_spec import DecoderSpec, matrices_of
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import stored_quantization, weight_formats
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.quantization.fixed_order import FIXED_ORDER
from oarlock.workers.quantization.formats.checkpoint_formats import GGUFFormats, input_rounding, served_formats
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.runner.expert_kernel_selection import select_expert_kernels
from oarlock.workers.transformers_backend.choice import resolved_spec
from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.weights.gguf_reader import load_weights

logger = logging.getLogger("oarlock.runner")


class DecoderDescription(NamedTuple):
    """A decoder as its files and the options describe it, before weights are read."""

    spec: DecoderSpec
    layers: range  # of this rank's pipeline stage
    checkpoint: Checkpoint | None  # None: dummy weights
    formats: WeightFormats  # formats of the weights on this rank
    fixes_order: bool  # sums have an order that does not depend on the batch, on a CUDA device
    quantization: str  # for reports
    input_rounding: str | None  # for reports; None: matmuls do not round their inputs


def describe(config: WorkerConfig, device: torch.device, stage: PipelineStage) -> DecoderDescription:
    """Read the description of the model of `config`, which must be resolved (see `oarlock.workers.preflight`)."""
    spec = resolved_spec(config)
    if config.offloads_kv:
        spec = spec.with_whole_blocks()
    layers = spec.layers_of_stage(stage.number, stage.size)
    directory = Path(config.model_path)
    checkpoint = None if config.load_format == "dummy" else open_checkpoint(directory, spec.names)
    stored = stored_quantization(directory, read_config(directory))
    stored_formats = weight_formats(config.quantization, stored, checkpoint)
    formats = served_formats(stored_formats, config.device, dequantize=config.dequantize)
    fixes_order = config.batch_invariant and availability.can_serve(device)
    if fixes_order:
        formats = FIXED_ORDER
    quantization = config.quantization if stored is None else stored.scheme.description
    if isinstance(stored_formats, GGUFFormats):
        quantization = stored_formats.description
    if config.dequantize:
        quantization += ", dequantised at load"
    rounding = input_rounding(formats, matrices_of(spec), device.type)
    return DecoderDescription(spec, layers, checkpoint, formats, fixes_order, quantization, rounding)


def load_decoder(
    description: DecoderDescription,
    config: WorkerConfig,
    tp: TensorParallel,
    device: torch.device,
    on_progress: Callable[[float], None],
) -> RankModel:
    """Return the model with this rank's slice of every weight, and with its expert kernels selected."""
    spec, dtype = description.spec, getattr(torch, config.dtype)
    if device.type == "cpu" and tp.rank == 0:
        log_kernels(dtype, description.input_rounding is not None)
    model = _without_weights(description, config, tp, dtype, device)
    load_weights(
        model.load,
        description.checkpoint,
        seed=config.seed,
        check_finite=config.check_weights,
        on_progress=on_progress,
    )
    if device.type == "cuda" and spec.has_experts:
        with torch.inference_mode():
            select_expert_kernels(model, config.max_num_batched_tokens)
    return model


def _without_weights(
    description: DecoderDescription, config: WorkerConfig, tp: TensorParallel, dtype: torch.dtype, device: torch.device
) -> RankModel:
    """Return the model before its weights are read: the `Decoder`, or a class that transformers' code computes."""
    spec, formats = description.spec, description.formats
    if config.served_class is None:
        stage, distributes = description.layers, config.enable_expert_parallel
        return Decoder(spec, tp, dtype, device, formats, stage, distributes_experts=distributes)
    from oarlock.workers.transformers_backend.model import TransformersModel  # imports transformers, in seconds

    served_class = ClassDescription.decoded(config.served_class)
    return TransformersModel(spec, served_class, config, tp, dtype, device, formats)


def attention_backends(model: RankModel, config: WorkerConfig, *, fixes_order: bool) -> dict[int, AttentionBackend]:
    """Return the attention backend of each group of pages of `model`, by its number. They describe the rank's pages."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    span, chosen = fixed_span(config.max_model_len) if fixes_order else None, {}
    for spec in model.kv_specs(config.block_size, config.kv_cache_dtype):
        chosen[spec.group] = choose(replace(spec, fixed_span=span), config.attention_backend, logger.info)
    return chosen
