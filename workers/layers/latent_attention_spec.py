"""Specification of multi-head latent attention: heads, latent, rotation and scale; its tensors, memory and operations.

See DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1. A token leaves one row for all heads: the normed latent, from which
the keys and values of every head are linear functions, and one rotated key. Here each head's function of the keys is
applied to its query instead, and its function of the values to its result ("absorbed"): then the latent itself is the
value, and the row is the key. So attention has one KV head of `kv_rank + rope_width` elements.

Torch-free. `latent_attention.py` computes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.memory_spec import PagesSpec
from oarlock.workers.layers.tensor_spec import Computation, DividedEvenly, RankDtype, Sharding, Tap, TensorSpec


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec(DividedEvenly):
    """Causal latent attention, from the projections of queries and of the latent to the output projection."""

    num_heads: int
    nope_width: int  # elements of a head's query and key that are not rotated
    rope_width: int  # elements of a head's query that are rotated, and of the rotated key that all heads share
    value_dim: int  # elements of one head's value
    kv_rank: int  # elements of the latent
    scale: float  # factor of the attention scores
    rope: RopeSpec | None  # of the `rope_width` elements; None: no positional encoding
    q_rank: int | None = None  # elements of the queries' own latent; None: queries are projected from the input
    bias: bool = False  # of the projections to the latents, and of the output projection
    eps: float = 1e-6  # of the norms of both latents
    query_factor: float = 1.0  # factor of the queries
    latent_factor: float = 1.0  # factor of the normed latent
    output_gate: bool = False  # each head's result is multiplied by the sigmoid of a projection of the input
    # The checkpoint stores the matrices of `kv_b_proj` apart: `k_b_proj`, for each head transposed, and `v_b_proj`.
    splits_kv_b: bool = False

    module: ClassVar[str] = "self_attn"
    title: ClassVar[str] = "latent attention"
    # names, in a verification, of the sublayer's input and of the residual after it
    reads: ClassVar[str] = "input_norm"
    leaves: ClassVar[str] = "mid_residual"
    # GGUF names of the modules, and of the norms before and after the sublayer.
    gguf: ClassVar[Mapping[str, str]] = {
        "q_proj": "attn_q", "q_a_proj": "attn_q_a", "q_a_layernorm": "attn_q_a_norm", "q_b_proj": "attn_q_b",
        "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm", "kv_b_proj": "attn_kv_b",
        "k_b_proj": "attn_k_b", "v_b_proj": "attn_v_b", "o_proj": "attn_output", "g_proj": "attn_gate",
    }  # fmt: skip
    gguf_norms: ClassVar[tuple[str, str]] = ("attn_norm", "post_attention_norm")
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @property
    def query_width(self) -> int:
        """Elements of one head's query, as it is projected."""
        return self.nope_width + self.rope_width

    @property
    def key_width(self) -> int:
        """Elements of the row that is kept for a token, and of a head's query in the absorbed form."""
        return self.kv_rank + self.rope_width

    @property
    def head_matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and inputs of one head's matrix in each module that stores the functions from the latent to keys and
        values."""
        if self.splits_kv_b:
            return {"k_b_proj": (self.kv_rank, self.nope_width), "v_b_proj": (self.value_dim, self.kv_rank)}
        return {"kv_b_proj": (self.nope_width + self.value_dim, self.kv_rank)}

    @property
    def memory(self) -> PagesSpec:
        """The row of each token, which every rank holds."""
        return PagesSpec(1, self.key_width, self.kv_rank, is_copied=True, value_in_key=True)

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of an ordinary checkpoint with hidden size `hidden`, with names relative to `module`."""
        heads, outputs = self.num_heads, Sharding.OUTPUTS
        queries = heads * self.query_width
        if self.q_rank is None:
            found = [TensorSpec("q_proj.weight", (queries, hidden), outputs, heads)]
        else:
            found = [TensorSpec("q_a_proj.weight", (self.q_rank, hidden))]
            if self.bias:
                found.append(TensorSpec("q_a_proj.bias", (self.q_rank,)))
            found.append(TensorSpec("q_a_layernorm.weight", (self.q_rank,), rank_dtype=RankDtype.FOR_KERNELS))
            found.append(TensorSpec("q_b_proj.weight", (queries, self.q_rank), outputs, heads))
        found.append(TensorSpec("kv_a_proj_with_mqa.weight", (self.key_width, hidden)))
        if self.bias:
            found.append(TensorSpec("kv_a_proj_with_mqa.bias", (self.key_width,)))
        scaled = RankDtype.FOR_KERNELS if self.latent_factor == 1.0 else RankDtype.FLOAT32
        found.append(TensorSpec("kv_a_layernorm.weight", (self.kv_rank,), rank_dtype=scaled))
        for module, (width, inputs) in self.head_matrices.items():
            shape = heads * width, inputs
            found.append(TensorSpec(f"{module}.weight", shape, outputs, heads, RankDtype.DEQUANTIZED))
        if self.output_gate:
            found.append(TensorSpec("g_proj.weight", (heads, hidden), outputs, heads))
        found.append(TensorSpec("o_proj.weight", (hidden, self.shared_inputs), Sharding.INPUTS, heads))
        return [*found, TensorSpec("o_proj.bias", (hidden,))] if self.bias else found

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        queries = self.num_heads * self.query_width, self.num_heads
        mixed = self.shared_inputs, self.num_heads
        found = []
        if self.q_rank is not None:
            found.append(Tap("q_a", Computation.PROJECTION, "q_a_proj", width=self.q_rank))
            found.append(Tap("q_latent", Computation.NORM, "q_a_layernorm", width=self.q_rank))
        module, reads = ("q_proj", "") if self.q_rank is None else ("q_b_proj", "q_latent")
        found.append(Tap("q", Computation.PROJECTION, module, False, *queries, reads=reads))
        found.append(Tap("kv_a", Computation.PROJECTION, "kv_a_proj_with_mqa", width=self.key_width))
        found.append(Tap("latent", Computation.NORM, "kv_a_layernorm", width=self.kv_rank, factor=self.latent_factor))
        if self.output_gate:
            found.append(Tap("attention_gate", Computation.PROJECTION, "g_proj", False, self.num_heads, self.num_heads))
        found.append(Tap("q_rope", Computation.ROTATION, width=self.num_heads * self.rope_width, parts=self.num_heads))
        found.append(Tap("k_rope", Computation.ROTATION, width=self.rope_width))
        # Absorbed queries, and results before the matrices of values, are rounded as well.
        found.append(Tap("attention", Computation.ATTENTION, "o_proj", True, *mixed, roundings=3))
        return [*found, Tap("o_proj", Computation.SUM, "o_proj")]

    @property
    def most_ranks(self) -> int:
        return self.num_heads

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"{self.num_heads} heads"

    @property
    def shared_inputs(self) -> int:
        """Number of inputs of the output projection, which are divided among ranks."""
        return self.num_heads * self.value_dim

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} inputs of attention's output"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks: queries before and after
        absorption and results in latents of its heads; the queries' own latent, and the row before and after its
        norm."""
        of_head = self.query_width + self.key_width + self.kv_rank
        return self.num_heads * of_head // size + (self.q_rank or 0) + 2 * self.key_width

    @property
    def pair_ops(self) -> int:
        """Multiplications and additions of a token for each token of its context, over all ranks."""
        return 2 * self.num_heads * (self.key_width + self.kv_rank)

    def for_length(self, length: int) -> "LatentAttentionSpec":
        """Return the attention as it serves sequences of up to `length` tokens."""
        return self if self.rope is None else replace(self, rope=self.rope.for_length(length))
