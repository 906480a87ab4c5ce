"""Checks that a model can be divided among its ranks: its layers among stages, its heads within each stage."""

from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.sharding import supported_tp_sizes
from oarlock.workers.quantization.registry import NONE, QUANTIZATIONS


def check_parallel(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Checks the numbers of stages and ranks. Raises `StartupError`, which names the sizes that work."""
    stages = config.pipeline_parallel_size
    if stages > spec.num_layers:
        raise StartupError(
            f"pipeline_parallel_size {stages} does not fit this model: it has {spec.num_layers} layers.",
            f"Use --pipeline-parallel-size {spec.num_layers} at most, so that every stage has a layer.",
        )
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
