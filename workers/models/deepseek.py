"""DeepSeek V2, V3 and V3.2: latent attention, dense first layers, then experts with shared ones. Torch-free.

Kimi K2, Moonlight and R1 have V3's class. GLM-4.7-Flash, GLM-5 and A.X K1 are much like V3, on pages of their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts
from oarlock.workers.models.hf_experts import (
    gguf_layers_ahead,
    group_counts,
    grouped_router,
    layers_ahead,
    sparse_layers,
)
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_latent import (
    LatentDefaults,
    gguf_latent,
    latent_attention,
    require_query_latent,
    with_latent_attention,
)

_V2 = LatentDefaults(positions=2048)
_V3 = LatentDefaults(positions=4096)
V32 = LatentDefaults(positions=163840)
# Settings of the authors' code that transformers does not read.
SIGMOID: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}  # fmt: skip
_SOFTMAX: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("softmax",), "norm_topk_prob": (False,), "moe_layer_freq": (1,), "mlp_bias": (False,),
    "use_mla": (True,),
}  # fmt: skip
_METHODS = {"greedy": "greedy", "group_limited_greedy": "group_limited_greedy"}
_INDEXER = ("model.layers.*.self_attn.indexer", "blk.*.indexer")
# llama.cpp's numbers of the scores of experts.
_SOFTMAX_SCORES, _SIGMOID_SCORES = 1, 2
_VOCABULARY_OF_GLM = 154880  # which llama.cpp knows GLM-4.7-Flash by, too
# (experts, vocabulary) of DeepSeek V2 and V3 -> number of groups, and of chosen groups.
_GROUPS = {(160, 102400): (8, 3), (256, 129280): (8, 4)}
# V3.2's indexer chooses `index_topk` earlier tokens for each token to attend to, which are all of a shorter context.
_LIMIT = "an indexer, which is not supported, chooses the tokens of longer contexts that attention reads (index_topk)"


def describe_deepseek_v2(fields: Fields) -> DecoderSpec:
    """Describe DeepSeek V2, whose router compares groups by their best expert, or has no groups at all."""
    fields.serve_only(_SOFTMAX)
    fields.check_value("mlp_layer_types")
    attention = latent_attention(fields, _V2, interleaved=True)
    experts, top_k = expert_counts(fields, 64, fields.count("num_experts_per_tok"))
    router = RouterSpec(top_k, scale=fields.number("routed_scaling_factor", 1.0))
    if fields.choice("topk_method", "greedy", _METHODS) != "greedy":
        groups, top_groups = group_counts(fields, experts, top_k, (1, 1))
        router = replace(router, groups=groups, top_groups=top_groups, best_of_group=1)
    mixture = mixture_of(fields, experts, router, width=1407, shared=2)
    return latent_mixtures(fields, attention, mixture, sparse_layers(fields, 0), _V2.positions)


def describe_deepseek_v3(fields: Fields) -> DecoderSpec:
    """Describe DeepSeek V3 and models of its class. Layers that predict tokens further ahead are not served."""
    fields.serve_only(SIGMOID)
    fields.check_value("mlp_layer_types")
    attention = latent_attention(fields, _V3, interleaved=fields.flag("rope_interleave", True))
    spec = latent_mixtures(fields, attention, sigmoid_mixture(fields), sparse_layers(fields, 3), _V3.positions)
    return replace(spec, names=TensorNames(ignored=layers_ahead(fields, 1)))


def describe_deepseek_v32(fields: Fields) -> DecoderSpec:
    """Describe DeepSeek V3.2 for contexts of up to `index_topk` tokens."""
    return describe_indexed(fields, V32, sigmoid_mixture(fields))


def describe_indexed(fields: Fields, defaults: LatentDefaults, mixture: ExpertsSpec, eps: float = 1e-6) -> DecoderSpec:
    """Describe a model whose attention reads the tokens that an indexer chooses, for contexts that it reads whole.

    `eps`: the family's default of `rms_norm_eps`.
    """
    fields.serve_only(SIGMOID | {"rope_interleave": (True,), "mlp_bias": (False,)})
    require_query_latent(fields)
    layers, kinds = fields.layers(), fields.raw.get("layer_types")
    if kinds is not None and kinds != ["indexed_attention"] * layers:
        raise unsupported("layer_types", kinds, f"indexed_attention for each of the {layers} layers.")
    attention = latent_attention(fields, defaults, interleaved=True)
    spec = latent_mixtures(fields, attention, mixture, sparse_layers(fields, 3), defaults.positions, eps)
    length = fields.count("index_topk", 2048)
    names = replace(spec.names, ignored=(*spec.names.ignored, *_INDEXER))
    if length >= spec.longest_length:
        return replace(spec, names=names)
    return replace(
        spec, names=names, default_length=min(length, spec.default_length), longest_length=length, length_limit=_LIMIT
    )


def sigmoid_mixture(fields: Fields, experts: int = 256, groups: tuple[int, int] = (8, 4)) -> ExpertsSpec:
    """Return the experts of DeepSeek V3. `experts` and `groups` are the family's defaults, as in `grouped_router`."""
    count, top_k = expert_counts(fields, experts, 8)
    router = grouped_router(fields, count, top_k, scale=2.5, groups=groups)
    return mixture_of(fields, count, router, width=2048, shared=1)


def mixture_of(fields: Fields, experts: int, router: RouterSpec, *, width: int, shared: int) -> ExpertsSpec:
    """Return the experts. `width`, of an expert, and `shared`, the number of shared experts, are the defaults."""
    for key in ("n_routed_experts", "n_shared_experts"):
        if fields.raw.get(key, shared) is None:  # no experts, in the authors' code
            raise unsupported(key, None, "Layers of this architecture have experts, of which some are shared.")
    width = fields.count("moe_intermediate_size", width)
    one = SharedSpec(width * fields.count("n_shared_experts", shared))
    return ExpertsSpec(experts, width, router, activation_name(fields, "hidden_act", "silu"), shared=one)


def latent_mixtures(
    fields: Fields,
    attention: LatentAttentionSpec,
    mixture: ExpertsSpec,
    is_sparse: Sequence[bool],
    positions: int,
    eps: float = 1e-6,
) -> DecoderSpec:
    """Return the decoder with latent attention, and with `mixture` in its sparse layers.

    `positions` and `eps` are the family's defaults of `max_position_embeddings` and `rms_norm_eps`.
    """
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=positions,
        windows=(None,) * fields.layers(),
        rope=attention.rope,
        experts=[mixture if one else None for one in is_sparse],
        activation=mixture.activation,
        eps=eps,
    )
    return replace(with_latent_attention(spec, attention), names=TensorNames(ignored=layers_ahead(fields)))


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of DeepSeek V2 or V3, or of Youtu, whose files have the same architecture."""
    if settings.has(".attention.temperature_scale"):
        raise StartupError(
            f"{settings.model.path} scales queries by their position, which is not supported for deepseek2.",
            "Use another model.",
        )
    latent = gguf_latent(settings, config)
    if not settings.count(".expert_count", 0):
        return latent | {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    mixture = gguf_mixture(settings, config)
    if _gating(settings, config) == _SIGMOID_SCORES:
        return latent | mixture
    method = "greedy" if mixture["n_group"] == 1 else "group_limited_greedy"
    second = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": method}
    return latent | mixture | second


def gguf_indexed(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model whose attention reads the tokens that an indexer chooses."""
    settings.check_sigmoid_router()
    top_k = {"index_topk": settings.count(".attention.indexer.top_k")}
    return gguf_latent(settings, config) | gguf_mixture(settings, config) | top_k


def gguf_mixture(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the experts. Older files leave out the groups, which published models are known by."""
    experts = settings.count(".expert_count")
    by_default = _GROUPS.get((experts, config["vocab_size"]), (1, 1))
    return gguf_layers_ahead(settings, config) | {
        "n_routed_experts": experts,  # the name that transformers' classes read
        "moe_intermediate_size": settings.count(".expert_feed_forward_length"),
        "n_shared_experts": settings.count(".expert_shared_count"),
        "first_k_dense_replace": settings.count(".leading_dense_block_count", 0),
        "routed_scaling_factor": settings.number(".expert_weights_scale", 1.0),
        "norm_topk_prob": settings.flag(".expert_weights_norm", False),
        "n_group": settings.count(".expert_group_count", by_default[0]),
        "topk_group": settings.count(".expert_group_used_count", by_default[1]),
    }


def _gating(settings: GGUFSettings, config: dict[str, Any]) -> int:
    """Return the number of the scores: softmax, if the file does not name them, unless it is GLM-4.7-Flash."""
    usual = _SIGMOID_SCORES if config["vocab_size"] == _VOCABULARY_OF_GLM else _SOFTMAX_SCORES
    found = settings.count(".expert_gating_func", usual) or usual
    if found not in (_SOFTMAX_SCORES, _SIGMOID_SCORES):
        raise StartupError(
            f"{settings.model.path}: expert_gating_func {found} is not supported.", "Supported: 1 softmax, 2 sigmoid."
        )
    return found


GGUF_DEEPSEEK2 = GGUFFamily(
    *("deepseek2", "DeepseekV3ForCausalLM", _own, "deepseek_v3"),
    has_experts=True,
    has_latents=True,
    others=(
        "DeepseekV2ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Kimi_K25ForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "YoutuForCausalLM",
    ),
)
GGUF_DEEPSEEK32 = GGUFFamily(
    *("deepseek32", "DeepseekV32ForCausalLM", gguf_indexed, "deepseek_v32"), has_experts=True, has_latents=True
)

FAMILIES: dict[str, Describe] = {
    "DeepseekV2ForCausalLM": describe_deepseek_v2,
    "DeepseekV3ForCausalLM": describe_deepseek_v3,
    "DeepseekV32ForCausalLM": describe_deepseek_v32,
}
GGUF_FAMILIES = (GGUF_DEEPSEEK2, GGUF_DEEPSEEK32)
