"""Kimi Linear and Ling 3: Kimi delta attention in most layers, latent attention in the others. Torch-free.

Kimi Linear's latent attention has no positional encoding. Ling's is rotated, and has an output gate for each head.
Published checkpoints of Ling have the class of the authors' code, and settings that transformers' class does not read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.deepseek import SIGMOID, gguf_mixture, latent_mixtures, mixture_of
from oarlock.workers.models.hf_config import expert_counts, layer_kinds, with_first
from oarlock.workers.models.hf_delta import FULL, LINEAR, LONGEST_CONVOLUTION
from oarlock.workers.models.hf_experts import grouped_router, sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_latent import LatentDefaults, gguf_latent, latent_attention

_KIMI = LatentDefaults(q_rank=None, positions=2**20)
_LING = LatentDefaults(q_rank=None, positions=2**18)
_WIDTH, _HEADS, _TAPS = 128, 32, 4  # defaults of Kimi delta attention
_LISTS = {"kda_layers": LINEAR, "full_attn_layers": FULL}  # lists of layers, counted from 1
_SETTINGS = {*_LISTS, "head_dim", "num_heads", "short_conv_kernel_size"}  # of `linear_attn_config`
# Settings of the authors' code that transformers does not read.
_FIXED: dict[str, tuple[Any, ...]] = {
    **SIGMOID, "moe_router_activation_func": ("sigmoid",), "score_function": ("sigmoid",), "use_grouped_topk": (True,),
    "use_qkv_bias": (False,), "use_bias": (False,),
    "hidden_act": ("silu", "swish"),  # which transformers reads: it is also the activation of the convolutions
}  # fmt: skip
# Settings of Kimi K3, whose text part may be stored with Kimi Linear's class.
_FIXED_OF_KIMI = {
    **_FIXED, "mla_use_nope": (True,), "mla_use_output_gate": (False,), "latent_moe_use_norm": (False,),
    "routed_expert_hidden_size": (None,), "attn_res_block_size": (0,),
}  # fmt: skip
_FIXED_OF_LING = {
    **_FIXED, "mla_use_nope": (False,), "use_mla_nope": (False,), "rope_interleave": (True,),
    "gated_attention_proj_granularity_type": ("head_wise",), "no_kda_lora": (True,), "use_kda_lora": (False,),
    "moe_router_enable_expert_bias": (True,), "scale_router_input": (False,), "pregate_inference": (False,),
    "use_nGPT": (False,), "value_norm": (False,), "up_proj_norm": (False,),
}  # fmt: skip
# Limits of the activations of each layer's experts and shared expert, which the authors' server applies.
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_SHARE = "partial_rotary_factor"
_LAYER = "model.layers.*"
_NAMES = TensorNames(
    modules={
        f"{_LAYER}.block_sparse_moe": f"{_LAYER}.mlp",
        **{
            f"{_LAYER}.{above}.experts.*.{theirs}": f"{_LAYER}.mlp.experts.*.{ours}"
            for above in ("block_sparse_moe", "mlp")
            for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
        },
        "model.word_embeddings": "model.embed_tokens",
        f"{_LAYER}.attention": f"{_LAYER}.self_attn",
        f"{_LAYER}.attention.dense": f"{_LAYER}.self_attn.o_proj",
        f"{_LAYER}.self_attn.dense": f"{_LAYER}.self_attn.o_proj",
        f"{_LAYER}.mlp.gate.expert_bias": f"{_LAYER}.mlp.gate.e_score_correction_bias",
        # transformers' modules
        **{
            f"{_LAYER}.self_attn.forget_gate.{part}": f"{_LAYER}.self_attn.{part}"
            for part in ("f_a_proj", "f_b_proj", "f_proj", "A_log", "dt_bias")
        },
    }
)


def describe_kimi_linear(fields: Fields) -> DecoderSpec:
    """Describe Kimi Linear, whose checkpoints have the settings of Kimi delta attention in a table of their own."""
    fields = _with_usual_keys(fields, groups=1, positions=_KIMI.positions)
    fields.serve_only(_FIXED_OF_KIMI)
    for key in ("rope_scaling", "rope_parameters"):
        fields.check_value(key)  # the latent attention is not rotated
    table = fields.table("linear_attn_config")
    if unknown := sorted(table.keys() - _SETTINGS):
        known = f"Known: {', '.join(sorted(_SETTINGS))}."
        raise unsupported(f"linear_attn_config: {unknown[0]}", table[unknown[0]], known)
    inner = Fields(table)
    width = inner.count("head_dim", fields.count("linear_head_dim", _WIDTH))
    delta = KimiDeltaSpec(
        inner.count("num_heads", fields.count("linear_num_heads", _HEADS)),
        width,
        _taps(inner, "short_conv_kernel_size", _taps(fields, "linear_conv_kernel_dim", _TAPS)),
        fields.number("rms_norm_eps", 1e-5),
        decay_rank=width,
        gate_rank=width,
        axes_around_rates=(0, 0) if fields.flag("flat_rates", False) else (2, 1),  # flat: of a GGUF file
    )
    fields = _without_head_dim(fields)
    attention = latent_attention(fields, _KIMI, interleaved=False)
    mixture = _mixture(fields, experts=256, width=1024, scale=2.446, groups=(1, 1))
    spec = _decoder(fields, attention, mixture, dense=1, eps=1e-5, positions=_KIMI.positions)
    spec = spec.with_sublayers(lambda one: replace(one, rope=None) if isinstance(one, LatentAttentionSpec) else one)
    kinds = layer_kinds(fields, LINEAR) or _kinds_of(table, fields.layers())
    return with_first(spec, delta, [kind == LINEAR for kind in kinds])


def describe_ling(fields: Fields) -> DecoderSpec:
    """Describe Ling 3, whose decays have a lower bound. Layers that predict tokens further ahead are not served."""
    ahead = fields.count("num_mtp_layers", 1, least=0, most=16)
    fields = fields.derived({"num_nextn_predict_layers": ahead, "rope_theta": 6e6, **_given(fields)})
    fields = _with_usual_keys(fields, groups=8, positions=_LING.positions)
    _check_ling(fields)
    delta = KimiDeltaSpec(
        fields.count("linear_num_heads", fields.count("num_attention_heads")),
        fields.count("linear_head_dim", fields.count("head_dim", _WIDTH)),
        _taps(fields, "linear_conv_kernel_dim", _taps(fields, "short_conv_kernel_size", _TAPS)),
        fields.number("rms_norm_eps", 1e-6),
        lower_bound=_lower_bound(fields) if fields.flag("kda_safe_gate", True) else None,
    )
    fields = _without_head_dim(_with_whole_rotation(fields, delta.head_width))
    attention = latent_attention(fields, _LING, interleaved=True)
    mixture = _mixture(fields, experts=512, width=768, scale=2.5, groups=(8, 4))
    fields.check_value("moe_shared_expert_intermediate_size", mixture.width)
    gated = replace(attention, output_gate=True)
    spec = _decoder(fields, gated, mixture, dense=2, eps=1e-6, positions=_LING.positions)
    return with_first(spec, delta, [kind == LINEAR for kind in _kinds_of_ling(fields)])


def _check_ling(fields: Fields) -> None:
    """Raise `StartupError` for a setting of the authors' code that is not served."""
    fields.serve_only(_FIXED_OF_LING)
    fields.check_value("num_kv_heads_for_linear_attn", 0, fields.count("num_attention_heads"))
    fields.check_value("rotary_dim", fields.count("qk_rope_head_dim", _LING.rope_width))
    for key in _LIMITS:
        limits = fields.raw.get(key, [])
        if not isinstance(limits, list) or any(limits):
            raise unsupported(key, limits, "Limits of the experts' activations are not supported.")


def _with_whole_rotation(fields: Fields, width: int) -> Fields:
    """Return the config without `partial_rotary_factor`: the share of `width`, of a head of Kimi delta attention, that
    `qk_rope_head_dim` is, and not a share of `qk_rope_head_dim`."""
    rotated, found = fields.count("qk_rope_head_dim", _LING.rope_width), dict(fields.raw)
    tables = {key: dict(found[key]) for key in ("rope_parameters", "rope_scaling") if isinstance(found.get(key), dict)}
    for settings in (found, *tables.values()):
        share = settings.pop(_SHARE, None)
        if share not in (None, 1, rotated / width):
            raise unsupported(_SHARE, share, f"Supported: qk_rope_head_dim / head_dim, {rotated / width:g}.")
    return fields.derived(found | tables)


def _kinds_of_ling(fields: Fields) -> list[str]:
    """Return the kind of each layer. The last layer of each group has latent attention."""
    given, every, layers = layer_kinds(fields, LINEAR), fields.count("layer_group_size", 6), fields.layers()
    if given is None and layers % every:
        # After the last whole group transformers has Kimi delta attention, and the authors' code latent attention.
        raise unsupported("layer_group_size", every, f"Without layer_types it must divide num_hidden_layers, {layers}.")
    return given or [FULL if (index + 1) % every == 0 else LINEAR for index in range(layers)]


def _taps(fields: Fields, key: str, default: int) -> int:
    """Return the number of tokens that one result of the convolution depends on."""
    return fields.count(key, default, least=2, most=LONGEST_CONVOLUTION)


def _given(fields: Fields) -> dict[str, Any]:
    """Return the settings that are not null."""
    return {key: value for key, value in fields.raw.items() if value is not None}


def _with_usual_keys(fields: Fields, *, groups: int, positions: int) -> Fields:
    """Return the config with the keys that other families have. The arguments are the family's defaults."""
    usual = fields.renamed(
        {
            "num_shared_experts": ("n_shared_experts", 1),
            "num_experts_per_token": ("num_experts_per_tok", 8),
            "num_expert_group": ("n_group", groups),
            "model_max_length": ("max_position_embeddings", positions),
        }
    )
    given = [usual.flag(key, True) for key in ("moe_renormalize", "norm_topk_prob") if usual.raw.get(key) is not None]
    if len(set(given)) > 1:
        raise unsupported("moe_renormalize", given[0], "It must be equal to norm_topk_prob.")
    return usual.derived({**usual.raw, "norm_topk_prob": given[0] if given else True})


def _without_head_dim(fields: Fields) -> Fields:
    """Return the config without `head_dim`, which is not a width of the latent attention."""
    return fields.derived({name: value for name, value in fields.raw.items() if name != "head_dim"})


def _mixture(fields: Fields, *, experts: int, width: int, scale: float, groups: tuple[int, int]) -> ExpertsSpec:
    """Return the experts. The arguments are the family's defaults."""
    experts, top_k = expert_counts(fields, experts, 8)
    router = grouped_router(fields, experts, top_k, scale=scale, groups=groups)
    return mixture_of(fields, experts, router, width=width, shared=1)


def _decoder(
    fields: Fields, attention: LatentAttentionSpec, mixture: ExpertsSpec, *, dense: int, eps: float, positions: int
) -> DecoderSpec:
    """Return the decoder with latent attention in each layer. `dense`: default of the number of dense layers."""
    spec = latent_mixtures(fields, attention, mixture, sparse_layers(fields, dense), positions, eps)
    return replace(spec, names=replace(_NAMES, ignored=spec.names.ignored))


def _kinds_of(table: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer, from two lists if they are given."""
    if not _LISTS.keys() & table.keys():
        return [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
    found: dict[int, str] = {}
    for key, kind in _LISTS.items():
        numbers = table.get(key)
        if not isinstance(numbers, list) or not all(type(one) is int and 1 <= one <= layers for one in numbers):
            raise unsupported(f"linear_attn_config: {key}", numbers, f"A list of numbers from 1 to {layers}.")
        found |= dict.fromkeys(numbers, kind)
    if len(found) != layers or sum(len(table[key]) for key in _LISTS) != layers:
        raise unsupported("linear_attn_config", dict(table), f"Each of the {layers} layers must be in one list.")
    return [found[number] for number in range(1, layers + 1)]


def _lower_bound(fields: Fields) -> float:
    """Return the lower bound of the logarithms of decays. With a positive bound states would grow, and 0 means no bound
    to the kernels, in float32."""
    bound = fields.raw.get("kda_lower_bound")
    bound = -5.0 if bound is None else bound
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 1e-12 <= -bound < 1e6:
        raise unsupported("kda_lower_bound", bound, "It must be a negative number above -1e6, and not almost 0.")
    return float(bound)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Kimi Linear. Layers with Kimi delta attention have no key-value heads."""
    settings.check_sigmoid_router()
    heads_of_layers = settings.numbers(".attention.head_count_kv", config["num_hidden_layers"])
    table = {
        "full_attn_layers": [number for number, heads in enumerate(heads_of_layers, 1) if heads],
        "kda_layers": [number for number, heads in enumerate(heads_of_layers, 1) if not heads],
        "head_dim": settings.count(".kda.head_dim"),
        "num_heads": config["num_attention_heads"],
        "short_conv_kernel_size": settings.count(".ssm.conv_kernel"),
    }
    own = {"linear_attn_config": table, "norm_topk_prob": True, "flat_rates": True}
    return gguf_latent(settings, config) | gguf_mixture(settings, config) | own


GGUF_KIMI_LINEAR = GGUFFamily(
    *("kimi-linear", "KimiLinearForCausalLM", _own, "kimi_linear"),
    has_experts=True,
    has_latents=True,
    layers_differ=True,
)


FAMILIES: dict[str, Describe] = {
    "KimiLinearForCausalLM": describe_kimi_linear,
    "BailingHybridForCausalLM": describe_ling,
    "BailingMoeV3ForCausalLM": describe_ling,
}
GGUF_FAMILIES = (GGUF_KIMI_LINEAR,)
