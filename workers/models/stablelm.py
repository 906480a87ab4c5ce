"""StableLM: LayerNorm with a bias, and rotary embedding of a quarter of each head. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import BEFORE, decoder_spec, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_POSITIONS = 4096


def describe_stablelm(fields: Fields) -> DecoderSpec:
    """Describe StableLM. Models whose heads have norms of their own, such as StableLM 2 12B, are refused."""
    head_dim = max(1, fields.count("hidden_size") // fields.count("num_attention_heads"))
    if fields.count("head_dim", head_dim) != head_dim:
        raise unsupported("head_dim", fields.raw["head_dim"], "Heads have hidden_size / num_attention_heads elements.")
    if fields.flag("qk_layernorm", False):
        raise unsupported("qk_layernorm", True, "Use a model without norms of heads, such as StableLM 2 1.6B.")
    parallel = fields.flag("use_parallel_residual", False)
    return decoder_spec(
        fields,
        kv_heads=32,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(None,) * fields.layers(),
        rope=usual_rope(fields, head_dim, _POSITIONS, share=0.25),
        qkv_bias=fields.flag("use_qkv_bias", False),
        norm=NormSpec("layer", fields.number("layer_norm_eps", 1e-5), bias=True),
        norms=(BEFORE[0], BEFORE[0]) if parallel else BEFORE,
        parallel=parallel,
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return StableLM's settings. The converter's flag for parallel layers is wrong if config.json has none."""
    head_dim, tensors = config["head_dim"], settings.model.tensors
    return {
        "partial_rotary_factor": settings.count(".rope.dimension_count", head_dim // 4) / head_dim,
        "layer_norm_eps": settings.number(".attention.layer_norm_epsilon"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
    }


GGUF_STABLELM = GGUFFamily("stablelm", "StableLmForCausalLM", _own)


FAMILIES: dict[str, Describe] = {
    "StableLmForCausalLM": describe_stablelm,
}
GGUF_FAMILIES = (GGUF_STABLELM,)
