"""Checks of sizes: values in range, layers and heads that ranks can share, room for KV blocks outside the pool."""

from oarlock.base.errors import StartupError
from oarlock.base.host_memory import free_host_bytes, human_bytes
from oarlock.workers.checks.adapters import check_adapter_limits
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.kv_offload import DEFAULT_SLOT_BYTES
from oarlock.workers.kv_tiers.directory import check_directory, disk_limit, room_on_disk
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.memory_spec import PagesSpec, SlotsSpec
from oarlock.workers.models.hf_quantization import GGUF
from oarlock.workers.platform.dtypes import ITEM_BYTES, KV_CACHE_DTYPES
from oarlock.workers.quantization.registry import NONE, QUANTIZATIONS, STORED
from oarlock.workers.ranks.cpu_affinity import check_affinity

_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", *ITEM_BYTES),
    "quantization": (*QUANTIZATIONS, *STORED, GGUF),
    "load_format": ("auto", "safetensors", "dummy"),
    "kv_cache_dtype": (*KV_CACHE_DTYPES, *ITEM_BYTES),
    "model_impl": ("auto", "oarlock", "transformers"),
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
    """Check the limits of a configuration against each other. Raises `StartupError`."""
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
    check_adapter_limits(config)
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


def check_parallel(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Check the numbers of stages and ranks. Raises `StartupError`, which names the sizes that work."""
    stages = config.pipeline_parallel_size
    if config.max_loras and stages > 1:
        raise StartupError(
            f"--enable-lora with --pipeline-parallel-size {stages}: only the ranks of one stage can agree that an "
            "adapter is loaded.",
            "Use --pipeline-parallel-size 1 and --tensor-parallel-size.",
        )
    if stages > spec.most_stages:
        pairs = "" if spec.most_stages == spec.num_layers else f", of which {spec.most_stages} can begin a stage"
        raise StartupError(
            f"pipeline_parallel_size {stages} does not fit this model: it has {spec.num_layers} layers{pairs}.",
            f"Use --pipeline-parallel-size {spec.most_stages} at most, so that every stage has a layer.",
        )
    if config.enable_expert_parallel and not spec.has_experts:
        raise StartupError(
            f"--enable-expert-parallel distributes experts over ranks, but {spec.architecture} has none.",
            "Leave it out.",
        )
    if stages > 1:
        _check_shared_pages(stages, spec)
    size = config.tensor_parallel_size
    working, sublayers = spec.tp_sizes, spec.sublayers
    if size not in working:
        sizes = dict.fromkeys(sublayer.sizes for sublayer in sublayers)
        raise StartupError(
            f"tensor_parallel_size {size} does not fit this model: {', '.join(sizes)}.",
            f"Sizes that work: {', '.join(map(str, working))}.",
        )
    weight_format = QUANTIZATIONS.get(config.quantization, NONE)
    if not all(weight_format.can_split(sublayer.shared_inputs, size) for sublayer in sublayers):
        working = [
            other for other in working if all(weight_format.can_split(one.shared_inputs, other) for one in sublayers)
        ]
        cut = dict.fromkeys(sublayer.shared_inputs_name for sublayer in sublayers)
        raise StartupError(
            f"quantization {config.quantization} has groups of {weight_format.group} inputs, and tensor_parallel_size "
            f"{size} would split a group of the {' or the '.join(cut)}.",
            f"Sizes that work: {', '.join(map(str, working))}. Or use --quantization int8.",
        )


def check_drafts(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Check that the state after a rejected draft can be rolled back. Raises `StartupError`."""
    if config.num_speculative_tokens and any(isinstance(group.memory, SlotsSpec) for group in spec.groups):
        raise StartupError(
            f"--speculative-config does not support models with recurrent layers, such as {spec.architecture}: the "
            "state after a rejected draft cannot be rolled back.",
            "Leave it out.",
        )


def check_has_pages(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Check that there are keys and values if a format of theirs is given. Raises `StartupError`."""
    if config.kv_cache_dtype != "auto" and not any(isinstance(group.memory, PagesSpec) for group in spec.groups):
        raise StartupError(
            f"--kv-cache-dtype {config.kv_cache_dtype} is a format of keys and values, but {spec.architecture} has no "
            "attention.",
            "Leave it out.",
        )


def _check_shared_pages(stages: int, spec: DecoderSpec) -> None:
    """Check that layers which read another layer's pages are in the stage of that layer, and that layers have no inputs
    of their own, which the first stage computes. Raises `StartupError`."""
    if spec.layer_inputs is not None:
        raise StartupError(
            f"pipeline_parallel_size {stages} does not fit this model: the first stage computes inputs of every layer.",
            "Use --pipeline-parallel-size 1 and --tensor-parallel-size.",
        )
    for stage in range(stages):
        layers = spec.layers_of_stage(stage, stages)
        for layer in layers:
            for memory in spec.layers[layer].memories:
                if isinstance(memory, PagesSpec) and memory.of_layer is not None and memory.of_layer not in layers:
                    raise StartupError(
                        f"pipeline_parallel_size {stages} does not fit this model: layer {layer} reads the keys and "
                        f"values of layer {memory.of_layer}, which is in another stage.",
                        "Use fewer stages, or --tensor-parallel-size.",
                    )


_LEAST_DISK_BYTES = 1 << 20


def with_kv_offload(config: WorkerConfig, spec: DecoderSpec) -> WorkerConfig:
    """Return `config` with the sizes of the tiers below the pool. Raises `StartupError`."""
    if not config.offloads_kv:
        return config
    if config.nnodes > 1:
        raise StartupError(
            f"--kv-offload-memory and --kv-offload-path need all ranks on one host, and --nnodes is {config.nnodes}.",
            "Leave them out, or run a replica on each host.",
        )
    memories = [group.memory for group in spec.groups]
    if any(isinstance(memory, SlotsSpec) for memory in memories):
        raise StartupError(
            f"--kv-offload-memory and --kv-offload-path keep keys and values, and {spec.architecture} has recurrent "
            "layers, whose state they do not keep.",
            "Leave them out.",
        )
    spans = [memory.span for memory in memories if isinstance(memory, PagesSpec) and memory.span is not None]
    if len(spans) == len(memories):
        raise StartupError(
            f"Every layer of this model has a sliding window or chunks, of up to {max(spans)} tokens. Blocks "
            "before it are dropped, so --kv-offload-memory and --kv-offload-path would have no effect.",
            "Leave them out.",
        )
    if len(memories) > 1:
        raise StartupError(
            "--kv-offload-memory and --kv-offload-path need layers that do not differ in heads or widths of keys and "
            f"values, and {spec.architecture} has {len(memories)} memory groups.",
            "Leave them out.",
        )
    for stage in range(config.pipeline_parallel_size):
        layers = spec.layers_of_stage(stage, config.pipeline_parallel_size)
        if not any(layer in layers for group in spec.groups for layer in group.layers):
            raise StartupError(
                f"--kv-offload-memory and --kv-offload-path need attention in every pipeline stage, and layers "
                f"{layers.start} to {layers.stop - 1} have none.",
                "Leave them out, or use fewer stages.",
            )
    memory, disk = config.kv_offload_bytes, config.kv_offload_disk_bytes
    if config.kv_offload_path is not None:
        memory = memory or DEFAULT_SLOT_BYTES
        check_directory(config.kv_offload_path)
        _check_disk(config.kv_offload_path, disk)
        disk = disk_limit(config.kv_offload_path, disk)
        if disk < _LEAST_DISK_BYTES:
            raise StartupError(
                f"kv_offload_path {config.kv_offload_path} has no room: {human_bytes(disk)} of its disk can be used.",
                "Free space on it, choose another disk, or raise --kv-offload-disk.",
            )
    assert memory is not None
    wanted = memory * config.ranks_on_host
    free = free_host_bytes() if config.host_free_bytes is None else config.host_free_bytes
    if wanted > free:
        raise StartupError(
            f"kv_offload_memory needs {human_bytes(wanted)} of host memory ({config.ranks_on_host} rank(s) x "
            f"{human_bytes(memory)}), and {human_bytes(free)} is free.",
            "Lower --kv-offload-memory.",
        )
    return config.with_(kv_offload_bytes=memory, kv_offload_disk_bytes=disk)


def _check_disk(path: str, requested: int | None) -> None:
    """Check that a given `--kv-offload-disk` fits on its disk, including the existing files."""
    most = room_on_disk(path)
    if requested is not None and requested > most:
        raise StartupError(
            f"kv_offload_disk needs {human_bytes(requested)}, but the disk of {path} has only {human_bytes(most)}.",
            f"Lower --kv-offload-disk to {most >> 20}MiB or less, free space, or choose another disk.",
        )
