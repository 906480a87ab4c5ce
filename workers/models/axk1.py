"""A.X K1: DeepSeek V3 with a norm after the experts. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.deepseek import SIGMOID, latent_mixtures, sigmoid_mixture
from oarlock.workers.models.hf_experts import sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields, wrong
from oarlock.workers.models.hf_latent import LatentDefaults, latent_attention, require_query_latent

_DEFAULTS = LatentDefaults(positions=32768)
_NORM = "post_mlp_layernorm"


def describe_axk1(fields: Fields) -> DecoderSpec:
    """Describe A.X K1. The published model's router has no correction, which its `topk_method` shows."""
    method = fields.raw.get("topk_method")
    if method is not None and not isinstance(method, str):
        raise wrong("topk_method", "a string", method)
    fields.serve_only({**SIGMOID, "topk_method": ("noaux_tc", method)})
    require_query_latent(fields)
    mixture = sigmoid_mixture(fields, experts=192)
    if method not in (None, "noaux_tc"):
        mixture = replace(mixture, router=replace(mixture.router, correction=None))
    attention = latent_attention(fields, _DEFAULTS, interleaved=fields.flag("rope_interleave", True))
    spec = latent_mixtures(fields, attention, mixture, sparse_layers(fields, 1), _DEFAULTS.positions)
    layers = {layer: _with_norm(layer) for layer in dict.fromkeys(spec.layers)}
    unused = [
        f"model.layers.{index}.{_NORM}" for index, layer in enumerate(spec.layers) if layers[layer] == layer
    ]  # stored for dense layers as well
    names = TensorNames(
        modules={f"model.layers.*.mlp.{_NORM}": f"model.layers.*.{_NORM}"},
        ignored=(*spec.names.ignored, *unused),
    )
    return replace(spec, layers=tuple(layers[layer] for layer in spec.layers), names=names)


def _with_norm(layer: LayerSpec) -> LayerSpec:
    """Return the layer with a norm after its experts if it has some."""
    return replace(layer, branches=tuple(_normed(branch) for branch in layer.branches))


def _normed(branch: BranchSpec) -> BranchSpec:
    return replace(branch, post_norm=_NORM) if isinstance(branch.sublayer, ExpertsSpec) else branch


FAMILIES: dict[str, Describe] = {
    "AXK1ForCausalLM": describe_axk1,
}
