"""A decoder as plain values: everything that decides its mathematics, and nothing about how it is run.

Torch-free. Knows no Hugging Face key names (`hf_config.py` does) and no tensor-parallel sizes (`layers/shards.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, resolved: every optional value has its number. Fields a `kind` does not use keep defaults."""

    kind: str  # default | linear | dynamic | llama3 | yarn
    theta: float
    rotary_dim: int  # leading elements of a head that are rotated; the rest pass through
    factor: float = 1.0
    original_max_positions: int = 0  # dynamic, llama3, yarn: the length the frequencies were trained for
    attention_factor: float = 1.0  # yarn: scales cos and sin
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer with RMSNorm before each half-block and a gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer: a query sees itself and the window - 1 tokens before it
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before the rotation
    activation: str = "silu"  # silu | gelu_tanh
    tie_word_embeddings: bool = False
    dtype: str | None = None  # as the checkpoint declares it: bfloat16 | float16 | float32

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def default_length(self) -> int:
        """Tokens of context the model was made for."""
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_positions * self.rope.factor))
        return self.max_position_embeddings

    @property
    def longest_length(self) -> int:
        """Tokens of context its rotary embedding can reach, if the operator asks for more than the default."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        return self.default_length

    @property
    def num_parameters(self) -> int:
        """Of the whole model; a tied head counts once."""
        return sum(_product(shape) for shape in tensor_shapes(self).values())


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of an ordinary checkpoint of this model, whole: what a start-up check compares headers with."""
    q, kv, h, i = (
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.hidden_size,
        spec.intermediate_size,
    )
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (i, h),
        "mlp.up_proj.weight": (i, h),
        "mlp.down_proj.weight": (h, i),
    }
    if spec.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if spec.o_bias:
        layer["self_attn.o_proj.bias"] = (h,)
    if spec.mlp_bias:
        layer |= {"mlp.gate_proj.bias": (i,), "mlp.up_proj.bias": (i,), "mlp.down_proj.bias": (h,)}
    if spec.qk_norm:
        layer |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, h), "model.norm.weight": (h,)}
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, h)
    return shapes


# Two layouts of the same numbers: a checkpoint may hold the fused tensor (left) in place of its parts.
FUSED_TENSORS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def is_ignorable(spec: DecoderSpec, name: str) -> bool:
    """Whether a tensor nobody takes is known to be harmless: it repeats what the model already has."""
    if name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints saved; computed from config.json here
        return True
    return spec.tie_word_embeddings and name == "lm_head.weight"


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
