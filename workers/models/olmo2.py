"""OLMo 2: norms on the results of attention and MLP alone, and a norm of q and k over all heads. Torch-free."""

from typing import Any

from oarlock.workers.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Fields
from oarlock.workers.weights.gguf_model import GGUFFamily, Settings


def describe_olmo2(fields: Fields) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="row",
        norms=((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
        eps=1e-5,
    )


def _own(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    if settings.has(".attention.sliding_window"):  # OLMo 3, which the converter gives the same name
        raise StartupError(f"{settings.model.path} has windows, which olmo2 models do not.", "Use a model of OLMo 2.")
    return {"attention_bias": "blk.0.attn_q.bias" in settings.model.tensors}


GGUF_OLMO2 = GGUFFamily("olmo2", "Olmo2ForCausalLM", _own)
