"""A decoder model as plain values: everything that determines what it computes, and nothing about how it is run.

Torch-free. Knows no Hugging Face key names (`models/hf_*.py` do) and no tensor-parallel sizes
(`layers/sharding.py`).
"""

from dataclasses import dataclass, replace

from oarlock.workers.layers.sharding import slices_for
from oarlock.workers.quantization.formats.form import WeightForms
from oarlock.workers.quantization.registry import Quantization


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, resolved: every optional value has its number. Fields a `kind` does not use keep defaults."""

    kind: str  # default | linear | dynamic | llama3 | yarn | longrope
    theta: float
    rotary_dim: int  # leading elements of a head that are rotated; the rest pass through
    factor: float = 1.0
    original_max_positions: int = 0  # dynamic, llama3, yarn, longrope: the length the frequencies were trained for
    attention_factor: float = 1.0  # yarn, longrope: scales cos and sin
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: stretch of each pair of elements, up to original_max_positions
    long_factors: tuple[float, ...] = ()  # longrope: beyond
    stretched: bool = False  # longrope: the long factors apply, to every token; see `for_length`

    def for_length(self, length: int) -> "RopeSpec":
        """The settings for a server of sequences of up to `length` tokens, which all get the same angles.

        LongRoPE has two sets of factors, and a model was trained with one set for all tokens of a sequence, chosen by
        the sequence's length. Cached keys cannot be rotated again when a sequence grows past the trained length, and
        a cached prefix is shared by short and long sequences: so the longest sequence served decides for all.
        """
        stretched = self.kind == "longrope" and length > self.original_max_positions
        return self if stretched == self.stretched else replace(self, stretched=stretched)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer with a gated MLP and RMSNorm before (and with `post_norms` after) each sublayer."""

    # Its shape.
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
    # What differs between many families.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before the rotation
    activation: str = "silu"  # silu | gelu_tanh
    tie_word_embeddings: bool = False
    dtype: str | None = None  # as the checkpoint declares it: bfloat16 | float16 | float32
    # What only Gemma has. The defaults switch it off.
    local_rope: RopeSpec | None = None  # of the layers with a window, where they have their own
    query_scalar: float | None = None  # scores are divided by its root; None: by the root of head_dim
    attention_softcap: float | None = None  # scores become cap * tanh(scores / cap)
    logit_softcap: float | None = None  # final logits likewise
    embedding_scale: float = 1.0  # rounded to the dtype it is applied in
    norm_offset: float = 0.0  # norms scale by offset + weight
    post_norms: bool = False  # RMSNorm also on the output of each sublayer, before it is added to the residual

    @property
    def attention_scale(self) -> float:
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def slices(self) -> int:
        """Number of slices into which inputs are cut that ranks share: see `slices_for`."""
        return slices_for(self.num_heads, self.num_kv_heads, self.intermediate_size)

    def rope_of(self, layer: int) -> RopeSpec:
        return self.local_rope if self.local_rope is not None and self.windows[layer] is not None else self.rope

    def for_length(self, length: int) -> "DecoderSpec":
        """The model as it serves sequences of up to `length` tokens: only LongRoPE depends on it."""
        local = None if self.local_rope is None else self.local_rope.for_length(length)
        return replace(self, rope=self.rope.for_length(length), local_rope=local)

    @property
    def default_length(self) -> int:
        """Tokens of context served by default. For LongRoPE that is the length trained with the short factors: up to it
        the angles equal transformers' for every sequence. A longer context gives short sequences the long factors, so
        it is an explicit choice.
        """
        if self.rope.kind == "longrope":
            return min(self.max_position_embeddings, self.rope.original_max_positions)
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_positions * self.rope.factor))
        return self.max_position_embeddings

    @property
    def longest_length(self) -> int:
        """The largest context, in tokens, that the rotary embedding supports."""
        if self.rope.kind in ("linear", "dynamic"):
            return max(self.max_position_embeddings, int(self.max_position_embeddings * self.rope.factor))
        return max(self.max_position_embeddings, self.default_length)

    @property
    def longest_window(self) -> int | None:
        """The longest sliding window, in tokens; None when a layer has none."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a tied head counts once."""
        return sum(_product(shape) for shape in tensor_shapes(self).values())


def slices_of(spec: DecoderSpec, forms: WeightForms) -> int:
    """Number of slices of inputs that are cut among ranks: of the numbers of ranks that are served, the largest power
    of two up to 8."""
    slices = spec.slices
    if isinstance(forms, Quantization):
        cut = spec.num_heads * spec.head_dim, spec.intermediate_size
        while not all(forms.cuts(inputs, slices) for inputs in cut):
            slices //= 2
    return slices


def matrices_of(spec: DecoderSpec) -> list[str]:
    """Modules that have a matrix: those of products, and the embedding."""
    return [name.removesuffix(".weight") for name, shape in tensor_shapes(spec).items() if len(shape) == 2]


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and full shape of every tensor of an ordinary (not fused) checkpoint of this model."""
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
    if spec.post_norms:
        layer |= {"pre_feedforward_layernorm.weight": (h,), "post_feedforward_layernorm.weight": (h,)}
    if spec.qk_norm:
        layer |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, h), "model.norm.weight": (h,)}
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, h)
    return shapes


def is_ignorable(spec: DecoderSpec, name: str) -> bool:
    """Whether a tensor of the checkpoint may stay unused, because it repeats what the model already has."""
    if name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints saved; computed from config.json here
        return True
    return spec.tie_word_embeddings and name == "lm_head.weight"


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


_LAYERS, _EMBEDDING = "model.layers.", "model.embed_tokens."


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of `stage`, one at least where there are as many layers as stages.

    Stages hold neighbouring layers, as equally many as possible: earlier ones have one more where they cannot be dealt
    equally, since the last stage has the output head too. The first embeds; the last norms and samples, and holds a
    tied embedding a second time.
    """
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def is_in_stage(spec: DecoderSpec, name: str, layers: range) -> bool:
    """Whether the stage with `layers` holds the tensor `name`, in whichever form a checkpoint stores it. A name that no
    stage knows is in all of them."""
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    if name.startswith(_LAYERS):
        number = name.removeprefix(_LAYERS).partition(".")[0]
        return not number.isdigit() or int(number) >= spec.num_layers or int(number) in layers
    if name.startswith(_EMBEDDING):
        return is_first or (is_last and spec.tie_word_embeddings)
    return is_last or not name.startswith(("model.norm.", "lm_head."))


def tensors_of_stage(spec: DecoderSpec, layers: range) -> dict[str, tuple[int, ...]]:
    """Name and full shape of every tensor of the stage with `layers`, in an ordinary checkpoint."""
    return {name: shape for name, shape in tensor_shapes(spec).items() if is_in_stage(spec, name, layers)}
