"""Choice of the device and the dtypes of a start, if they are not given, and checks that kernels support them."""

import logging
from dataclasses import replace

from oarlock.base.errors import StartupError
from oarlock.base.host_memory import free_host_bytes, human_bytes
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.kernels.cpu import build
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.located import LocatedTensor
from oarlock.workers.platform import cuda_driver, processor
from oarlock.workers.platform.dtypes import ITEM_BYTES, KV_CACHE_DTYPES, SAFETENSORS_DTYPES
from oarlock.workers.platform.processor import available_cores
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.runner.memory_needs import weight_bytes

logger = logging.getLogger("oarlock.preflight")


def ranks_here(config: WorkerConfig) -> int:
    """Return the number of ranks on one host, over all replicas. Each gets its own device if there are enough."""
    return Topology.of(config).ranks_per_node * config.data_parallel_size


def resolve_device(config: WorkerConfig) -> str:
    """Resolve the device, `cpu` or `cuda`, and check that it can serve. Raises `StartupError`."""
    device = _find_device(config)
    if device == "cuda":
        check_matmuls_on_cuda(config)
    else:
        _check_cores(config)
        build.chosen()  # raises if the environment names an ISA level that this processor lacks
    return device


def _check_cores(config: WorkerConfig) -> None:
    """Refuse replicas that would take turns on a core, since they are slower than a single one. Raises
    `StartupError`."""
    replicas, cores = config.data_parallel_size, available_cores()
    if replicas == 1 or config.ranks_on_host <= cores:
        return
    most = cores // config.ranks_per_node
    raise StartupError(
        f"--data-parallel-size {replicas} x {config.ranks_per_node} rank(s) of a replica makes {config.ranks_on_host} "
        f"ranks for {cores} CPU core(s): replicas would take turns.",
        f"Use --data-parallel-size {most}." if most > 1 else "Leave --data-parallel-size out: one replica is faster.",
    )


def check_matmuls_on_cuda(config: WorkerConfig) -> None:
    """Check that Triton kernels run if quantised weights, adapters or `--batch-invariant` need them. Raises
    `StartupError`."""
    if config.batch_invariant:
        _check_batch_invariance(config)
    if config.quantization == "none" and not config.max_loras:
        return
    wrong = cuda_driver.why_not_triton(ranks_here(config))
    if wrong is not None:
        what = "--enable-lora" if config.quantization == "none" else f"quantization {config.quantization}"
        raise StartupError(f"{what} on CUDA needs Triton kernels: {wrong[0]}.", wrong[1])


def _check_batch_invariance(config: WorkerConfig) -> None:
    """Check that the batch-invariant CUDA kernels support this configuration. Raises `StartupError`."""
    wrong = cuda_driver.why_not_triton(ranks_here(config))
    if wrong is not None:
        reason = f"needs Triton kernels: {wrong[0]}"
    elif config.quantization != "none":
        reason = f"does not support quantization {config.quantization}: large batches use another kernel"
    elif config.dtype == "float16" and config.kv_cache_dtype == "int8":
        reason = (
            "does not support int8 pages in float16, where small attention weights lose precision: use fp8 or bfloat16"
        )
    elif config.attention_backend not in ("auto", "triton"):
        reason = f"needs the Triton attention backend, not {config.attention_backend}"
    else:
        return
    raise StartupError(f"--batch-invariant on CUDA {reason}.", "Leave --batch-invariant out, or use --device cpu.")


def _find_device(config: WorkerConfig) -> str:
    if config.device == "cpu":
        return "cpu"
    count = cuda_driver.device_count()
    driver, built = cuda_driver.driver_version(), cuda_driver.built_for()
    too_old = cuda_driver.why_too_old(driver, built) if driver is not None and built is not None else None
    if too_old is not None and config.device == "auto":
        logger.warning("event=device_chosen device=cpu reason=%r fix=%r", *too_old)
        return "cpu"
    if too_old is not None:
        raise StartupError(f"--device cuda: {too_old[0]}.", too_old[1])
    if config.device == "auto" and count == 0:
        return "cpu"
    if count == 0:
        raise StartupError(
            "--device cuda: no CUDA device responds, or torch was built without CUDA.", "Use --device cpu."
        )
    needed = ranks_here(config)
    if count < needed and not config.share_device:
        raise _too_few_devices(config, needed, count)
    return "cuda"


def _too_few_devices(config: WorkerConfig, needed: int, count: int) -> StartupError:
    of_replica = needed // config.data_parallel_size
    if config.data_parallel_size > 1:
        fewer = f"--data-parallel-size {count // of_replica}" if count >= of_replica else "smaller sizes"
        return StartupError(
            f"data_parallel_size {config.data_parallel_size} x {of_replica} rank(s) of a replica needs {needed} CUDA "
            f"devices; {count} found.",
            f"Use {fewer}, or --device cpu.",
        )
    if config.nnodes == 1 and config.pipeline_parallel_size == 1:
        return StartupError(
            f"tensor_parallel_size {needed} needs as many CUDA devices; {count} found.",
            f"Use --tensor-parallel-size {count}, or --device cpu.",
        )
    sizes = f"tensor_parallel_size {config.tensor_parallel_size} x pipeline_parallel_size "
    sizes += f"{config.pipeline_parallel_size} on {config.nnodes} host(s)"
    return StartupError(
        f"{sizes} needs {needed} CUDA devices on each host; this one has {count}.",
        "Use smaller sizes, more hosts, or --device cpu.",
    )


def resolve_dtype(
    config: WorkerConfig,
    device: str,
    spec: DecoderSpec,
    checkpoint: Checkpoint | None,
    formats: WeightFormats,
    cpu: processor.Processor,
) -> str:
    """Return the requested dtype, else the dtype in config.json, else the dtype of the stored embedding.

    If a CPU would emulate a 16-bit dtype, a model of that dtype runs in float32, unless the dtype is requested. The C++
    kernels emulate none: they widen 16-bit values as they read them, on every ISA level.
    """
    requested = config.dtype
    if requested != "auto":
        if device == "cpu" and not cpu.multiplies(requested):
            logger.warning(
                "event=slow_dtype dtype=%s reason=%r",
                requested,
                f"{cpu.name}, so {requested} matmuls are emulated, many times slower than in float32, which "
                "--dtype auto chooses",
            )
        return requested
    found = None if checkpoint is None else _embedding(checkpoint, spec)
    stored = "float32" if found is None else SAFETENSORS_DTYPES.get(found.entry.dtype, "bfloat16")
    declared = spec.dtype or stored
    chosen = served_dtype(config, declared, device, formats, spec, cpu)
    if device != "cpu" or cpu.multiplies(declared):
        return chosen
    slow = f"{declared} matmuls are slow here ({cpu.name})"
    wide, narrow = (human_bytes(weight_bytes(spec, dtype, formats)) for dtype in ("float32", declared))
    if chosen == declared:
        reason = f"{slow}, but float32 weights need {wide}, more than is available"
        logger.warning("event=dtype_chosen dtype=%s reason=%r", chosen, reason)
    else:
        reason = f"{slow}: weights take {wide} instead of {narrow}, and KV memory twice as much for each token"
        logger.info("event=dtype_chosen dtype=%s reason=%r", chosen, reason)
    return chosen


def _embedding(checkpoint: Checkpoint, spec: DecoderSpec) -> LocatedTensor | None:
    """Return the stored embedding. Classes that transformers' code computes have other names for it, so the first
    tensor stands in for it there."""
    if spec.class_tensors is None:
        return checkpoint.find("model.embed_tokens.weight")
    return next(iter(checkpoint.tensors.values()), None)


def served_dtype(
    config: WorkerConfig,
    declared: str,
    device: str,
    formats: WeightFormats,
    spec: DecoderSpec,
    cpu: processor.Processor,
) -> str:
    """Return the dtype for a model that declares `declared`, if the operator has not chosen one.

    Each of several hosts holds its part of the weights, each of several replicas all of them.
    """
    if device != "cpu" or cpu.multiplies(declared):
        return declared
    wide, narrow = (weight_bytes(spec, dtype, formats) // config.nnodes for dtype in ("float32", declared))
    free = free_host_bytes() if config.host_free_bytes is None else config.host_free_bytes
    does_not_fit = wide > free // config.data_parallel_size > narrow
    return declared if does_not_fit else "float32"


def this_cpu() -> processor.Processor:
    """Return the 16-bit dtypes that are not slow on this machine's CPU, and why others are."""
    level = build.chosen()
    if level is not None and build.why_not_obtainable(level) is None:
        return processor.Processor(bfloat16=True, float16=True, name="")
    cpu = processor.here()
    return replace(cpu, name=f"{cpu.name}, and no C++ kernels")  # the rank logs the reason


def resolve_kv_cache_dtype(requested: str, dtype: str) -> str:
    kv_format = KV_CACHE_DTYPES.get(requested, requested)
    if kv_format == "auto":
        return dtype
    if kv_format in ITEM_BYTES and kv_format != dtype:
        raise StartupError(f"kv_cache_dtype {kv_format} is not the model's dtype, {dtype}.", "Use auto, int8 or fp8.")
    return kv_format
