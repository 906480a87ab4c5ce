"""Memory of a rank: of its weights, of a step, and how many KV blocks fit beside them; the errors show the arithmetic.

Torch-free; allocates nothing. What a tensor takes follows from its description (`layers/tensor_spec.py`), and the
layout of pages belongs to the attention backend. A rank reports after loading (`Decoder.weight_bytes`) the sum over
what it really holds; tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec, layers_of_stage, slices_of, tensors_of
from oarlock.workers.layers.sharding import shard_experts
from oarlock.workers.layers.tensor_spec import Cut, Kept, TensorSpec
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.platform.dtypes import ITEM_BYTES, KV_CACHE_DTYPES, KVShape
from oarlock.workers.platform.host_memory import free_host_bytes, human_bytes
from oarlock.workers.quantization.formats.form import unit_of_width
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.runner.buckets import logits_rows_at_once

if TYPE_CHECKING:
    from oarlock.workers.quantization.formats.form import WeightForms

_FLOAT32 = 4
# Rows of logits computed at once. Scoring a prompt may need thousands of rows, 600 KB each with 152,000 ids.
MAX_LOGITS_ROWS = 128
# Parts of the messages of torch's CPU and CUDA allocators and of the system.
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "bad_alloc")
# Share of the memory that is free once the weights are loaded; the rest is for other processes and the page cache.
CPU_SHARE = 0.25
# Block 0 is the null block, and a backend may keep one page that is never written.
RESERVED_BLOCKS = 2


def encoder_weight_bytes(spec: EncoderSpec, dtype: str) -> int:
    """Bytes of all weights, on one rank or cut without copies; of a few small ones each rank holds a copy."""
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values()) * ITEM_BYTES[dtype]


def encoder_step_bytes(spec: EncoderSpec, num_ranks: int, num_tokens: int) -> int:
    """Bytes of the tensors of a step that exist at the same time on one rank, most of them float32: hidden states and
    their sums, queries, keys and values with a copy, and the MLP's."""
    inner = (3 if spec.gated else 2) * spec.intermediate_size
    return num_tokens * _FLOAT32 * (4 * spec.hidden_size + (7 * spec.hidden_size + inner) // num_ranks)


def rank_weight_bytes(config: WorkerConfig, spec: DecoderSpec, forms: WeightForms = NONE, stage: int = 0) -> int:
    """Bytes of the weights of any rank of `stage`: all have as many, but for whole experts that do not divide evenly,
    of which the first has the most. `config`: with its dtype resolved."""
    return sum(size for _, size in rank_tensors(config, spec, forms, stage))


def rank_tensors(
    config: WorkerConfig, spec: DecoderSpec, forms: WeightForms = NONE, stage: int = 0
) -> Iterator[tuple[TensorSpec, int]]:
    """Tensors that the first rank of `stage` holds, and the bytes of its part of each."""
    size, on_cpu = config.tensor_parallel_size, config.device != "cuda"
    all_slices = slices_of(spec, forms) if on_cpu else 1
    slices = all_slices // size if all_slices % size == 0 else 1  # as `Placement.local_slices`
    layers = layers_of_stage(spec.num_layers, stage, config.pipeline_parallel_size)
    item = ITEM_BYTES[config.dtype]
    for tensor in tensors_of(spec, layers):
        cut = size, all_slices
        if tensor.expert is not None and config.enable_expert_parallel:
            if tensor.expert >= shard_experts(tensor.experts, 0, size, all_slices).count:
                continue
            cut = 1, 1
        shape = _local_shape(tensor, forms, *cut)
        if tensor.is_matrix:
            yield tensor, _matrix_bytes(tensor, shape, forms, item, slices if cut[0] == size else 1)
        else:
            is_wide = tensor.kept is Kept.FLOAT32 or (tensor.kept is Kept.FOR_KERNELS and on_cpu)
            yield tensor, math.prod(shape) * (_FLOAT32 if is_wide else item)


def _local_shape(tensor: TensorSpec, forms: WeightForms, size: int, slices: int) -> tuple[int, ...]:
    """Shape of the part that each of `size` ranks holds; widths are filled up to `slices` over all ranks."""
    if tensor.cut not in (Cut.WIDTH_OUTPUTS, Cut.WIDTH_INPUTS):
        return tensor.local_shape(size)
    down = f"{tensor.name.rpartition('.')[0].rpartition('.')[0]}.down_proj"  # the product that is cut
    return tensor.local_shape(size, slices, unit_of_width(forms.form_of(down)))


def _matrix_bytes(tensor: TensorSpec, shape: tuple[int, ...], forms: WeightForms, item: int, slices: int) -> int:
    """Bytes of a matrix of `shape`, the whole of `tensor` or a rank's part."""
    if tensor.kept is Kept.FLOAT32:
        return math.prod(shape) * _FLOAT32
    own = forms.of_head if tensor.cut is Cut.VOCABULARY else forms
    form = own.form_of(tensor.name.removesuffix(".weight"))
    return form.weight_bytes(*shape, item, slices if tensor.cut in (Cut.INPUTS, Cut.WIDTH_INPUTS) else 1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch raises its own kinds of `RuntimeError`, numpy a `MemoryError`."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError | ImportError) and any(message in text for message in _MESSAGES)


def weight_bytes(spec: DecoderSpec, dtype: str, forms: WeightForms = NONE) -> int:
    """Bytes of the weights of the whole model, on one rank or cut without copies."""
    item, total, slices = ITEM_BYTES[dtype], 0, slices_of(spec, forms)
    for tensor in tensors_of(spec):
        if tensor.is_matrix:
            total += _matrix_bytes(tensor, _local_shape(tensor, forms, 1, slices), forms, item, slices)
        else:
            total += math.prod(tensor.shape) * item
    return total


def step_bytes(config: WorkerConfig, spec: DecoderSpec, num_tokens: int, num_rows: int) -> int:
    """Bytes of the tensors of a step that exist at the same time on one rank: a few of hidden size, those of a layer's
    sublayers, and float32 logits. `num_rows`: of logits."""
    size, item = config.tensor_parallel_size, ITEM_BYTES[config.dtype]
    inner = max(sum(branch.sublayer.step_values for branch in layer.branches) for layer in set(spec.layers))
    row = 4 * spec.hidden_size + inner // size
    return num_tokens * row * item + min(num_rows, MAX_LOGITS_ROWS) * spec.vocab_size // size * 4


def largest_step_bytes(config: WorkerConfig, spec: DecoderSpec, *, has_head: bool = True) -> int:
    """Bytes of the largest step that the limits allow. `has_head`: whether the rank computes logits."""
    tokens = config.max_num_batched_tokens
    return step_bytes(config, spec, tokens, tokens if has_head else 0)


def sampling_bytes(config: WorkerConfig, spec: DecoderSpec) -> int:
    """Bytes that a rank on a CUDA device keeps to sample from: float32 logits, the same as penalties and masks change
    them, and int32 counts of every id for each sequence (`DenseHistories`). Of several ranks each has its own ids of
    all rows, and all ids of its share of the rows (`RowSampler`)."""
    rows, ranks, vocab = logits_rows_at_once(config), config.tensor_parallel_size, spec.vocab_size
    logits = vocab * rows if ranks == 1 else -(-vocab // ranks) * rows + vocab * -(-rows // ranks)
    return 4 * (2 * logits + vocab * config.max_num_seqs)


def check_weights_fit(config: WorkerConfig, spec: DecoderSpec, dtype: str, forms: WeightForms) -> None:
    """Checks that the weights fit on the CPU, where the ranks of all replicas on a node share the memory. Raises
    `StartupError` (exit code 4) with the arithmetic."""
    of_replica, replicas = weight_bytes_of_node(config, spec, dtype, forms), config.data_parallel_size
    need, free = replicas * of_replica, free_before_load(config)
    if need > free:
        of = "" if config.nnodes == 1 else f" on one of {config.nnodes} nodes"
        of += "" if replicas == 1 else f" {replicas} x {human_bytes(of_replica)} ="
        raise StartupError(
            f"Not enough memory for the weights: {spec.num_parameters:,} parameters in {form_name(config, dtype)} "
            f"need{of} {human_bytes(need)}, and {human_bytes(free)} is free.",
            _smaller(config, dtype, "Free memory" if replicas == 1 else "Lower --data-parallel-size") + ".",
            EXIT_OUT_OF_MEMORY,
        )


def check_kv_fits(config: WorkerConfig, spec: DecoderSpec, forms: WeightForms) -> None:
    """Check that a CPU rank's KV memory holds one sequence before weights are read: a given size, or the share of the
    memory that is free once they are. A given size must itself fit in that memory.

    Raises `StartupError` (exit code 4) with the arithmetic. `config`: all resolved."""
    loading = config.with_(host_free_bytes=free_before_load(config))
    weights = weight_bytes_of_node(config, spec, config.dtype, forms)
    blocks_that_fit(kv_shape(config, spec), config, room_for_kv(loading, None, 0, weight_bytes=weights))
    check_given_sizes_fit_host(config, weights * config.data_parallel_size)


def check_given_sizes_fit_host(config: WorkerConfig, weights: int) -> None:
    """Check that KV memory and host tiers of the sizes that were given fit beside `weights`, the bytes of all replicas.

    Swap does not count, as every step reads KV memory. Raises `StartupError` (exit code 4) with the arithmetic."""
    ranks, free = config.ranks_on_host, free_before_load(config)
    given = (("--kv-cache-memory", config.kv_cache_bytes), ("--kv-offload-memory", config.kv_offload_bytes))
    sizes = [(name, size) for name, size in given if size]
    need = weights + ranks * sum(size for _, size in sizes)
    if not sizes or need <= free:
        return
    parts = [f"{human_bytes(weights)} of weights"] if weights else []
    parts += [f"{ranks} x {human_bytes(size)} of {name}" for name, size in sizes]
    name, largest = max(sizes, key=lambda pair: pair[1])
    rest = free - need + ranks * largest
    fix = f"Lower {name} to {rest // ranks >> 20}MiB or less" if rest // ranks >> 20 else f"Lower {name}"
    automatic = ", or leave it out: the size is then measured" if name == "--kv-cache-memory" else ""
    shared = "" if config.data_parallel_size == 1 else ", or lower --data-parallel-size"
    raise StartupError(
        f"Not enough memory for the sizes that are given: {' and '.join(parts)} ({ranks} rank(s) on this host) take "
        f"{human_bytes(need)}, and {human_bytes(free)} is free, swap not counted.",
        f"{fix}{automatic}{shared}.",
        EXIT_OUT_OF_MEMORY,
    )


def check_given_size_fits_device(
    config: WorkerConfig, spec: DecoderSpec, forms: WeightForms, device_bytes: int, ranks_of_device: int
) -> None:
    """Check that `--kv-cache-memory` fits on a CUDA device of `device_bytes` beside a rank's weights, before they are
    read. Raises `StartupError` (exit code 4) with the arithmetic."""
    given = config.kv_cache_bytes or 0
    weights = max(rank_weight_bytes(config, spec, forms, stage) for stage in range(config.pipeline_parallel_size))
    need = ranks_of_device * (weights + given)
    if need > device_bytes:
        most = (device_bytes // ranks_of_device - weights) >> 20
        times = "" if ranks_of_device == 1 else f"{ranks_of_device} ranks on one device, each with "
        raise StartupError(
            f"Not enough device memory for --kv-cache-memory: {times}{human_bytes(weights)} of weights and "
            f"{human_bytes(given)} of KV memory take {human_bytes(need)}, and a device has "
            f"{human_bytes(device_bytes)}.",
            f"Lower --kv-cache-memory below {most}MiB, or leave it out: the size is then measured."
            if most > 0
            else "Use more ranks (--tensor-parallel-size), larger devices or smaller weights.",
            EXIT_OUT_OF_MEMORY,
        )


def free_before_load(config: WorkerConfig) -> int:
    """Bytes of the host's memory before any rank has loaded; while other replicas load, as it was before them."""
    return free_host_bytes() if config.host_free_bytes is None else config.host_free_bytes


def weight_bytes_of_node(config: WorkerConfig, spec: DecoderSpec, dtype: str, forms: WeightForms) -> int:
    """Bytes of the weights of all ranks of a node; of the node with the most."""
    topology, config = Topology.of(config), config.with_(dtype=dtype)
    stages = range(topology.pipeline_parallel_size)
    of_rank = [rank_weight_bytes(config, spec, forms, stage) for stage in stages]
    nodes = range(topology.nnodes)
    return max(sum(of_rank[topology.stage_of(rank)] for rank in topology.ranks_of(node)) for node in nodes)


def out_of_memory(
    config: WorkerConfig,
    spec: DecoderSpec,
    weight_bytes: int,
    doing: str,
    kv_bytes: int | None,
    free_bytes: int,
    measured_step_bytes: int | None = None,
    graph_bytes: int = 0,
) -> StartupError:
    """The error for an allocation that failed while `doing`. `weight_bytes`: of this rank. `kv_bytes`: of KV memory,
    once it is known. `measured_step_bytes`: of the largest step, in place of the estimate. `graph_bytes`: of decode
    graphs."""
    step = measured_step_bytes or largest_step_bytes(config, spec)
    about = "" if measured_step_bytes else "about "
    parts = [
        f"{human_bytes(weight_bytes)} of weights ({form_name(config, config.dtype)})",
        f"{about}{human_bytes(step)} for a step of {config.max_num_batched_tokens} tokens",
    ]
    if config.device == "cuda":
        parts.append(f"{human_bytes(sampling_bytes(config, spec))} of logits and histories to sample from")
    if graph_bytes:
        parts.append(f"{human_bytes(graph_bytes)} for graphs")
    if kv_bytes is not None:
        parts.append(f"{human_bytes(kv_bytes)} of KV memory")
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    ranks = "" if num_ranks == 1 else f" of {num_ranks}"
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
        EXIT_OUT_OF_MEMORY,
    )


def form_name(config: WorkerConfig, dtype: str) -> str:
    """Name of the form that the weights are in, for messages."""
    if config.dequantize:
        return f"{config.quantization} dequantised to {dtype}"
    return dtype if config.quantization == "none" else f"{config.quantization} and {dtype}"


def _smaller(config: WorkerConfig, dtype: str, first: str) -> str:
    sixteen = ", or --dtype bfloat16, which is half as large" if dtype == "float32" else ""
    fewer = {"none": "int8 or int4", "int8": "int4"}.get(config.quantization)
    rounded = f", or --quantization {fewer}" if fewer and config.device != "cuda" else ""
    packed = ", leave --dequantize out" if config.dequantize else ""
    return f"{first}, use a smaller model{packed}{sixteen}{rounded}"


class MemoryMeter(Protocol):
    """Memory of one device, in bytes."""

    def total_bytes(self) -> int:
        """Bytes of the whole device."""

    def free_bytes(self) -> int:
        """Bytes that no process holds, after this one has given back those that it does not use."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most that `run` took from the device beside what was held before; it is given back."""


class KVRoom(NamedTuple):
    """Bytes this rank may use for KV memory, and where the number comes from, in words that end before it."""

    available: int
    source: str


def room_for_kv(
    config: WorkerConfig, meter: MemoryMeter | None, step_bytes: int, graph_bytes: int = 0, weight_bytes: int = 0
) -> KVRoom:
    """Memory for KV blocks: the size that is given, or else measured once the weights are loaded and the largest step
    has run, which took `step_bytes`.

    `graph_bytes`: of all graphs. `meter`: of the device; None for the host's memory. Where replicas load side by
    side, the host's free memory was measured before: each replica then takes another `weight_bytes` from it.
    """
    if config.kv_cache_bytes is not None:
        return room_given(config)
    if meter is not None:
        total = meter.total_bytes()
        return room_on_device(config, total, total - meter.free_bytes(), step_bytes, graph_bytes)
    if config.host_free_bytes is None:
        return room_on_host(config, free_host_bytes())
    return room_on_host(config, max(0, config.host_free_bytes - config.data_parallel_size * weight_bytes))


def room_given(config: WorkerConfig) -> KVRoom:
    """Memory for KV blocks that `--kv-cache-memory` gives."""
    assert config.kv_cache_bytes is not None
    return KVRoom(config.kv_cache_bytes, "--kv-cache-memory gives")


def room_on_device(config: WorkerConfig, total: int, used: int, step_bytes: int, graph_bytes: int = 0) -> KVRoom:
    """Memory for KV blocks on a device with `total` bytes, of which `used` are taken when the weights are loaded."""
    share = config.gpu_memory_utilization
    graphs = f", {human_bytes(graph_bytes)} for graphs" if graph_bytes else ""
    source = (
        f"--gpu-memory-utilization {share} of {human_bytes(total)} leaves, beside {human_bytes(used)} in use"
        f"{graphs} and {human_bytes(step_bytes)} for a step of {config.max_num_batched_tokens} tokens,"
    )
    # The rest is for libraries and other processes.
    return KVRoom(max(0, int(share * total) - used - step_bytes - graph_bytes), source)


def room_on_host(config: WorkerConfig, free: int) -> KVRoom:
    """Memory for a rank's KV blocks on a host with `free` bytes when the weights of all its ranks are loaded."""
    ranks = config.ranks_on_host
    free = max(0, free - (config.kv_offload_bytes or 0) * ranks)
    return KVRoom(int(free * CPU_SHARE) // ranks, f"{CPU_SHARE:.0%} of free memory shared by {ranks} rank(s) is")


def kv_shape(config: WorkerConfig, spec: DecoderSpec, stage: int = 0) -> KVShape:
    """KV memory of a rank of `stage`; the first has the most layers. `config`: with its dtype and lengths resolved."""
    attention = spec.attention
    return KVShape(
        num_layers=len(layers_of_stage(spec.num_layers, stage, config.pipeline_parallel_size)),
        num_kv_heads=attention.kv_heads_of_rank(config.tensor_parallel_size),
        head_dim=attention.head_dim,
        block_size=config.block_size,
        item_bytes=ITEM_BYTES[config.dtype],
        cache_dtype=KV_CACHE_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype),
    )


def blocks_that_fit(spec: KVShape, config: WorkerConfig, room: KVRoom) -> int:
    """Blocks to allocate, the null block included: at least one full sequence's, or any at all where its length is
    fitted to them, else `StartupError` (exit code 4).

    Of measured host memory at most what `max_num_seqs` full sequences can use is taken. A given size and device memory
    are used whole, because spare blocks keep cached prefixes for later requests.
    """
    assert config.max_model_len is not None, "preflight resolves the context length"
    per_sequence = -(-config.max_model_len // spec.block_size)
    fitting = room.available // spec.bytes_per_block
    least = 1 if config.fit_model_len else per_sequence
    if fitting < least + RESERVED_BLOCKS:
        raise _too_small(spec, config, room, per_sequence)
    blocks = fitting - RESERVED_BLOCKS + 1
    if config.kv_cache_bytes is None and config.device != "cuda":
        blocks = min(blocks, config.max_num_seqs * per_sequence + 1)
    return blocks


def fitted_length(config: WorkerConfig, num_blocks: int) -> int:
    """Find the longest sequence of a pool of `num_blocks`, the null block included, where it may be fitted."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    if not config.fit_model_len:
        return config.max_model_len
    return min(config.max_model_len, (num_blocks - 1) * config.block_size)


def check_given_size(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Checks that `--kv-cache-memory` holds one sequence, as far as that can be known before a rank starts."""
    blocks_that_fit(kv_shape(config, spec), config, room_given(config))


def _too_small(spec: KVShape, config: WorkerConfig, room: KVRoom, per_sequence: int) -> StartupError:
    available, need = room.available, (per_sequence + RESERVED_BLOCKS) * spec.bytes_per_block
    largest = max(0, (available // spec.bytes_per_block - RESERVED_BLOCKS) * spec.block_size)
    cause = (
        f"Not enough KV memory for one sequence of {config.max_model_len} tokens: it needs {human_bytes(need)} per "
        f"rank ({per_sequence} + {RESERVED_BLOCKS} blocks x {spec.block_size} tokens x {spec.bytes_per_token} bytes = "
        f"2 x {spec.num_layers} layers x {spec.num_kv_heads} KV heads x {_row(spec)} bytes a token), and {room.source} "
        f"{human_bytes(available)}."
    )
    eight = "use --kv-cache-dtype int8, " if not spec.is_rounded and config.device != "cuda" else ""
    shorter = f"lower --max-model-len to {largest} or less" if largest else "free memory or use a smaller model"
    if config.device == "cuda" and config.kv_cache_bytes is None:
        fix = (
            "Lower --max-num-batched-tokens, raise --gpu-memory-utilization, use more ranks (--tensor-parallel-size), "
            f"or {shorter}."
        )
    else:
        fix = f"Raise --kv-cache-memory to {-(-need // 2**20)}MiB, {eight}or {shorter}."
    return StartupError(cause, fix, EXIT_OUT_OF_MEMORY)


def _row(spec: KVShape) -> str:
    """The bytes of one KV head's key, or value, of one token, in factors."""
    item, scale = divmod(spec.bytes_per_row, spec.head_dim)
    return f"({spec.head_dim} x {item} + {scale})" if scale else f"{spec.head_dim} x {item}"
