"""Estimates of the memory of weights and of a step, and the errors that show them. Torch-free; allocates nothing.

A rank reports after loading (`Decoder.weight_bytes`) the sum over what it really holds; tests compare the two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from oarlock.workers.distributed.topology import Topology
from oarlock.workers.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec, layers_of_stage, slices_of, tensors_of
from oarlock.workers.layers.tensor_spec import Cut, Kept, TensorSpec
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.platform.dtypes import ITEM_BYTES
from oarlock.workers.platform.host_memory import free_host_bytes, human_bytes
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.runner.buckets import logits_rows_at_once

if TYPE_CHECKING:
    from oarlock.workers.config import WorkerConfig
    from oarlock.workers.layers.decoder_spec import DecoderSpec
    from oarlock.workers.quantization.formats.form import WeightForms


_FLOAT32 = 4


def encoder_weight_bytes(spec: EncoderSpec, dtype: str) -> int:
    """Bytes of all weights, on one rank or cut without copies; of a few small ones each rank holds a copy."""
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values()) * ITEM_BYTES[dtype]


def encoder_step_bytes(spec: EncoderSpec, num_ranks: int, num_tokens: int) -> int:
    """Bytes of the tensors of a step that exist at the same time on one rank, most of them float32: hidden states and
    their sums, queries, keys and values with a copy, and the MLP's."""
    inner = (3 if spec.gated else 2) * spec.intermediate_size
    return num_tokens * _FLOAT32 * (4 * spec.hidden_size + (7 * spec.hidden_size + inner) // num_ranks)


def rank_weight_bytes(config: WorkerConfig, spec: DecoderSpec, forms: WeightForms = NONE, stage: int = 0) -> int:
    """Bytes of the weights of any rank of `stage`: all have as many. `config`: with its dtype resolved."""
    size, on_cpu = config.tensor_parallel_size, config.device != "cuda"
    slices = slices_of(spec, forms) if on_cpu else 1
    slices = slices // size if slices % size == 0 else 1  # as `Placement.local_slices`
    layers = layers_of_stage(spec.num_layers, stage, config.pipeline_parallel_size)
    item, total = ITEM_BYTES[config.dtype], 0
    for tensor in tensors_of(spec, layers):
        shape = tensor.local_shape(size)
        if tensor.is_matrix:
            total += _matrix_bytes(tensor, shape, forms, item, slices)
        else:
            is_wide = tensor.kept is Kept.FLOAT32 or (tensor.kept is Kept.FOR_KERNELS and on_cpu)
            total += math.prod(shape) * (_FLOAT32 if is_wide else item)
    return total


def _matrix_bytes(tensor: TensorSpec, shape: tuple[int, ...], forms: WeightForms, item: int, slices: int) -> int:
    """Bytes of a matrix of `shape`, the whole of `tensor` or a rank's part."""
    own = forms.of_head if tensor.cut is Cut.VOCABULARY else forms
    form = own.form_of(tensor.name.removesuffix(".weight"))
    return form.weight_bytes(*shape, item, slices if tensor.cut is Cut.INPUTS else 1)


# Rows of logits computed at once. Scoring a prompt may need thousands of rows, 600 KB each with 152,000 ids.
MAX_LOGITS_ROWS = 128
# Parts of the messages of torch's CPU and CUDA allocators and of the system.
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "bad_alloc")


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
            total += _matrix_bytes(tensor, tensor.shape, forms, item, slices)
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
    """Bytes that a rank on a CUDA device keeps to sample from: float32 logits of the whole vocabulary, and int32 counts
    of every id for each sequence (`DenseHistories`)."""
    return 4 * spec.vocab_size * (logits_rows_at_once(config) + config.max_num_seqs)


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
        parts.append(f"{human_bytes(graph_bytes)} for decode graphs")
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
