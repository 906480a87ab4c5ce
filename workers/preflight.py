"""Checks a configuration against its model, and resolves every "auto", before any rank starts.

Torch-free and fast: a mistake in the configuration is reported in a fraction of a second. Reads `config.json` and the
headers of the weight files. The only tensor that it reads is a stored output head that `config.json` ties to the
embedding.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.workers.checks.adapters import (
    check_adapter_files,
    check_adapters_fit,
    with_slot_bytes,
    with_target_modules,
)
from oarlock.workers.checks.class_limits import check_class, check_class_tensors, check_ties
from oarlock.workers.checks.devices import (
    check_matmuls_on_cuda,
    ranks_here,
    resolve_device,
    resolve_dtype,
    resolve_kv_cache_dtype,
    served_dtype,
    this_cpu,
)
from oarlock.workers.checks.encoder import check_encoder, encoder_is_not_planned, encoder_preflight
from oarlock.workers.checks.limits import (
    check_drafts,
    check_has_pages,
    check_limits,
    check_parallel,
    with_kv_offload,
)
from oarlock.workers.checks.tensors import check_tensors
from oarlock.workers.config import WorkerConfig
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.layers.decoder_spec import DecoderSpec, matrices_of
from oarlock.workers.layers.memory_spec import PagesSpec, SlotsSpec
from oarlock.workers.model_files.checkpoint import HEAD, Checkpoint, head_differs
from oarlock.workers.model_files.gguf_model import GGUFCheckpoint
from oarlock.workers.models.encoders.registry import is_encoder
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import (
    GGUF,
    QUANTISATION_FILES,
    StoredQuantization,
    stored_quantization,
    weight_formats,
)
from oarlock.workers.platform import cuda_driver
from oarlock.workers.quantization.formats.checkpoint_formats import input_rounding, served_formats
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.quantization.registry import NONE, QUANTIZATIONS, STORED
from oarlock.workers.ranks.cpu_affinity import with_cpus
from oarlock.workers.runner.group_sizes import with_sequences_that_fit
from oarlock.workers.runner.kv_room import KVRoom, room_for_kv, room_given, room_on_device
from oarlock.workers.runner.memory_needs import (
    CUDA_BYTES,
    check_given_size,
    check_given_size_fits_device,
    check_given_sizes_fit_host,
    check_kv_fits,
    check_weights_fit,
    free_before_load,
    largest_step_bytes,
    loaded_bytes_of_node,
    rank_weight_bytes,
    sampling_bytes,
)
from oarlock.workers.transformers_backend.choice import chosen_code
from oarlock.workers.transformers_backend.class_description import ClassDescription

logger = logging.getLogger("oarlock.preflight")

DESCRIPTIONS = ("config.json", *QUANTISATION_FILES)  # files that `check_without_weights` reads


def is_encoder_model(directory: Path) -> bool:
    """Return whether the model in `directory` is a supported encoder, by its `config.json`."""
    return is_encoder(read_config(directory))


def check_without_weights(config: WorkerConfig) -> None:
    """Make the checks that are possible with only the `DESCRIPTIONS`, before the weights are there. Raises
    `StartupError`."""
    check_limits(config)
    if is_encoder_model(Path(config.model_path)):
        check_encoder(config)
        resolve_device(config)
        return
    config, spec, _ = _described(config)
    length, device = _resolve_length(config.max_model_len, spec), resolve_device(config)
    if device == "cuda":
        config = with_target_modules(config.with_(device=device), spec, device)
        check_adapter_files(config, spec)
    if config.kv_cache_bytes is not None:
        least = "bfloat16"  # smallest dtype; the weights may turn out to have a larger one
        dtype = config.dtype
        if dtype == "auto":
            formats = QUANTIZATIONS.get(config.quantization, NONE)  # NONE overestimates quantised weights
            dtype = served_dtype(config, spec.dtype or least, device, formats, spec, this_cpu())
        check_given_size(config.with_(max_model_len=length, device=device, dtype=dtype), spec)
        if device != "cuda":
            check_given_sizes_fit_host(config, 0)


def preflight(config: WorkerConfig) -> WorkerConfig:
    """Return `config` with everything resolved. Raises `StartupError` (exit code 3) with cause and fix.

    Initialises the CUDA driver, after which a fork of this process cannot use CUDA: ranks must be spawned.
    """
    check_limits(config)
    if is_encoder_model(Path(config.model_path)):
        return encoder_preflight(config)
    model = open_model(config)
    device = resolve_device(model.config)
    spec, formats = model.spec, formats_on(model, device)
    config = with_lengths_and_types(model, device)
    if model.config.max_model_len is None and spec.length_limit is not None:
        logger.warning("event=max_model_len_limited to=%d reason=%r", config.max_model_len, spec.length_limit)
    if device == "cuda":
        check_matmuls_on_cuda(config)
        _check_device_memory(config, spec, formats)
        check_adapter_files(config, spec)
    else:
        check_weights_fit(config, spec, config.dtype, formats)
    check_adapters_fit(config, spec, formats)
    config = with_kv_offload(with_cpus(config, device), spec)
    config = _with_fewer_sequences(config, spec, formats)
    if device != "cuda":
        check_kv_fits(config, spec, formats)
    return config.with_(
        share_device=device == "cuda" and cuda_driver.device_count() < ranks_here(config),
        load_format="safetensors" if config.load_format == "auto" else config.load_format,
        enforce_eager=config.enforce_eager or spec.class_tensors is not None,  # a class's code cannot be captured
        tie_word_embeddings=spec.tie_word_embeddings,
        hidden_size=spec.hidden_size,
        pages_groups=sum(isinstance(group.memory, PagesSpec) for group in spec.groups),
    )


def _check_device_memory(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> None:
    """Check a given KV size against the smallest of the devices that ranks use."""
    if config.kv_cache_bytes is None:
        return
    devices = min(cuda_driver.device_count(), ranks_here(config))
    smallest = cuda_driver.smallest_memory(devices)
    if smallest is not None:
        check_given_size_fits_device(config, spec, formats, smallest, -(-ranks_here(config) // devices))


def _with_fewer_sequences(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> WorkerConfig:
    """Lower `max_num_seqs` to the sequences whose recurrent state fits, and log it.

    Raises `StartupError` if several hosts measure their free memory, and so might disagree.
    """
    if not any(isinstance(group.memory, SlotsSpec) for group in spec.groups):
        return config
    # A replay gives the numbers of blocks, and keeps the number of sequences that they were made for.
    room = _estimated_room(config, spec, formats) if config.num_kv_blocks is None else None
    if room is None:
        return config
    lowered = with_sequences_that_fit(config, spec, room)
    is_measured = config.device != "cuda" and config.kv_cache_bytes is None
    if lowered.max_num_seqs < config.max_num_seqs and is_measured and config.nnodes > 1:
        raise StartupError(
            f"Not enough memory on this host for the recurrent state of {config.max_num_seqs} sequences, and all hosts "
            "must run the same number.",
            f"Use --max-num-seqs {lowered.max_num_seqs} or less on every host.",
            EXIT_OUT_OF_MEMORY,
        )
    if lowered.max_num_seqs < config.max_num_seqs:
        logger.warning(
            "event=max_num_seqs_lowered from=%d to=%d reason=%r",
            config.max_num_seqs,
            lowered.max_num_seqs,
            "the recurrent state of more sequences would leave too little memory for the rest",
        )
    return lowered


def _estimated_room(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> KVRoom | None:
    """Return the room for keys, values and recurrent state, estimated before weights are read; None: not known."""
    if config.kv_cache_bytes is not None:
        return room_given(config)
    if config.device != "cuda":
        loading = config.with_(host_free_bytes=free_before_load(config))
        return room_for_kv(loading, None, 0, loaded_bytes=loaded_bytes_of_node(config, spec, formats))
    devices = min(cuda_driver.device_count(), ranks_here(config))
    smallest = cuda_driver.smallest_memory(devices)
    if smallest is None:
        return None
    stages = range(config.pipeline_parallel_size)
    weights = max(rank_weight_bytes(config, spec, formats, stage) for stage in stages)
    used = weights + config.adapter_bytes + CUDA_BYTES + sampling_bytes(config, spec)
    return room_on_device(config, smallest, used, largest_step_bytes(config, spec))


class OpenModel(NamedTuple):
    """Settings and tensors of a model, known without reading its weights. `config`: with its weight format resolved."""

    config: WorkerConfig
    spec: DecoderSpec
    formats: WeightFormats
    checkpoint: Checkpoint | None  # None: dummy weights


def open_model(config: WorkerConfig) -> OpenModel:
    """Read the settings and headers of a model, and check them against `config`. Raises `StartupError`."""
    if is_encoder_model(Path(config.model_path)):
        raise encoder_is_not_planned(config)
    config, spec, quantized = _described(config)
    checkpoint = None if config.load_format == "dummy" else open_checkpoint(Path(config.model_path), spec.names)
    if isinstance(checkpoint, GGUFCheckpoint) and checkpoint.has_blocks:
        config = _with_gguf_formats(config)
    elif config.quantization == GGUF:
        raise _is_no_choice(config.quantization)
    formats = weight_formats(config.quantization, quantized, checkpoint)
    if checkpoint is not None and config.served_class is not None:
        check_class_tensors(checkpoint)
        check_ties(checkpoint, ClassDescription.decoded(config.served_class))  # the look has compared the names
    elif checkpoint is not None:
        if spec.tie_word_embeddings and head_differs(checkpoint):
            logger.warning(
                "event=tie_word_embeddings_ignored tensor=%s reason=%r",
                HEAD,
                "config.json sets tie_word_embeddings, but the checkpoint has a different lm_head",
            )
            spec = replace(spec, tie_word_embeddings=False)
        check_tensors(checkpoint, spec, formats)
    return OpenModel(config, spec, formats, checkpoint)


def with_lengths_and_types(model: OpenModel, device: str) -> WorkerConfig:
    """Return the configuration of `model` with its dtypes, its context length and its slots for adapters on
    `device`."""
    config, spec, formats = model.config, model.spec, formats_on(model, device)
    dtype = resolve_dtype(config, device, spec, model.checkpoint, formats, this_cpu())
    config = config.with_(
        device=device,
        dtype=dtype,
        kv_cache_dtype=resolve_kv_cache_dtype(config.kv_cache_dtype, dtype),
        max_model_len=_resolve_length(config.max_model_len, spec),
    )
    return with_slot_bytes(config, spec, formats)


def formats_on(model: OpenModel, device: str) -> WeightFormats:
    """Return the weight formats of `model` on ranks that use `device`. Raises `StartupError` if `--dequantize` has no
    effect on them."""
    config, modules = model.config, matrices_of(model.spec)
    if config.dequantize and input_rounding(model.formats, modules, device) is None:
        what = "unquantised" if config.quantization == "none" else config.quantization
        raise StartupError(
            f"--dequantize: matmuls with {what} weights do not quantize activations on {device}.",
            "Leave --dequantize out.",
        )
    return served_formats(model.formats, device, dequantize=config.dequantize)


def _with_gguf_formats(config: WorkerConfig) -> WorkerConfig:
    """Set the quantization of a GGUF model with quantised weights. Raises `StartupError` if another was asked for."""
    if config.quantization not in ("none", GGUF):
        raise StartupError(
            f"quantization {config.quantization} rounds weights at load, but the GGUF model is quantised already.",
            "Leave --quantization out, or use the model's F16 or BF16 file.",
        )
    return config.with_(quantization=GGUF)


def _is_no_choice(requested: str) -> StartupError:
    return StartupError(
        f"quantization {requested} is a format of checkpoints, and this checkpoint does not have it.",
        f"Leave --quantization out, or choose one of {', '.join(QUANTIZATIONS)}.",
    )


def _described(config: WorkerConfig) -> tuple[WorkerConfig, DecoderSpec, StoredQuantization | None]:
    """Return `config` with its class and weight format resolved, and the model's settings and stored quantization."""
    directory = Path(config.model_path)
    spec, served_class = chosen_code(config)
    config = config.with_(served_class=served_class)
    quantized = stored_quantization(directory, read_config(directory))
    if served_class is not None:
        check_class(config, spec, is_quantised=quantized is not None)
    if config.offloads_kv:
        spec = spec.with_whole_blocks()
    requested = config.quantization
    if quantized is None:
        if requested in STORED:
            raise _is_no_choice(requested)
    elif requested not in ("none", quantized.method):
        raise StartupError(
            f"quantization {requested} rounds weights at load, but the checkpoint is quantised already: "
            f"{quantized.scheme.description}.",
            "Leave --quantization out, or use the model's unquantised checkpoint.",
        )
    elif config.load_format == "dummy":
        raise StartupError(
            f"load_format dummy has no weights for a quantised checkpoint: {quantized.scheme.description}.",
            "Leave --load-format out, or remove the quantization settings from config.json.",
        )
    else:
        config = config.with_(quantization=quantized.method)
    check_parallel(config, spec)
    check_drafts(config, spec)
    check_has_pages(config, spec)
    config = with_target_modules(config, spec, config.device)
    check_adapter_files(config, spec)  # again if the device is chosen to be CUDA, which serves fewer modules
    return config, spec, quantized


def _resolve_length(requested: int | None, spec: DecoderSpec) -> int:
    if requested is None:
        return spec.default_length
    if requested > spec.longest_length and spec.length_limit is not None:
        raise StartupError(
            f"max_model_len {requested} is more than {spec.longest_length} tokens: {spec.length_limit}.",
            f"Use at most {spec.longest_length}.",
        )
    if requested > spec.longest_length:
        raise StartupError(
            f"max_model_len {requested} is more than the model's {spec.longest_length} positions.",
            f"Use at most {spec.longest_length}.",
        )
    return requested
