"""Cohere's Command models: parallel attention and MLP after one LayerNorm, interleaved rotary embedding. Torch-free."""

from collections.abc import Sequence
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import Norms, decoder_spec, layer_kinds, sliding_windows, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_POSITIONS = 8192
# Fields of early configs that describe the architecture, with the only value that its models have.
ALWAYS: dict[str, Any] = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}
PARALLEL_NORMS: Norms = (("input_layernorm", None), ("input_layernorm", None))


def describe_cohere(fields: Fields) -> DecoderSpec:
    """Describe Command R: every layer has full attention and rotary embedding.

    Command R+, which also norms each head with its own scale, is refused.
    """
    if fields.flag("use_qk_norm", False):
        raise unsupported("use_qk_norm", True, "Use a model without norms of heads, such as Command R or Cohere 2.")
    return _cohere_spec(fields, (None,) * fields.layers(), [True] * fields.layers(), 500_000.0)


def describe_cohere2(fields: Fields) -> DecoderSpec:
    """Describe Command R7B and Command A: layers with a window have rotary embedding, layers with full attention have
    none."""
    layers, pattern = fields.layers(), fields.count("sliding_window_pattern", 4)
    width = max(1, fields.count("hidden_size") // fields.count("num_attention_heads"))
    if fields.count("head_dim", width) != width:
        raise unsupported(
            "head_dim", fields.raw["head_dim"], f"Its heads have hidden_size / num_attention_heads = {width}."
        )
    kinds = layer_kinds(fields)
    if kinds is None:
        kinds = ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)]
    windows = sliding_windows(fields, kinds, 4096)
    return _cohere_spec(fields, windows, [window is not None for window in windows], 10_000.0)


def _cohere_spec(fields: Fields, windows: tuple[int | None, ...], rotated: Sequence[bool], theta: float) -> DecoderSpec:
    """Return the description that both share. `rotated`: whether each layer has rotary embedding. `theta`: its base by
    default."""
    for key, value in ALWAYS.items():
        fields.check_value(key, value)
    bias = fields.flag("attention_bias", False)
    rope = usual_rope(fields, None, _POSITIONS, theta=theta, interleaved=True)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=windows,
        rope=rope,
        ropes=[rope if is_rotated else None for is_rotated in rotated],
        qkv_bias=bias,
        o_bias=bias,
        norm=NormSpec("layer", fields.number("layer_norm_eps", 1e-5)),
        norms=PARALLEL_NORMS,
        parallel=True,
        logit_scale=fields.number("logit_scale", 0.0625),
        tied=True,
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    own: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "layer_norm_eps": settings.number(".attention.layer_norm_epsilon", 1e-5),
        "logit_scale": settings.number(".logit_scale"),
    }
    if settings.architecture == "cohere2":
        return own | {"sliding_window": settings.count(".attention.sliding_window")}
    return own | {"use_qk_norm": "blk.0.attn_q_norm.weight" in settings.model.tensors}


GGUF_COHERE = GGUFFamily("command-r", "CohereForCausalLM", _own, "cohere", pairs_neighbours=True)
GGUF_COHERE2 = GGUFFamily("cohere2", "Cohere2ForCausalLM", _own, pairs_neighbours=True)


FAMILIES: dict[str, Describe] = {
    "Cohere2ForCausalLM": describe_cohere2,
    "CohereForCausalLM": describe_cohere,
}
GGUF_FAMILIES = (
    GGUF_COHERE,
    GGUF_COHERE2,
)
