"""Specification of self-attention: heads, rotation, window and scale; its tensors, memory and operations.

Torch-free. `attention.py` computes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from oarlock.workers.layers.memory_spec import PagesSpec
from oarlock.workers.layers.sharding import heads_divide, kv_heads_of_rank
from oarlock.workers.layers.tensor_spec import Computation, NormSpec, RankDtype, Sharding, Tap, TensorSpec


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding with every optional value resolved. Fields that a `kind` does not use keep their defaults."""

    kind: str  # default | linear | dynamic | llama3 | yarn | longrope | proportional
    theta: float
    rotary_dim: int  # leading elements of a head that are rotated; the rest are not changed
    factor: float = 1.0
    original_max_positions: int = 0  # dynamic, llama3, yarn, longrope: the length that the frequencies were trained for
    attention_factor: float = 1.0  # yarn, longrope: scales cos and sin
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: factor of each pair of elements, up to original_max_positions
    long_factors: tuple[float, ...] = ()  # longrope: the same for longer sequences
    stretched: bool = False  # longrope: the long factors apply to every token; see `for_length`
    rotated_pairs: int = 0  # proportional: leading pairs of elements that are rotated; the others are not changed
    interleaved: bool = False  # rotates elements 2i and 2i + 1, not elements that are rotary_dim / 2 apart

    def for_length(self, length: int) -> "RopeSpec":
        """Return the settings for a server of sequences of up to `length` tokens, which all get the same angles.

        LongRoPE has two sets of factors, and a model was trained with one set for all tokens of a sequence, chosen by
        the sequence's length. Cached keys cannot be rotated again when a sequence grows past the trained length, and a
        cached prefix is shared by short and long sequences. So the longest sequence served decides for all.
        """
        stretched = self.kind == "longrope" and length > self.original_max_positions
        return self if stretched == self.stretched else replace(self, stretched=stretched)

    def default_length(self, max_positions: int) -> int:
        """Return the context length, in tokens, that is served by default for a model of `max_positions`.

        For LongRoPE it is the length trained with the short factors: up to this length the angles equal transformers'
        for every sequence. A longer context gives short sequences the long factors, so it is an explicit choice.
        """
        if self.kind == "longrope":
            return min(max_positions, self.original_max_positions)
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_positions * self.factor))
        return max_positions

    def longest_length(self, max_positions: int) -> int:
        """Return the largest context, in tokens, that the angles of a model of `max_positions` support."""
        if self.kind in ("linear", "dynamic"):
            return max(max_positions, int(max_positions * self.factor))
        return max(max_positions, self.default_length(max_positions))


@dataclass(frozen=True, slots=True)
class QueryScale:
    """A factor of the rotated queries that grows with the position: `1 + beta * log(1 + level)`.

    The level is the integer `(position + shift) // period`, so that a factor holds for `period` positions.
    """

    beta: float
    period: int  # tokens
    shift: int = 0


@dataclass(frozen=True, slots=True)
class SelfAttentionSpec:
    """Causal grouped-query attention, from the q, k and v projections to the output projection."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the attention scores
    rope: RopeSpec | None  # None: no positional encoding
    window: int | None = None  # a query sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become cap * tanh(scores / cap)
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None  # norm of q and k, before the rotation unless `norms_after_rotation`
    norms_rows: bool = False  # True: q and k are normed over all heads of a row; False: each head is normed by itself
    # each query head has a learned extra score that belongs to no key and takes its share of the softmax
    sinks: bool = False
    clip_qkv: float | None = None  # queries, keys and values are limited to this size after their projection
    norms_after_rotation: bool = False  # True: each head of q and k is normed after the rotation
    query_scale: QueryScale | None = None  # None: queries are not scaled by their position
    chunk: int | None = None  # a query sees the tokens of its own chunk of this many tokens, up to itself
    key_scale: float = 1.0  # factor of the rotated keys, which scores get instead
    output_gate: bool = False  # each value of the result is multiplied by the sigmoid of a projection of the input
    value_dim: int | None = None  # values of one head's value; None: `head_dim`, as of queries and keys
    of_layer: int | None = None  # layer whose keys and values are read; then there are no projections of own ones
    keeps_all: bool = False  # keys before a window or chunk are kept, though no query sees them
    keys_are_values: bool = False  # values are the projected keys, before their norm and rotation
    norms_values: bool = False  # each head's value is divided by its root mean square, with the epsilon of `qk_norm`
    value_scale: float = 1.0  # factor of the values
    gate_activation: str = "sigmoid"  # sigmoid | softplus, if there is an output gate
    gate_per_head: bool = False  # True: the output gate has one value for each head

    module: ClassVar[str] = "self_attn"
    title: ClassVar[str] = "attention"
    # names, in a verification, of the sublayer's input and of the residual after it
    reads: ClassVar[str] = "input_norm"
    leaves: ClassVar[str] = "mid_residual"
    # GGUF names of the modules, and of the norms before and after the sublayer.
    gguf: ClassVar[Mapping[str, str]] = {
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "qkv_proj": "attn_qkv", "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm", "sinks": "attn_sinks", "o_proj": "attn_output", "gate_proj": "attn_gate",
    }  # fmt: skip
    gguf_norms: ClassVar[tuple[str, str]] = ("attn_norm", "post_attention_norm")
    # A checkpoint may store these modules as one tensor, concatenated by rows.
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    @property
    def span(self) -> int | None:
        """The number of latest tokens that hold all keys which a query sees; None: it may see any token before it."""
        return self.window if self.chunk is None else self.chunk

    @property
    def value_width(self) -> int:
        """Values of one head's value, and of its result."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def has_keys(self) -> bool:
        """Whether there are projections of keys and values."""
        return self.of_layer is None

    @property
    def num_gates(self) -> int:
        """Values of the output gate, if there is one, over all ranks."""
        return self.num_heads if self.gate_per_head else self.shared_inputs

    @property
    def memory(self) -> PagesSpec:
        """The keys and values of each token that must be kept."""
        span = None if self.keeps_all else self.span
        return PagesSpec(self.num_kv_heads, self.head_dim, self.value_width, span, self.of_layer)

    @property
    def has_norm_weights(self) -> bool:
        return self.qk_norm is not None and self.qk_norm.weight

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of an ordinary checkpoint with hidden size `hidden`, with names relative to `module`."""
        found: list[TensorSpec] = []
        parts = [("q", self.num_heads, self.head_dim)]
        if self.has_keys:
            parts.append(("k", self.num_kv_heads, self.head_dim))
        if self.has_keys and not self.keys_are_values:
            parts.append(("v", self.num_kv_heads, self.value_width))
        for part, heads, width in parts:
            rows = heads * width
            found.append(TensorSpec(f"{part}_proj.weight", (rows, hidden), Sharding.OUTPUTS, heads))
            if self.qkv_bias:
                found.append(TensorSpec(f"{part}_proj.bias", (rows,), Sharding.OUTPUTS, heads))
            if self.has_norm_weights and part != "v":
                shape = (rows,) if self.norms_rows else (self.head_dim,)
                cut = Sharding.OUTPUTS if self.norms_rows else Sharding.COPIES
                found.append(TensorSpec(f"{part}_norm.weight", shape, cut, heads, RankDtype.FLOAT32))
        if self.output_gate:
            found.append(TensorSpec("gate_proj.weight", (self.num_gates, hidden), Sharding.OUTPUTS, self.num_heads))
        if self.sinks:
            found.append(TensorSpec("sinks", (self.num_heads,), Sharding.OUTPUTS, self.num_heads, RankDtype.FLOAT32))
        found.append(TensorSpec("o_proj.weight", (hidden, self.shared_inputs), Sharding.INPUTS, self.num_heads))
        return [*found, TensorSpec("o_proj.bias", (hidden,))] if self.o_bias else found

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        q, k = (self.num_heads * self.head_dim, self.num_heads), (self.num_kv_heads * self.head_dim, self.num_kv_heads)
        v = self.num_kv_heads * self.value_width, self.num_kv_heads
        mixed = self.shared_inputs, self.num_heads
        norms = ("q_norm", "k_norm") if self.has_norm_weights else ("", "")
        found = [Tap("q", Computation.PROJECTION, "q_proj", False, *q)]
        if self.has_keys:
            found.append(Tap("k", Computation.PROJECTION, "k_proj", False, *k))
        if self.has_keys and not self.keys_are_values:
            found.append(Tap("v", Computation.PROJECTION, "v_proj", False, *v))
        if self.output_gate:
            found.append(
                Tap("attention_gate", Computation.PROJECTION, "gate_proj", False, self.num_gates, self.num_heads)
            )
        found.append(Tap("q_rope", Computation.ROTATION, norms[0], False, *q))
        if self.has_keys:
            found.append(Tap("k_rope", Computation.ROTATION, norms[1], False, *k))
        found.append(Tap("attention", Computation.ATTENTION, "o_proj", True, *mixed))
        return [*found, Tap("o_proj", Computation.SUM, "o_proj")]

    @property
    def most_ranks(self) -> int:
        return self.num_heads

    def divides(self, size: int) -> bool:
        """Return whether the heads can be divided among `size` ranks."""
        return heads_divide(self.num_heads, self.num_kv_heads, size)

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"{self.num_heads} heads, {self.num_kv_heads} key-value heads"

    @property
    def shared_inputs(self) -> int:
        """Number of inputs of the output projection, which are divided among ranks."""
        return self.num_heads * self.value_width

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} inputs of attention's output"

    def step_values(self, size: int) -> int:
        """Return the values per token of q, k, v and the gate together, which exist at the same time on each of `size`
        ranks."""
        gate = self.num_gates if self.output_gate else 0
        heads = kv_heads_of_rank(self.num_kv_heads, size) if self.has_keys else 0
        return (self.num_heads * self.head_dim + gate) // size + heads * (self.head_dim + self.value_width)

    @property
    def pair_ops(self) -> int:
        """Multiplications and additions of a token for each token of its context, over all ranks."""
        return 2 * self.num_heads * (self.head_dim + self.value_width)

    def for_length(self, length: int) -> "SelfAttentionSpec":
        """Return the attention as it serves sequences of up to `length` tokens."""
        return self if self.rope is None else replace(self, rope=self.rope.for_length(length))
