"""Specification of Mamba 2: heads, groups, convolution, limits and norm; its tensors, memory and operations.

Torch-free. `mamba2.py` computes it. See Dao and Gu, "Transformers are SSMs" (2024).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from oarlock.workers.layers.memory_spec import SlotsSpec, StatePart
from oarlock.workers.layers.sharding import heads_divide
from oarlock.workers.layers.tensor_spec import Computation, RankDtype, Sharding, Tap, TensorSpec, WithoutContext

# The parts of the input projection, in the order of its rows, and those that pass the convolution.
PROJECTIONS = ("gate_proj", "x_proj", "b_proj", "c_proj", "dt_proj")
CHANNELS = ("conv_x", "conv_b", "conv_c")


@dataclass(frozen=True, slots=True)
class Mamba2Spec(WithoutContext):
    """Mamba 2, from the input projection to the output projection.

    The input is projected to a gate, to x of each head, to B and C of each group and to the time step of each head. x,
    B and C pass a causal convolution and SiLU, then the recurrence of each head; its result is gated and normed.
    """

    num_heads: int
    head_dim: int
    groups: int  # B and C of a group serve `num_heads // groups` consecutive heads
    state_width: int
    window: int  # tokens that the convolution sees, with the token itself
    eps: float | None  # of the norm of the result, over the heads of each group; None: it is gated, but not normed
    gates_first: bool = True  # the gate is applied before the norm; False: after it
    conv_bias: bool = True
    projection_bias: bool = False
    output_bias: bool = False
    least_step: float = 0.0  # limits of time steps, after softplus
    most_step: float = math.inf
    # Factors of the projected gate, x, B, C and time step.
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    module: ClassVar[str] = "mamba"
    title: ClassVar[str] = "mamba"
    # names, in a verification, of the sublayer's input and of the residual after it
    reads: ClassVar[str] = "input_norm"
    leaves: ClassVar[str] = "mid_residual"
    # GGUF names of the modules, and of the norms before and after the sublayer.
    gguf: ClassVar[Mapping[str, str]] = {
        "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d",
        "norm": "ssm_norm", "out_proj": "ssm_out",
    }  # fmt: skip
    gguf_norms: ClassVar[tuple[str, str]] = ("attn_norm", "post_attention_norm")
    # A checkpoint stores these modules as one tensor, concatenated by rows.
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {"in_proj": PROJECTIONS, "conv1d": CHANNELS}

    @property
    def width(self) -> int:
        """Values of x of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        """Values of B of all groups, and of C."""
        return self.groups * self.state_width

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The rows of each part of `PROJECTIONS`, and the number of parts in which ranks divide them."""
        heads, groups = (self.width, self.num_heads), (self.group_width, self.groups)
        return heads, heads, groups, groups, (self.num_heads, self.num_heads)

    @property
    def memory(self) -> SlotsSpec:
        """The latest inputs of the convolution, and the state of each head."""
        shape = self.head_dim, self.state_width
        return SlotsSpec(
            (
                StatePart("conv", self.width, (self.window - 1,), 2 * self.group_width, self.groups, is_float32=False),
                StatePart("state", self.num_heads, shape),
            )
        )

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of an ordinary checkpoint with hidden size `hidden`, with names relative to `module`."""
        found: list[TensorSpec] = []
        for name, (rows, parts) in zip(PROJECTIONS, self.rows, strict=True):
            found.append(TensorSpec(f"{name}.weight", (rows, hidden), Sharding.OUTPUTS, parts))
            if self.projection_bias:
                found.append(TensorSpec(f"{name}.bias", (rows,), Sharding.OUTPUTS, parts))
        for name, (rows, parts) in zip(CHANNELS, self.rows[1:4], strict=True):
            cut = Sharding.OUTPUTS, parts, RankDtype.FLOAT32
            found.append(TensorSpec(f"{name}.weight", (rows, 1, self.window), *cut))
            if self.conv_bias:
                found.append(TensorSpec(f"{name}.bias", (rows,), *cut))
        of_heads = Sharding.OUTPUTS, self.num_heads, RankDtype.FLOAT32
        found += [TensorSpec(name, (self.num_heads,), *of_heads) for name in ("dt_bias", "A_log", "D")]
        if self.eps is not None:
            found.append(TensorSpec("norm.weight", (self.width,), *of_heads))
        found.append(TensorSpec("out_proj.weight", (hidden, self.width), Sharding.INPUTS, self.num_heads))
        return [*found, TensorSpec("out_proj.bias", (hidden,))] if self.output_bias else found

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        heads = self.width, self.num_heads
        names = ("mamba_gate", "mamba_x", "mamba_b", "mamba_c", "mamba_dt")
        projected = zip(names, PROJECTIONS, self.rows, strict=True)
        convolved = zip(("x_conv", "b_conv", "c_conv"), CHANNELS, self.rows[1:4], strict=True)
        return [
            *(Tap(name, Computation.PROJECTION, module, False, *cut) for name, module, cut in projected),
            *(Tap(name, Computation.CONVOLUTION, module, False, *cut) for name, module, cut in convolved),
            *([] if self.eps is None else [Tap("recurrence", Computation.RECURRENCE, "norm", True, *heads)]),
            Tap("gated_norm", Computation.GATED_NORM, "out_proj", True, *heads),
            Tap("mamba", Computation.SUM, "out_proj"),
        ]

    @property
    def most_ranks(self) -> int:
        return self.num_heads

    def divides(self, size: int) -> bool:
        """Return whether the heads and their groups can be divided among `size` ranks."""
        return heads_divide(self.num_heads, self.groups, size)

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"{self.num_heads} heads of Mamba in {self.groups} groups"

    @property
    def shared_inputs(self) -> int:
        """Number of inputs of the output projection, which are divided among ranks."""
        return self.width

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} inputs of Mamba's output"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks: the projection, the
        convolved rows, and two float32 copies of the result. Several ranks may have copies of B and C."""
        of_groups = 2 * self.group_width // self.groups * max(1, self.groups // size)
        projected = (2 * self.width + self.num_heads) // size + of_groups
        return projected + self.width // size + of_groups + 4 * self.width // size
