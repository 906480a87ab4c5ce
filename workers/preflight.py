"""Checks a configuration against its model, and resolves every "auto", before any rank starts.

Torch-free and fast: a mistake in the configuration is reported in a fraction of a second. Reads `config.json` and the
headers of the weight files, and of the tensors only a stored output head that `config.json` ties to the embedding.
"""

import ctypes
import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

from workers.config import WorkerConfig
from workers.errors import StartupError
from workers.kernels.cpu import build, levels
from workers.layers.decoder_spec import FUSED_TENSORS, DecoderSpec, is_ignorable, tensor_shapes
from workers.layers.quantization.formats.checkpoint_forms import CheckpointForms
from workers.layers.quantization.formats.form import StoredTensor, WeightForms, stored
from workers.layers.quantization.formats.registry import STORED
from workers.layers.quantization.registry import NONE, QUANTIZATIONS
from workers.layers.sharding import supported_tp_sizes
from workers.models.hf_quantization import (
    GGUF,
    QUANTISATION_FILES,
    StoredQuantization,
    stored_quantization,
    weight_forms,
)
from workers.models.registry import describe, read_config
from workers.platform import processor
from workers.platform.dtypes import ITEM_BYTES, KV_CACHE_DTYPES, SAFETENSORS_DTYPES
from workers.platform.host_memory import free_host_bytes, human_bytes
from workers.weights.checkpoint import Checkpoint, weight_files
from workers.weights.gguf.block_types import SERVED as GGUF_TYPES
from workers.weights.gguf.checkpoint import GGUFCheckpoint, type_not_served
from workers.weights.open_checkpoint import open_checkpoint
from workers.weights.tied import HEAD, head_differs
from workers.worker.cpu_affinity import check_affinity, with_cpus
from workers.worker.memory_needs import check_weights_fit, weight_bytes

__all__ = ["DESCRIPTIONS", "check_without_weights", "preflight", "weight_files"]

logger = logging.getLogger("oarlock.preflight")

DESCRIPTIONS = ("config.json", *QUANTISATION_FILES)  # the files that `check_without_weights` looks at
_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", *ITEM_BYTES),
    "quantization": (*QUANTIZATIONS, *STORED, GGUF),
    "load_format": ("auto", "safetensors", "dummy"),
    "kv_cache_dtype": (*KV_CACHE_DTYPES, *ITEM_BYTES),
    "attention_backend": ("auto", "cpp", "torch", "triton", "reference"),
}
_MAX_BLOCK_SIZE = 1024


def check_without_weights(config: WorkerConfig) -> None:
    """Check what can be checked with the `DESCRIPTIONS`, before the weights are there. Raises `StartupError`."""
    _check_limits(config)
    config, spec, _ = _described(config)
    length, device = _resolve_length(config.max_model_len, spec), _resolve_device(config)
    if config.kv_cache_bytes is not None:
        # Imports torch, which takes seconds, so only where a size is given.
        from workers.worker.kv_cache_size import check_given_size

        least = "bfloat16"  # of the types there are; the weights may say that it is more
        dtype = config.dtype
        if dtype == "auto":
            forms = QUANTIZATIONS.get(config.quantization, NONE)  # of a quantised checkpoint: more than there will be
            dtype = _served_dtype(spec.dtype or least, device, forms, spec, this_cpu())
        check_given_size(config.with_(max_model_len=length, device=device, dtype=dtype), spec)


def preflight(config: WorkerConfig) -> WorkerConfig:
    """`config` with everything resolved. Raises `StartupError` (exit code 3) with cause and fix.

    Initialises the CUDA driver, after which a fork of this process cannot use CUDA: ranks must be spawned.
    """
    _check_limits(config)
    config, spec, quantized = _described(config)
    checkpoint = None if config.load_format == "dummy" else open_checkpoint(Path(config.model_path))
    device = _resolve_device(config)
    if isinstance(checkpoint, GGUFCheckpoint) and checkpoint.has_blocks:
        config = _with_gguf_forms(config, device)
    elif config.quantization == GGUF:
        raise _is_no_choice(config.quantization)
    forms = weight_forms(config.quantization, quantized, checkpoint)
    if checkpoint is not None:
        if spec.tie_word_embeddings and head_differs(checkpoint):
            logger.warning(
                "event=untied tensor=%s reason=%r",
                HEAD,
                "config.json ties it to the embedding, but the checkpoint holds another matrix: that is the head",
            )
            spec = replace(spec, tie_word_embeddings=False)
        _check_tensors(checkpoint, spec, forms)
    dtype = _resolve_dtype(config, device, spec, checkpoint, forms, this_cpu())
    if device == "cpu":
        check_weights_fit(config, spec, dtype, forms)
    return with_cpus(config, device).with_(
        device=device,
        dtype=dtype,
        kv_cache_dtype=_resolve_kv_cache_dtype(config.kv_cache_dtype, dtype, device),
        load_format="safetensors" if config.load_format == "auto" else config.load_format,
        tie_word_embeddings=spec.tie_word_embeddings,
        max_model_len=_resolve_length(config.max_model_len, spec),
    )


def _with_gguf_forms(config: WorkerConfig, device: str) -> WorkerConfig:
    """For a model whose weights are stored in blocks. A CPU multiplies by blocks; elsewhere they are dequantised."""
    if config.quantization not in ("none", GGUF):
        raise StartupError(
            f"quantization {config.quantization} rounds weights at load, but the GGUF model is quantised already.",
            "Leave --quantization out, or use the model's F16 or BF16 file.",
        )
    return config.with_(quantization=GGUF if device == "cpu" else "none")


def _is_no_choice(asked: str) -> StartupError:
    return StartupError(
        f"quantization {asked} is a form of checkpoints, and this one is not quantised so.",
        f"Leave --quantization out, or choose one of {', '.join(QUANTIZATIONS)}.",
    )


def _described(config: WorkerConfig) -> tuple[WorkerConfig, DecoderSpec, StoredQuantization | None]:
    """`config` with the form of the weights resolved, and what the model's settings say."""
    directory = Path(config.model_path)
    hf_config = read_config(directory)
    spec, quantized = describe(hf_config), stored_quantization(directory, hf_config)
    asked = config.quantization
    if quantized is None:
        if asked in STORED:
            raise _is_no_choice(asked)
    elif asked not in ("none", quantized.method):
        raise StartupError(
            f"quantization {asked} rounds weights at load, but the checkpoint is quantised already: "
            f"{quantized.scheme.description}.",
            "Leave --quantization out, or use the model's unquantised checkpoint.",
        )
    elif config.load_format == "dummy":
        raise StartupError(
            f"load_format dummy has no weights for a quantised checkpoint: {quantized.scheme.description}.",
            "Leave --load-format out, or take the settings of the quantisation out of config.json.",
        )
    else:
        config = config.with_(quantization=quantized.method)
    _check_parallel(config, spec)
    return config, spec, quantized


def _check_limits(config: WorkerConfig) -> None:
    for field, choices in _CHOICES.items():
        value = getattr(config, field)
        if value not in choices:
            raise StartupError(f"{field} is {value!r}.", f"Choose one of {', '.join(choices)}.")
    for field in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size"):
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
    check_affinity(config)


def _check_at_least_one(field: str, value: int) -> None:
    if value < 1:
        raise StartupError(f"{field} is {value}.", "It must be at least 1.")


def _check_parallel(config: WorkerConfig, spec: DecoderSpec) -> None:
    size = config.tensor_parallel_size
    working = supported_tp_sizes(spec.num_heads, spec.num_kv_heads, spec.intermediate_size)
    if size not in working:
        raise StartupError(
            f"tensor_parallel_size {size} does not fit this model: {spec.num_heads} heads, {spec.num_kv_heads} "
            f"key-value heads, intermediate size {spec.intermediate_size}.",
            f"Sizes that work: {', '.join(map(str, working))}.",
        )
    form, cut = QUANTIZATIONS.get(config.quantization, NONE), (spec.num_heads * spec.head_dim, spec.intermediate_size)
    if not all(form.cuts(inputs, size) for inputs in cut):
        working = [other for other in working if all(form.cuts(inputs, other) for inputs in cut)]
        raise StartupError(
            f"quantization {config.quantization} has groups of {form.group} inputs, and tensor_parallel_size {size} "
            f"cuts the {cut[0]} inputs of attention's output or the {cut[1]} of the MLP's within one.",
            f"Sizes that work: {', '.join(map(str, working))}. Or use --quantization int8.",
        )


def _check_tensors(checkpoint: Checkpoint, spec: DecoderSpec, forms: WeightForms) -> None:
    """Every tensor of the model is there in its shape, and no other. Ranks check again as they load."""
    left = dict(checkpoint.tensors)
    is_gguf = isinstance(checkpoint, GGUFCheckpoint)
    for name, wanted in _wanted(checkpoint, spec, forms).items():
        found = left.pop(name, None)
        if found is None:
            if not wanted.required:
                continue
            raise StartupError(
                f"{checkpoint.directory} holds no tensor {name!r}, which {spec.architecture} needs.",
                "Use a complete checkpoint whose config.json names its true architecture.",
            )
        if not wanted.accepts(found.entry.shape):
            raise StartupError(
                f"{found.path}: tensor {name!r} has shape {list(found.entry.shape)}, "
                f"but config.json makes it {' or '.join(str(list(shape)) for shape in wanted.shapes)}.",
                "Use the config.json that belongs to these weights.",
            )
        if found.entry.dtype not in (GGUF_TYPES if is_gguf else wanted.dtypes):
            if is_gguf:
                raise type_not_served(name, found)
            raise StartupError(
                f"{found.path}: tensor {name!r} is {found.entry.dtype}, which is not supported.",
                "Use the model's bfloat16, float16 or float32 checkpoint.",
            )
    extra = sorted(name for name in left if not is_ignorable(spec, name) and not forms.ignores(name))
    if extra:
        raise StartupError(
            f"{left[extra[0]].path} holds tensor {extra[0]!r}, which {spec.architecture} has no place for"
            f"{f' ({len(extra)} such tensors)' if len(extra) > 1 else ''}.",
            "Use a checkpoint whose config.json names its true architecture; adapters must be merged first.",
        )


def _wanted(checkpoint: Checkpoint, spec: DecoderSpec, forms: WeightForms) -> dict[str, StoredTensor]:
    """The model's tensors, with fused ones in place of their parts where the checkpoint has them fused."""
    shapes = tensor_shapes(spec)
    for layer in range(spec.num_layers):
        for fused, parts in FUSED_TENSORS.items():
            for kind in ("weight", "bias"):
                names = [f"model.layers.{layer}.{part}.{kind}" for part in parts]
                fused_name = f"model.layers.{layer}.{fused}.{kind}"
                if _holds(checkpoint, fused_name, forms) and names[0] in shapes:
                    parts_of = [shapes.pop(name) for name in names]
                    shapes[fused_name] = (sum(shape[0] for shape in parts_of), *parts_of[0][1:])
    wanted: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        form = forms.stored_form(module) if isinstance(forms, CheckpointForms) and len(shape) == 2 else None
        if form is None:
            wanted[name] = stored(tuple(SAFETENSORS_DTYPES), *shape)
        else:
            form.check(module, *shape)
            wanted |= {f"{module}.{kind}": tensor for kind, tensor in form.tensors(*shape).items()}
    return wanted


def _holds(checkpoint: Checkpoint, fused: str, forms: WeightForms) -> bool:
    module, _, kind = fused.rpartition(".")
    stored_so = isinstance(forms, CheckpointForms) and kind == "weight" and forms.has(module)
    return stored_so or fused in checkpoint.tensors


def _resolve_length(asked: int | None, spec: DecoderSpec) -> int:
    if asked is None:
        return spec.default_length
    if asked > spec.longest_length:
        raise StartupError(
            f"max_model_len {asked} is more than the model's {spec.longest_length} positions.",
            f"Use at most {spec.longest_length}.",
        )
    return asked


def _resolve_dtype(
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
    chosen = _served_dtype(declared, device, forms, spec, cpu)
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


def _served_dtype(declared: str, device: str, forms: WeightForms, spec: DecoderSpec, cpu: processor.Processor) -> str:
    """The dtype for a model that declares `declared`, where the operator has not chosen one."""
    if device != "cpu" or cpu.multiplies(declared):
        return declared
    wide, narrow = (weight_bytes(spec, dtype, forms) for dtype in ("float32", declared))
    does_not_fit = wide > free_host_bytes() > narrow
    return declared if does_not_fit else "float32"


def this_cpu() -> processor.Processor:
    """The 16-bit types that are not slow on this machine's CPU, and why others are."""
    level = levels.chosen()
    if level is not None and build.why_not_obtainable(level) is None:
        return processor.Processor(bfloat16=True, float16=True, name="")
    cpu = processor.here()
    return replace(cpu, name=f"{cpu.name}, and no C++ kernels")  # the rank logs why


def _resolve_kv_cache_dtype(asked: str, dtype: str, device: str) -> str:
    form = KV_CACHE_DTYPES.get(asked, asked)
    if form == "auto":
        return dtype
    if form in ITEM_BYTES and form != dtype:
        raise StartupError(
            f"kv_cache_dtype {form} is not the model's dtype, {dtype}.", "Use auto, or a form in 8 bits: int8 or fp8."
        )
    if device == "cuda" and form not in ITEM_BYTES:
        raise StartupError(
            f"kv_cache_dtype {asked} has attention for CPUs only.", "Use --device cpu, or leave --kv-cache-dtype out."
        )
    return form


def _resolve_device(config: WorkerConfig) -> str:
    device = _find_device(config)
    if device == "cuda" and config.quantization != "none":
        raise StartupError(
            f"quantization {config.quantization} has products for CPUs only.",
            "Use --device cpu, or the model's unquantised checkpoint and no --quantization.",
        )
    if device == "cpu":
        levels.chosen()  # raises where the environment names a level of the kernels that this processor has not
    return device


def _find_device(config: WorkerConfig) -> str:
    if config.device == "cpu":
        return "cpu"
    count = cuda_device_count()
    if config.device == "auto" and count == 0:
        return "cpu"
    if count == 0:
        raise StartupError(
            "--device cuda: no CUDA device answers, or torch was built without CUDA.", "Use --device cpu."
        )
    if count < config.tensor_parallel_size:
        raise StartupError(
            f"tensor_parallel_size {config.tensor_parallel_size} needs as many CUDA devices; {count} found.",
            f"Use --tensor-parallel-size {count}, or --device cpu.",
        )
    return "cuda"


def cuda_device_count() -> int:
    """Devices the CUDA driver offers and the installed torch can use; 0 without driver, device or CUDA build."""
    torch = importlib.util.find_spec("torch")
    folders = list(torch.submodule_search_locations or []) if torch is not None else []
    if not any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver on this machine
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
