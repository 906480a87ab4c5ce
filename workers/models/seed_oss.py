"""Seed-OSS: Llama's layer with separate flags for the biases of attention's inputs and of its output. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Describe, Fields


def describe_seed_oss(fields: Fields) -> DecoderSpec:
    return decoder_spec(
        fields,
        kv_heads=8,
        head_dim=128,
        max_positions=524288,
        windows=(None,) * fields.layers(),
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    names = {"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}
    return {key: f"blk.0.{name}.bias" in settings.model.tensors for key, name in names.items()}


GGUF_SEED_OSS = GGUFFamily("seed_oss", "SeedOssForCausalLM", _own, mlp_norm="post_attention_norm")


FAMILIES: dict[str, Describe] = {
    "SeedOssForCausalLM": describe_seed_oss,
}
GGUF_FAMILIES = (GGUF_SEED_OSS,)
