"""Memory of a rank: weights, the largest step, and the KV blocks that fit. The errors show the arithmetic.

Torch-free; allocates nothing. The bytes of a tensor follow from its description (`layers/tensor_spec.py`), and the
layout of pages is defined by the attention backend. After loading a rank reports the bytes that its weights really take
(`Decoder.weight_bytes`); tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.base.host_memory import free_host_bytes, human_bytes
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.layers.decoder_spec import (
    EMBEDDING_WEIGHT,
    DecoderSpec,
    slices_of,
    tensors_of,
)
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.sharding import shard_experts
from oarlock.workers.layers.tensor_spec import RankDtype, Sharding, TensorSpec
from oarlock.workers.lora.adapted_modules import HEAD
from oarlock.workers.lora.target_modules import EXPERTS, SlotModules, can_be_adapted
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.platform.dtypes import ITEM_BYTES
from oarlock.workers.quantization.formats.weight_format import unit_of_width
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.runner.buckets import logits_rows_at_once
from oarlock.workers.runner.group_sizes import GroupSizes, with_sequences_that_fit
from oarlock.workers.runner.kv_room import room_for_kv, room_given

if TYPE_CHECKING:
    from oarlock.workers.quantization.formats.weight_format import WeightFormats

_FLOAT32 = 4
# Rows of logits computed at once. Scoring a prompt may need thousands of rows, 600 KB each with 152,000 ids.
MAX_LOGITS_ROWS = 128
_SUMS_AT_ONCE = 240  # rows of a layer with adapters: `kMostRows` in csrc/gemm/strips.h
_MOST_CHOICES, _CHOICES_OF_EXPERT = 2048, 32  # `kMostPairs` and `kPairsOfExpert` in csrc/gemm/experts.cpp
_MOST_SLICES = 8  # `kMostSlices` in csrc/gemm/slices.h
# Memory of each CUDA device for CUDA's context, NCCL, workspaces and graphs, estimated generously.
CUDA_BYTES = 1 << 30
# Parts of out-of-memory messages of torch's CPU and CUDA allocators and of the system.
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "bad_alloc")


def encoder_weight_bytes(spec: EncoderSpec, dtype: str) -> int:
    """Return the bytes of all weights, on one rank or divided without copies. Ranks replicate a few small weights."""
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values()) * ITEM_BYTES[dtype]


def encoder_step_bytes(spec: EncoderSpec, num_ranks: int, num_tokens: int) -> int:
    """Return the bytes of a step's tensors that exist at the same time on one rank, most of them float32.

    These are hidden states and their sums, queries, keys and values with a copy, and the MLP's values.
    """
    inner = (3 if spec.gated else 2) * spec.intermediate_size
    return num_tokens * _FLOAT32 * (4 * spec.hidden_size + (7 * spec.hidden_size + inner) // num_ranks)


def rank_weight_bytes(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats = NONE, stage: int = 0) -> int:
    """Return the bytes of the weights of a rank of `stage`.

    All ranks have equal weights, unless whole experts are divided with a remainder: then the first rank has the most.
    `config` must have a resolved dtype.
    """
    return sum(size for _, size in rank_tensors(config, spec, formats, stage))


def rank_tensors(
    config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats = NONE, stage: int = 0
) -> Iterator[tuple[TensorSpec, int]]:
    """Yield the tensors that the first rank of `stage` holds, and the bytes of its part of each."""
    slices, on_cpu, item = _slices_of_rank(config, spec, formats), config.device != "cuda", ITEM_BYTES[config.dtype]
    for tensor, shape in rank_shapes(config, spec, formats, stage):
        if tensor.is_matrix:
            is_cut = tensor.expert is None or not config.enable_expert_parallel
            yield tensor, _matrix_bytes(tensor, shape, formats, item, slices if is_cut else 1)
        else:
            is_wide = tensor.rank_dtype is RankDtype.FLOAT32 or (tensor.rank_dtype is RankDtype.FOR_KERNELS and on_cpu)
            yield tensor, math.prod(shape) * (_FLOAT32 if is_wide else item)


def adapter_slot_bytes(
    config: WorkerConfig,
    spec: DecoderSpec,
    formats: WeightFormats = NONE,
    stage: int = 0,
) -> int:
    """Return the bytes of one slot for a LoRA adapter on a rank of `stage`: A and B of every linear layer that
    `lora_target_modules` chooses, at the highest rank. `config` must have a resolved dtype."""
    chosen, last, values = SlotModules(spec, config.lora_target_modules), stage == config.pipeline_parallel_size - 1, 0
    all_slices = slices_of(spec, formats) if config.device != "cuda" else 1
    for tensor, shape in rank_shapes(config, spec, formats, stage, only_first_experts=True):
        if not can_be_adapted(tensor):
            continue
        pairs = int(chosen.has(tensor.name.removesuffix(".weight")))
        if tensor.expert is not None:
            whole = config.enable_expert_parallel
            size = config.tensor_parallel_size
            pairs *= shard_experts(tensor.experts, 0, size, all_slices).count if whole else tensor.experts
        if tensor.name == EMBEDDING_WEIGHT:
            pairs *= stage == 0
            pairs += last and spec.tie_word_embeddings and chosen.has(HEAD)  # the head has a pair of its own
        values += sum(shape) * pairs
    return values * config.max_lora_rank * ITEM_BYTES[config.dtype]


def _slices_of_rank(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> int:
    """Return the number of slices of a rank's inputs, as `Placement.local_slices`."""
    size, slices = config.tensor_parallel_size, slices_of(spec, formats) if config.device != "cuda" else 1
    return slices // size if slices % size == 0 else 1


def rank_shapes(
    config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats, stage: int, *, only_first_experts: bool = False
) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
    """Yield the tensors that the first rank of `stage` holds, and the shape of its part of each. The experts of a layer
    are alike: `only_first_experts` leaves out all but the first."""
    size = config.tensor_parallel_size
    all_slices = slices_of(spec, formats) if config.device != "cuda" else 1
    for tensor in tensors_of(spec, spec.layers_of_stage(stage, config.pipeline_parallel_size)):
        cut = size, all_slices
        if only_first_experts and tensor.expert:
            continue
        if tensor.expert is not None and config.enable_expert_parallel:
            if tensor.expert >= shard_experts(tensor.experts, 0, size, all_slices).count:
                continue
            cut = 1, 1
        yield tensor, _local_shape(tensor, formats, *cut)


def _local_shape(tensor: TensorSpec, formats: WeightFormats, size: int, slices: int) -> tuple[int, ...]:
    """Return the shape of the part that each of `size` ranks holds; widths are padded to `slices` over all ranks."""
    if tensor.sharding not in (Sharding.WIDTH_OUTPUTS, Sharding.WIDTH_INPUTS):
        return tensor.local_shape(size)
    down = f"{tensor.name.rpartition('.')[0].rpartition('.')[0]}.down_proj"  # the linear layer whose inputs are cut
    return tensor.local_shape(size, slices, unit_of_width(formats.format_of(down)))


def _matrix_bytes(tensor: TensorSpec, shape: tuple[int, ...], formats: WeightFormats, item: int, slices: int) -> int:
    """Return the bytes of a matrix of `shape`, which is `tensor` or a rank's part of it."""
    if tensor.rank_dtype in (RankDtype.FLOAT32, RankDtype.DEQUANTIZED):
        return math.prod(shape) * (_FLOAT32 if tensor.rank_dtype is RankDtype.FLOAT32 else item)
    own = formats.of_head if tensor.sharding is Sharding.VOCABULARY else formats
    own = own.of_gates if tensor.rank_dtype is RankDtype.UNQUANTIZED else own
    weight_format = own.format_of(tensor.name.removesuffix(".weight"))
    return weight_format.weight_bytes(
        *shape, item, slices if tensor.sharding in (Sharding.INPUTS, Sharding.WIDTH_INPUTS) else 1
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: torch raises its own kinds of `RuntimeError`, numpy a `MemoryError`."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError | ImportError) and any(message in text for message in _MESSAGES)


def weight_bytes(spec: DecoderSpec, dtype: str, formats: WeightFormats = NONE) -> int:
    """Return the bytes of the weights of the whole model, on one rank or divided without copies."""
    item, total, slices = ITEM_BYTES[dtype], 0, slices_of(spec, formats)
    for tensor in tensors_of(spec):
        if tensor.is_matrix:
            total += _matrix_bytes(tensor, _local_shape(tensor, formats, 1, slices), formats, item, slices)
        else:
            total += math.prod(tensor.shape) * item
    return total


def step_bytes(config: WorkerConfig, spec: DecoderSpec, num_tokens: int, num_rows: int) -> int:
    """Return the bytes of a step's tensors that exist at the same time on one rank.

    These are a few tensors of hidden size, the values of a layer's sublayers, and float32 logits of `num_rows` rows.
    With LoRA adapters also the sums of a layer before they are rounded: of all rows, or on CPUs of some at a time; and
    the products with A of adapted experts.
    """
    size, item = config.tensor_parallel_size, ITEM_BYTES[config.dtype]
    inner = max(sum(branch.sublayer.step_values(size) for branch in layer.branches) for layer in set(spec.layers))
    row = 4 * spec.hidden_size + inner
    at_once = num_tokens if config.device == "cuda" else min(num_tokens, _SUMS_AT_ONCE)
    sums = num_tokens * spec.hidden_size + at_once * inner if config.max_loras else 0
    sums += _low_values_of_experts(config, spec, num_tokens)
    logits = min(num_rows, MAX_LOGITS_ROWS) * spec.vocab_size // size
    return num_tokens * row * item + _FLOAT32 * (sums + logits)


def _low_values_of_experts(config: WorkerConfig, spec: DecoderSpec, num_tokens: int) -> int:
    """Return the number of float32 products with A of a layer's experts, of the tokens that are computed together: for
    each choice of an expert those of gate, up and each slice of down. 0: no adapter updates experts."""
    targets = config.lora_target_modules
    if not config.max_loras or config.device == "cuda" or (targets is not None and EXPERTS not in targets):
        return 0
    most = 0
    for layer in set(spec.layers):
        for branch in layer.branches:
            if isinstance(branch.sublayer, ExpertsSpec):
                together = max(_MOST_CHOICES, _CHOICES_OF_EXPERT * branch.sublayer.experts)
                most = max(most, min(num_tokens * branch.sublayer.router.top_k, together))
    return most * (2 + max(1, _MOST_SLICES // config.tensor_parallel_size)) * config.max_lora_rank


def largest_step_bytes(config: WorkerConfig, spec: DecoderSpec, *, has_head: bool = True) -> int:
    """Return the bytes of the largest step that the limits allow. `has_head`: whether the rank computes logits."""
    tokens = config.max_num_batched_tokens
    return step_bytes(config, spec, tokens, tokens if has_head else 0)


def sampling_bytes(config: WorkerConfig, spec: DecoderSpec) -> int:
    """Return the bytes that a rank on a CUDA device keeps for sampling.

    They are float32 logits, a copy changed by penalties and masks, and int32 counts of every id for each sequence
    (`DenseHistories`). With several ranks, each has its part of the vocabulary for all rows, and the whole vocabulary
    for its share of the rows (`RowSampler`).
    """
    rows, ranks, vocab = logits_rows_at_once(config), config.tensor_parallel_size, spec.vocab_size
    logits = vocab * rows if ranks == 1 else -(-vocab // ranks) * rows + vocab * -(-rows // ranks)
    return 4 * (2 * logits + vocab * config.max_num_seqs)


def check_weights_fit(config: WorkerConfig, spec: DecoderSpec, dtype: str, formats: WeightFormats) -> None:
    """Check that the weights fit on the CPU, where the ranks of all replicas on a node share the memory.

    Raises `StartupError` (exit code 4) with the arithmetic if they do not.
    """
    of_replica, replicas = weight_bytes_of_node(config, spec, dtype, formats), config.data_parallel_size
    need, free = replicas * of_replica, free_before_load(config)
    if need > free:
        of = "" if config.nnodes == 1 else f" on one of {config.nnodes} nodes"
        of += "" if replicas == 1 else f" {replicas} x {human_bytes(of_replica)} ="
        raise StartupError(
            f"Not enough memory for the weights: {spec.num_parameters:,} parameters in {format_name(config, dtype)} "
            f"need{of} {human_bytes(need)}, and {human_bytes(free)} is free.",
            _smaller(config, dtype, "Free memory" if replicas == 1 else "Lower --data-parallel-size") + ".",
            EXIT_OUT_OF_MEMORY,
        )


def check_kv_fits(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> None:
    """Check, before weights are read, that a CPU rank's KV memory holds one sequence.

    The KV memory is the given size, which must fit in the free memory, or a share of the memory that is free after
    loading. Raises `StartupError` (exit code 4) with the arithmetic. `config` must be resolved.
    """
    loading = config.with_(host_free_bytes=free_before_load(config))
    loaded = loaded_bytes_of_node(config, spec, formats)
    room = room_for_kv(loading, None, 0, loaded_bytes=loaded)
    for stage in range(config.pipeline_parallel_size):
        GroupSizes.of(config, spec, stage).counts_that_fit(room)
    check_given_sizes_fit_host(config, loaded * config.data_parallel_size)


def check_given_sizes_fit_host(config: WorkerConfig, loaded: int) -> None:
    """Check that given sizes of KV memory and host tiers fit together with `loaded`, the bytes of the weights and slots
    for adapters of all replicas, and with the copies of adapters.

    Swap does not count, as every step reads KV memory. Raises `StartupError` (exit code 4) with the arithmetic.
    """
    ranks, free = config.ranks_on_host, free_before_load(config)
    given = (("--kv-cache-memory", config.kv_cache_bytes), ("--kv-offload-memory", config.kv_offload_bytes))
    sizes = [(name, size) for name, size in given if size]
    copies = ranks * config.adapter_copies_bytes
    need = loaded + copies + ranks * sum(size for _, size in sizes)
    if not sizes or need <= free:
        return
    weights = loaded - ranks * config.adapter_bytes
    parts = [f"{human_bytes(weights)} of weights"] if loaded else []
    parts += [f"{human_bytes(loaded - weights + copies)} of adapters"] if copies else []
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
    config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats, device_bytes: int, ranks_of_device: int
) -> None:
    """Check, before weights are read, that `--kv-cache-memory` and a rank's weights fit on a device of `device_bytes`.

    Raises `StartupError` (exit code 4) with the arithmetic if they do not.
    """
    given = config.kv_cache_bytes or 0
    weights = max(rank_weight_bytes(config, spec, formats, stage) for stage in range(config.pipeline_parallel_size))
    adapters = config.adapter_bytes
    need = ranks_of_device * (weights + adapters + given)
    if need > device_bytes:
        most = (device_bytes // ranks_of_device - weights - adapters) >> 20
        times = "" if ranks_of_device == 1 else f"{ranks_of_device} ranks on one device, each with "
        raise StartupError(
            f"Not enough device memory for --kv-cache-memory: {times}{human_bytes(weights)} of weights"
            f"{f', {human_bytes(adapters)} of slots for adapters' if adapters else ''} and "
            f"{human_bytes(given)} of KV memory take {human_bytes(need)}, and a device has "
            f"{human_bytes(device_bytes)}.",
            f"Lower --kv-cache-memory below {most}MiB, or leave it out: the size is then measured."
            if most > 0
            else "Use more ranks (--tensor-parallel-size), larger devices or smaller weights.",
            EXIT_OUT_OF_MEMORY,
        )


def free_before_load(config: WorkerConfig) -> int:
    """Return the free bytes of the host before any rank has loaded; with several replicas, before any of them has."""
    return free_host_bytes() if config.host_free_bytes is None else config.host_free_bytes


def loaded_bytes_of_node(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> int:
    """Return the bytes that all ranks of a node hold after loading: weights, and slots for adapters. The dtype and the
    bytes of a slot must be resolved."""
    return weight_bytes_of_node(config, spec, config.dtype, formats) + config.ranks_per_node * config.adapter_bytes


def weight_bytes_of_node(config: WorkerConfig, spec: DecoderSpec, dtype: str, formats: WeightFormats) -> int:
    """Return the bytes of the weights of all ranks of a node, for the node with the most."""
    topology, config = Topology.of(config), config.with_(dtype=dtype)
    stages = range(topology.pipeline_parallel_size)
    of_rank = [rank_weight_bytes(config, spec, formats, stage) for stage in stages]
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
    """Return the error for an allocation that failed while `doing`.

    `weight_bytes`: of this rank. `kv_bytes`: KV memory, if known. `measured_step_bytes`: the largest step, if measured;
    else it is estimated. `graph_bytes`: decode graphs.
    """
    step = measured_step_bytes or largest_step_bytes(config, spec)
    about = "" if measured_step_bytes else "about "
    parts = [
        f"{human_bytes(weight_bytes)} of weights ({format_name(config, config.dtype)})",
        f"{about}{human_bytes(step)} for a step of {config.max_num_batched_tokens} tokens",
    ]
    if config.max_loras:
        parts.append(f"{human_bytes(config.adapter_bytes)} of slots for adapters")
    if config.device == "cuda":
        parts.append(f"{human_bytes(sampling_bytes(config, spec))} of logits and histories to sample from")
    if graph_bytes:
        parts.append(f"{human_bytes(graph_bytes)} for graphs")
    if kv_bytes is not None:
        parts.append(f"{human_bytes(kv_bytes)} of KV memory")
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    ranks = "" if num_ranks == 1 else f" of {num_ranks}"
    adapters = "--max-loras, " if config.max_loras else ""
    first = f"Lower {adapters}--kv-cache-memory, --max-model-len or --max-num-batched-tokens"
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


def format_name(config: WorkerConfig, dtype: str) -> str:
    """Return the name of the weights' format, for messages."""
    if config.dequantize:
        return f"{config.quantization} dequantised to {dtype}"
    return dtype if config.quantization == "none" else f"{config.quantization} and {dtype}"


def _smaller(config: WorkerConfig, dtype: str, first: str) -> str:
    sixteen = ", or --dtype bfloat16, which is half as large" if dtype == "float32" else ""
    fewer = {"none": "int8 or int4", "int8": "int4"}.get(config.quantization)
    rounded = f", or --quantization {fewer}" if fewer and config.device != "cuda" else ""
    packed = ", leave --dequantize out" if config.dequantize else ""
    return f"{first}, use a smaller model{packed}{sixteen}{rounded}"


@contextmanager
def out_of_memory_as(error_of: Callable[[Exception], StartupError]) -> Generator[None]:
    """Raise `error_of` an allocator's out-of-memory error in its place."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise error_of(error) from error


def check_given_size(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Check that `--kv-cache-memory` holds one sequence, as far as this is known before a rank starts."""
    config = with_sequences_that_fit(config, spec, room_given(config))
    for stage in range(config.pipeline_parallel_size):
        GroupSizes.of(config, spec, stage).counts_that_fit(room_given(config))
