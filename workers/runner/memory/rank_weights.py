"""The bytes of one rank's weights, from the model's description alone. Torch-free.

What a rank reports after loading (`Decoder.weight_bytes`) is the sum over what it really holds; tests compare the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oarlock.workers.layers.decoder_spec import DecoderSpec, slices_of
from oarlock.workers.layers.sharding import HeadShard, shard_heads, shard_vocab
from oarlock.workers.layers.stage_layers import layers_of_stage, tensors_of_stage
from oarlock.workers.platform.dtypes import ITEM_BYTES
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.weights.tied import EMBEDDING, HEAD

if TYPE_CHECKING:
    from oarlock.workers.config import WorkerConfig
    from oarlock.workers.quantization.formats.form import WeightForms

# Modules whose outputs are cut among ranks, and those whose inputs are.
_KV, _ROWS, _INPUTS = ("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj", "down_proj")
_FLOAT32 = 4


def rank_weight_bytes(config: WorkerConfig, spec: DecoderSpec, forms: WeightForms = NONE, stage: int = 0) -> int:
    """Bytes of the weights of any rank of `stage`: all have as many. `config`: with its dtype resolved."""
    size, item = config.tensor_parallel_size, ITEM_BYTES[config.dtype]
    shard = shard_heads("attention", spec.num_heads, spec.num_kv_heads, 0, size)
    # On the CPU kernels read the scales of norms in float32.
    norm_item = _FLOAT32 if spec.norm_offset or config.device != "cuda" else item
    slices = slices_of(spec, forms) if config.device != "cuda" else 1
    slices = slices // size if slices % size == 0 else 1  # as `Placement.local_slices`
    layers, total = layers_of_stage(spec.num_layers, stage, config.pipeline_parallel_size), 0
    for name, shape in tensors_of_stage(spec, layers).items():
        if len(shape) == 2:
            own = forms.of_head if name in (EMBEDDING, HEAD) else forms
            rows, inputs = _local(name, (shape[0], shape[1]), spec, shard, size)
            cut = slices if is_cut_by_inputs(name) else 1
            total += own.form_of(name.removesuffix(".weight")).weight_bytes(rows, inputs, item, cut)
        elif name.endswith(".bias"):
            total += _local(name, (shape[0], size), spec, shard, size)[0] * item
        elif name.endswith(("q_norm.weight", "k_norm.weight")):  # one scale for each head
            heads = shard.num_heads if name.endswith("q_norm.weight") else shard.num_kv_heads
            total += heads * shape[0] * _FLOAT32
        else:
            total += shape[0] * norm_item
    return total


def is_cut_by_inputs(name: str) -> bool:
    """Whether ranks share the inputs of the matrix `name`, and not its outputs."""
    return name not in (EMBEDDING, HEAD) and name.split(".")[-2] in _INPUTS


def _local(name: str, shape: tuple[int, int], spec: DecoderSpec, shard: HeadShard, size: int) -> tuple[int, int]:
    """Rows and inputs of a rank's part of the matrix `name`."""
    (rows, inputs), module = shape, name.split(".")[-2]
    if name in (EMBEDDING, HEAD):
        return shard_vocab(spec.vocab_size, 0, size)[1], inputs
    if module == "q_proj":
        return shard.num_heads * spec.head_dim, inputs
    if module in _KV:
        return shard.num_kv_heads * spec.head_dim, inputs
    if module in _ROWS:
        return rows // size, inputs
    assert module in _INPUTS, f"{name} is cut in no way that is known"
    return rows, inputs // size
