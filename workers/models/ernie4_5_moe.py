"""Ernie 4.5 MoE: experts chosen by corrected softmax scores, and a shared expert. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_POSITIONS = 131072
_NAMES = TensorNames(
    # transformers keeps the correction in the router.
    modules={"model.layers.*.mlp.gate.moe_statics": "model.layers.*.mlp.moe_statics"},
    ignored=tuple(f"model.mtp_{part}" for part in ("block", "emb_norm", "hidden_norm", "linear_proj")),
)


def describe_ernie4_5_moe(fields: Fields) -> DecoderSpec:
    """Describe Ernie 4.5 MoE, with interleaved rotary embedding.

    Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` has experts.
    """
    layers = fields.layers()
    if fields.flag("use_bias", False):
        raise unsupported("use_bias", True, "Ernie 4.5 has no biases.")
    first, step = fields.count("moe_layer_start_index", 1, least=0), fields.count("moe_layer_interval", 1)
    last = fields.count("moe_layer_end_index", -1, least=-1)
    last = layers - 1 if last == -1 else last
    is_sparse = [(index + 1) % step == 0 and first <= index <= last for index in range(layers)]
    if not any(is_sparse):
        raise StartupError(
            f"config.json: of num_hidden_layers = {layers} none has experts.",
            "Repair moe_layer_start_index, moe_layer_end_index or moe_layer_interval.",
        )
    experts, top_k = expert_counts(fields, 64, 6, "moe_k")
    activation = activation_name(fields, "hidden_act", "silu")
    width, shared = fields.count("moe_intermediate_size", 1536), fields.count("moe_num_shared_experts", 2, least=0)
    router = RouterSpec(
        top_k,
        normalised=True,
        least_sum=fields.number("moe_norm_min", 1e-12),
        correction="moe_statics.e_score_correction_bias",
    )
    mixture = ExpertsSpec(experts, width, router, activation, shared=SharedSpec(shared * width) if shared else None)
    spec = decoder_spec(
        fields,
        kv_heads=4,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(None,) * layers,
        rope=usual_rope(fields, None, _POSITIONS, theta=500_000.0, interleaved=True),
        experts=[mixture if sparse else None for sparse in is_sparse],
        activation=activation,
        tied=True,
        eps=1e-5,
    )
    return replace(spec, names=_NAMES)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Ernie's settings. The width of the shared experts is taken from their tensor, since the metadata
    differ."""
    settings.check_whole_heads(config["head_dim"])
    width = settings.count(".expert_feed_forward_length")
    shared = [found.entry.shape[0] for name, found in settings.model.tensors.items() if "ffn_up_shexp" in name]
    return {
        "moe_intermediate_size": width,
        "moe_k": settings.count(".expert_used_count"),
        "moe_layer_interval": settings.count(".interleave_moe_layer_step", 1),
        "moe_layer_start_index": settings.count(".leading_dense_block_count", 0),
        "moe_num_shared_experts": shared[0] // width if shared and width else 0,
    }


GGUF_ERNIE4_5_MOE = GGUFFamily("ernie4_5-moe", "Ernie4_5_MoeForCausalLM", _own, "ernie4_5_moe", has_experts=True)


FAMILIES: dict[str, Describe] = {
    "Ernie4_5_MoeForCausalLM": describe_ernie4_5_moe,
}
GGUF_FAMILIES = (GGUF_ERNIE4_5_MOE,)
