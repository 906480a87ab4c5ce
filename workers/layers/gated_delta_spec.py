"""Specification of the gated delta net: heads, convolution and gates; its tensors, memory and operations.

Torch-free. `gated_delta.py` computes it. See Yang et al., "Gated Delta Networks" (2024).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from oarlock.workers.layers.memory_spec import SlotsSpec, StatePart
from oarlock.workers.layers.tensor_spec import (
    Computation,
    DividedEvenly,
    RankDtype,
    Sharding,
    Tap,
    TensorSpec,
    WithoutContext,
)


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(DividedEvenly, WithoutContext):
    """A gated delta net, from its input projections to its output projection.

    Queries, keys and values pass a short convolution and the gated delta rule. The result is normed by heads and gated.
    Each key head serves num_value_heads / num_key_heads consecutive value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_width: int  # elements of one query or key head
    value_width: int  # elements of one value head
    taps_of_convolution: int  # tokens that one result of the convolution depends on
    eps: float  # of the norm of the results
    doubles_beta: bool = False  # the rate of a write is between 0 and 2, not between 0 and 1

    module: ClassVar[str] = "linear_attn"
    title: ClassVar[str] = "gated delta net"
    # names, in a verification, of the sublayer's input and of the residual after it
    reads: ClassVar[str] = "input_norm"
    leaves: ClassVar[str] = "mid_residual"
    # GGUF names of the modules, and of the norms before and after the sublayer.
    gguf: ClassVar[Mapping[str, str]] = {
        "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha",
        "in_proj_ba": "ssm_ba", "conv1d": "ssm_conv1d", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias",
        "norm": "ssm_norm", "out_proj": "ssm_out",
    }  # fmt: skip
    gguf_norms: ClassVar[tuple[str, str]] = ("attn_norm", "post_attention_norm")
    # A checkpoint may store these modules as one tensor, concatenated by rows.
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    }

    @property
    def key_size(self) -> int:
        """Elements of the queries, and of the keys, of all heads."""
        return self.num_key_heads * self.key_width

    @property
    def value_size(self) -> int:
        """Elements of the values of all heads."""
        return self.num_value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def memory(self) -> SlotsSpec:
        """The state of a sequence: the inputs of the convolution of the latest tokens, and a matrix for each head."""
        return SlotsSpec(
            (
                StatePart("conv", self.channels, (self.taps_of_convolution - 1,), is_float32=False),
                StatePart("state", self.num_value_heads, (self.key_width, self.value_width)),
            )
        )

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of a checkpoint that stores all modules separately, with names relative to `module`."""
        heads = self.num_value_heads
        parts = (("q", self.key_size, self.num_key_heads), ("k", self.key_size, self.num_key_heads))
        parts = (*parts, ("v", self.value_size, heads))
        outputs, gate = Sharding.OUTPUTS, RankDtype.UNQUANTIZED
        found = [TensorSpec(f"in_proj_{part}.weight", (rows, hidden), outputs, of) for part, rows, of in parts]
        found.append(TensorSpec("in_proj_z.weight", (self.value_size, hidden), outputs, heads))
        found += [TensorSpec(f"in_proj_{part}.weight", (heads, hidden), outputs, heads, gate) for part in ("b", "a")]
        for part, rows, of in parts:
            shape = (rows, 1, self.taps_of_convolution)
            found.append(TensorSpec(f"{part}_conv1d.weight", shape, outputs, of, RankDtype.FLOAT32))
        found += [TensorSpec(name, (heads,), outputs, heads, RankDtype.FLOAT32) for name in ("A_log", "dt_bias")]
        found.append(TensorSpec("norm.weight", (self.value_width,), Sharding.COPIES, heads, RankDtype.FLOAT32))
        return [*found, TensorSpec("out_proj.weight", (hidden, self.value_size), Sharding.INPUTS, heads)]

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        key, value = (self.key_size, self.num_key_heads), (self.value_size, self.num_value_heads)
        heads = self.num_value_heads, self.num_value_heads
        return [
            Tap("delta_q", Computation.PROJECTION, "in_proj_q", False, *key),
            Tap("delta_k", Computation.PROJECTION, "in_proj_k", False, *key),
            Tap("delta_v", Computation.PROJECTION, "in_proj_v", False, *value),
            Tap("delta_z", Computation.PROJECTION, "in_proj_z", False, *value),
            Tap("delta_b", Computation.PROJECTION, "in_proj_b", False, *heads),
            Tap("delta_a", Computation.PROJECTION, "in_proj_a", False, *heads),
            Tap("q_conv", Computation.CONVOLUTION, "q_conv1d", False, *key),
            Tap("k_conv", Computation.CONVOLUTION, "k_conv1d", False, *key),
            Tap("v_conv", Computation.CONVOLUTION, "v_conv1d", False, *value),
            Tap("recurrence", Computation.RECURRENCE, "norm", True, *value),
            Tap("gated_norm", Computation.GATED_NORM, "out_proj", True, *value),
            Tap("delta", Computation.SUM, "out_proj"),
        ]

    @property
    def most_ranks(self) -> int:
        return self.num_key_heads  # each with its value heads

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"{self.num_key_heads} key heads of the gated delta net"

    @property
    def shared_inputs(self) -> int:
        """Number of inputs of the output projection, which are divided among ranks."""
        return self.value_size

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} inputs of the gated delta net's output"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks: the convolution's inputs and
        results, z, the rule's results before and after the norm, and four float32 values of each head."""
        return (2 * self.channels + 3 * self.value_size + 8 * self.num_value_heads) // size
