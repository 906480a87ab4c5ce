"""The tensors of a GGUF model under the names that Hugging Face checkpoints have, and how their numbers are laid out.

Torch-free. The source for names and layouts is llama.cpp's converter (conversion/*.py and gguf-py/gguf/constants.py).
"""

import re
from dataclasses import dataclass

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_OF = {
    "llama": _LAYER,
    "qwen2": _LAYER,
    "qwen3": _LAYER,
    "phi3": _LAYER | {"ffn_up": "mlp.gate_up_proj"},  # the gate's rows are above up's
    "gemma2": _LAYER | _GEMMA,
    "gemma3": _LAYER | _GEMMA,
}
ARCHITECTURES = tuple(_LAYER_OF)
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")
_INTERLEAVED = re.compile(r".*\.self_attn\.(q|k|qkv)_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Layout:
    """Differences between stored numbers and those of a Hugging Face checkpoint."""

    # In so many heads at the beginning, row 2 * j + c is row j of half c: Hugging Face's rotation pairs the halves of a
    # head, and GGUF's for Llama pairs neighbours.
    interleaved_heads: int = 0
    head_dim: int = 0
    added: float = 0.0  # to every number: Gemma's norms scale by 1 + weight


PLAIN = Layout()


def hf_name(architecture: str, name: str) -> str | None:
    """Hugging Face's name of tensor `name`; None where the model's description takes its place, or it is unknown."""
    layer = _LAYER_NAME.fullmatch(name)
    if layer is not None:
        found = _LAYER_OF[architecture].get(layer[2])
        return None if found is None else f"model.layers.{int(layer[1])}.{found}.{layer[3]}"
    top = _TOP_NAME.fullmatch(name)
    return f"{_TOP[top[1]]}.{top[2]}" if top is not None and top[1] in _TOP else None


def layout(architecture: str, hf: str, num_heads: int, num_kv_heads: int, head_dim: int) -> Layout:
    """Layout of the tensor whose Hugging Face name is `hf`."""
    if architecture in ("gemma2", "gemma3") and hf.endswith("norm.weight"):
        return Layout(added=1.0)
    found = _INTERLEAVED.fullmatch(hf) if architecture == "llama" else None
    if found is None:
        return PLAIN
    heads = {"q": num_heads, "k": num_kv_heads, "qkv": num_heads + num_kv_heads}[found[1]]
    return Layout(heads, head_dim)
