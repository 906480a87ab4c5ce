"""Llama 2 and 3.x, and the many checkpoints that share their architecture. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Fields


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


GGUF_LLAMA = GGUFFamily("llama", "LlamaForCausalLM", _own, has_experts=True, pairs_neighbours=True)
