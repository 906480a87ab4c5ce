"""LongCat-Flash: latent attention, and experts whose result is added half a layer later. Torch-free.

A layer of the checkpoint has two attentions and two MLPs, one after the other, and is two layers here. Its experts read
the rows of the first MLP, and their result is added after the second. Some experts return their input.
"""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts
from oarlock.workers.models.hf_fields import MOST_LAYERS, Describe, Fields
from oarlock.workers.models.hf_latent import (
    LatentDefaults,
    latent_attention,
    require_query_latent,
    with_latent_attention,
)

_DEFAULTS = LatentDefaults(positions=131072)
_THETA = 1e7
_MOST_IDENTITIES = 4096
# Settings of the authors' code that transformers does not read.
_FIXED = {
    "attention_method": ("MLA",), "mla_scale_q_lora": (True,), "mla_scale_kv_lora": (True,), "norm_topk_prob": (False,),
    "router_bias": (False,), "zero_expert_type": ("identity",),
}  # fmt: skip
_USUAL = {
    "ffn_hidden_size": ("intermediate_size", 12288),
    "expert_ffn_hidden_size": ("moe_intermediate_size", 2048),
    "moe_topk": ("num_experts_per_tok", 12),
}
_EXPERTS = "shortcut"  # our module of the experts, since the MLP of their layer is called `mlp`


def describe_longcat_flash(fields: Fields) -> DecoderSpec:
    """Describe LongCat-Flash. Layers that predict tokens further ahead are not served."""
    pairs = fields.count("num_layers", 28, most=MOST_LAYERS // 2)
    fields.check_value("num_hidden_layers", 2 * pairs)
    theta = _THETA if fields.raw.get("rope_theta") is None else fields.raw["rope_theta"]
    fields = fields.derived({**fields.raw, "num_hidden_layers": 2 * pairs, "rope_theta": theta}).renamed(_USUAL)
    fields.serve_only(_FIXED)
    require_query_latent(fields)
    fields.check_value("head_dim", fields.count("qk_rope_head_dim", _DEFAULTS.rope_width))
    attention = latent_attention(fields, _DEFAULTS, interleaved=True)
    hidden, q_rank = fields.count("hidden_size"), attention.q_rank
    assert q_rank is not None, "it is required above"
    factors = (hidden / q_rank) ** 0.5, (hidden / attention.kv_rank) ** 0.5
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_DEFAULTS.positions,
        windows=(None,) * fields.layers(),
        rope=attention.rope,
        eps=1e-5,
    )
    spec = with_latent_attention(spec, replace(attention, query_factor=factors[0], latent_factor=factors[1]))
    second = spec.layers[0]
    before, mlp = second.branches
    experts = BranchSpec(_mixture(fields), mlp.norm, is_held=True)
    both = LayerSpec((before, experts, mlp), (1, 2)), replace(second, adds_held=True)
    return replace(spec, layers=both * pairs, names=_names(pairs))


def _mixture(fields: Fields) -> ExpertsSpec:
    experts, top_k = expert_counts(fields, 512, 12)
    router = RouterSpec(
        top_k,
        scale=fields.number("routed_scaling_factor", 6.0),
        name="router.classifier",
        correction="router.e_score_correction_bias",
        module="router",
        logits_from="router",
    )
    return ExpertsSpec(
        experts,
        fields.count("moe_intermediate_size"),
        router,
        activation_name(fields, "hidden_act", "silu"),
        identities=fields.count("zero_expert_num", 256, least=0, most=_MOST_IDENTITIES),
        module=_EXPERTS,
    )


def _names(pairs: int) -> TensorNames:
    """Return the names. A layer of the checkpoint has the name of the second of our two, whose result is its result."""
    found = {}
    for index in range(pairs):
        stored, first = f"model.layers.{index}", f"model.layers.{2 * index}"
        found |= {stored: f"model.layers.{2 * index + 1}", f"{stored}.mlp": f"{first}.{_EXPERTS}"}
        for half in range(2):
            ours = f"model.layers.{2 * index + half}"
            found[f"{stored}.mlps.{half}"] = f"{ours}.mlp"
            for module in ("self_attn", "input_layernorm", "post_attention_layernorm"):
                found[f"{stored}.{module}.{half}"] = f"{ours}.{module}"
    return TensorNames(modules=found, ignored=("model.mtp",))


FAMILIES: dict[str, Describe] = {
    "LongcatFlashForCausalLM": describe_longcat_flash,
}
