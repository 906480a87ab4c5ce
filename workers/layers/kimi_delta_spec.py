"""Specification of Kimi delta attention: heads, convolutions, decays and gates; its tensors, memory and operations.

See Kimi Team, "Kimi Linear" (2025), section 3: the gated delta rule with a decay for each channel of a key. Torch-free.
`kimi_delta.py` computes it.
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
class KimiDeltaSpec(DividedEvenly, WithoutContext):
    """Kimi delta attention, from its input projections to its output projection.

    Queries, keys and values, with equal numbers of heads, pass a short convolution and the gated delta rule. The result
    is normed by heads, and multiplied by the sigmoid of an output gate.
    """

    num_heads: int
    head_width: int  # elements of one head's query, key and value
    taps_of_convolution: int  # tokens that one result of the convolution depends on
    eps: float  # of the norm of the results
    decay_rank: int | None = None  # elements between the two projections of the decays; None: there is only one
    gate_rank: int | None = None  # elements between the two projections of the output gate; None: there is only one
    lower_bound: float | None = None  # of the logarithms of decays; None: decays are computed by the softplus
    axes_around_rates: tuple[int, int] = (0, 0)  # axes of length 1 before and after the heads of the stored `A_log`

    module: ClassVar[str] = "self_attn"
    title: ClassVar[str] = "Kimi delta attention"
    # names, in a verification, of the sublayer's input and of the residual after it
    reads: ClassVar[str] = "input_norm"
    leaves: ClassVar[str] = "mid_residual"
    # GGUF names of the modules, and of the norms before and after the sublayer.
    gguf: ClassVar[Mapping[str, str]] = {
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "q_conv1d": "ssm_conv1d_q",
        "k_conv1d": "ssm_conv1d_k", "v_conv1d": "ssm_conv1d_v", "f_a_proj": "ssm_f_a", "f_b_proj": "ssm_f_b",
        "b_proj": "ssm_beta", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "g_a_proj": "ssm_g_a", "g_b_proj": "ssm_g_b",
        "o_norm": "ssm_norm", "o_proj": "attn_output",
    }  # fmt: skip
    gguf_norms: ClassVar[tuple[str, str]] = ("attn_norm", "post_attention_norm")
    # A checkpoint may store these modules as one tensor, concatenated by rows.
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    }

    @property
    def size(self) -> int:
        """Elements of the queries, of the keys and of the values of all heads."""
        return self.num_heads * self.head_width

    @property
    def memory(self) -> SlotsSpec:
        """The state of a sequence: the inputs of the convolution of the latest tokens, and a matrix for each head."""
        return SlotsSpec(
            (
                StatePart("conv", 3 * self.size, (self.taps_of_convolution - 1,), is_float32=False),
                StatePart("state", self.num_heads, (self.head_width, self.head_width)),
            )
        )

    @property
    def rates_shape(self) -> tuple[int, ...]:
        """The stored shape of `A_log`."""
        before, after = self.axes_around_rates
        return (*(1,) * before, self.num_heads, *(1,) * after)

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of a checkpoint that stores all modules separately, with names relative to `module`."""
        heads, size, outputs = self.num_heads, self.size, Sharding.OUTPUTS
        found = [TensorSpec(f"{part}_proj.weight", (size, hidden), outputs, heads) for part in "qkv"]
        found += [
            TensorSpec(f"{part}_conv1d.weight", (size, 1, self.taps_of_convolution), outputs, heads, RankDtype.FLOAT32)
            for part in "qkv"
        ]
        exact = RankDtype.UNQUANTIZED
        if self.decay_rank is None:
            found.append(TensorSpec("f_proj.weight", (size, hidden), outputs, heads, exact))
        else:
            found.append(TensorSpec("f_a_proj.weight", (self.decay_rank, hidden), rank_dtype=exact))
            found.append(TensorSpec("f_b_proj.weight", (size, self.decay_rank), outputs, heads, exact))
        found.append(TensorSpec("b_proj.weight", (heads, hidden), outputs, heads, exact))
        found.append(TensorSpec("A_log", self.rates_shape, Sharding.OUTPUTS, heads, RankDtype.FLOAT32))
        found.append(TensorSpec("dt_bias", (size,), outputs, heads, RankDtype.FLOAT32))
        if self.gate_rank is None:
            found.append(TensorSpec("g_proj.weight", (size, hidden), outputs, heads))
        else:
            found.append(TensorSpec("g_a_proj.weight", (self.gate_rank, hidden)))
            found.append(TensorSpec("g_b_proj.weight", (size, self.gate_rank), outputs, heads))
        found.append(TensorSpec("o_norm.weight", (self.head_width,), Sharding.COPIES, heads, RankDtype.FLOAT32))
        return [*found, TensorSpec("o_proj.weight", (hidden, size), Sharding.INPUTS, heads)]

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        whole, heads = (self.size, self.num_heads), (self.num_heads, self.num_heads)
        found = [Tap(f"kimi_{part}", Computation.PROJECTION, f"{part}_proj", False, *whole) for part in "qkv"]
        if self.decay_rank is not None:
            found.append(Tap("kimi_f_a", Computation.PROJECTION, "f_a_proj", width=self.decay_rank))
        f, reads = ("f_proj", "") if self.decay_rank is None else ("f_b_proj", "kimi_f_a")
        found.append(Tap("kimi_f", Computation.PROJECTION, f, False, *whole, reads=reads))
        found.append(Tap("kimi_b", Computation.PROJECTION, "b_proj", False, *heads))
        if self.gate_rank is not None:
            found.append(Tap("kimi_g_a", Computation.PROJECTION, "g_a_proj", width=self.gate_rank))
        g, reads = ("g_proj", "") if self.gate_rank is None else ("g_b_proj", "kimi_g_a")
        found.append(Tap("kimi_g", Computation.PROJECTION, g, False, *whole, reads=reads))
        found += [Tap(f"{part}_conv", Computation.CONVOLUTION, f"{part}_conv1d", False, *whole) for part in "qkv"]
        return [
            *found,
            Tap("recurrence", Computation.RECURRENCE, "o_norm", True, *whole),
            Tap("gated_norm", Computation.GATED_NORM, "o_proj", True, *whole),
            Tap("kimi_delta", Computation.SUM, "o_proj"),
        ]

    @property
    def most_ranks(self) -> int:
        return self.num_heads

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"{self.num_heads} heads of Kimi delta attention"

    @property
    def shared_inputs(self) -> int:
        """Number of inputs of the output projection, which are divided among ranks."""
        return self.size

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} inputs of Kimi delta attention's output"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks: the convolution's inputs and
        results, the output gate, the rule's results before and after the norm, one float32 value of each channel for
        decays, and the values between two projections, which every rank has."""
        of_heads = 6 * self.size + 3 * self.size + 2 * self.size + 4 * self.num_heads
        return of_heads // size + (self.decay_rank or 0) + (self.gate_rank or 0)
