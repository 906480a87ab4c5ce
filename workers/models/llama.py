"""Llama 2 and 3.x, and families that compute the same from other defaults: Emu3's text, InternLM 3. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported


def describe_llama(fields: Fields) -> DecoderSpec:
    attention_bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def describe_internlm3(fields: Fields) -> DecoderSpec:
    """Describe InternLM 3, whose own names of the two flags are `qkv_bias` and `bias`."""
    bias = fields.flag("attention_bias", False) | fields.flag("qkv_bias", False)
    if bias != fields.flag("mlp_bias", False) | fields.flag("bias", False):
        raise unsupported("attention_bias", bias, "attention_bias (qkv_bias) must equal mlp_bias (bias).")
    return _like_llama(fields, 2, 32768, None, 128, bias=bias)


def describe_iquest_coder(fields: Fields) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    if fields.flag("use_sliding_window", False):
        raise unsupported("use_sliding_window", True, "IQuest Coder has no windows.")
    if fields.flag("mlp_bias", False) != bias:
        raise unsupported("mlp_bias", not bias, f"It must equal attention_bias, which is {bias}.")
    return _like_llama(fields, 8, 131072, None, 128, bias=bias)


def describe_emu3(fields: Fields) -> DecoderSpec:
    """Describe the language model of Emu3, without the tokenizer of images."""
    return _like_llama(fields, 8, 9216, 1_000_000.0, None)


def _like_llama(
    fields: Fields, kv_heads: int, max_positions: int, theta: float | None, head_dim: int | None, *, bias: bool = False
) -> DecoderSpec:
    return decoder_spec(
        fields,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        eps=1e-5,
        theta=theta,
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in settings.model.tensors,
    }
    settings.check_whole_heads(config["head_dim"])
    if settings.count(".expert_count", 0):
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    window = settings.count(".attention.sliding_window", 0)
    return own | ({"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {})


GGUF_LLAMA = GGUFFamily(
    *("llama", "LlamaForCausalLM", _own),
    has_experts=True,
    pairs_neighbours=True,
    others=("MistralForCausalLM", "MixtralForCausalLM"),
)


FAMILIES: dict[str, Describe] = {
    "Emu3ForCausalLM": describe_emu3,
    "IQuestCoderForCausalLM": describe_iquest_coder,
    "InternLM3ForCausalLM": describe_internlm3,
    "LlamaForCausalLM": describe_llama,
}
GGUF_FAMILIES = (GGUF_LLAMA,)
