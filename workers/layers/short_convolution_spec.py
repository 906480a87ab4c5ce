"""Specification of the gated short convolution: its channels and kernel size; its tensors, memory and operations.

Torch-free. `short_convolution.py` computes it.
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

_PARTS = ("b", "c", "x")  # the inputs' gate, the results' gate and the inputs, in the order of the stored rows


@dataclass(frozen=True, slots=True)
class ShortConvolutionSpec(DividedEvenly, WithoutContext):
    """The gated short convolution of LFM2: `out(c * convolution(b * x))`, with projections b, c and x of the input.

    The convolution is depthwise: a channel's result depends on its own latest `kernel_size` values.
    """

    channels: int
    kernel_size: int  # latest tokens on which a result depends, including its own
    bias: bool = False  # the projections and the convolution have biases

    module: ClassVar[str] = "conv"
    title: ClassVar[str] = "convolution"
    # names, in a verification, of the sublayer's input and of the residual after it
    reads: ClassVar[str] = "input_norm"
    leaves: ClassVar[str] = "mid_residual"
    # GGUF names of the modules, and of the norms before and after the sublayer.
    gguf: ClassVar[Mapping[str, str]] = {
        "in_proj": "shortconv.in_proj", "conv": "shortconv.conv", "out_proj": "shortconv.out_proj",
    }  # fmt: skip
    gguf_norms: ClassVar[tuple[str, str]] = ("attn_norm", "post_attention_norm")
    # Checkpoints store these modules as one tensor, concatenated by rows.
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {"in_proj": tuple(f"{part}_proj" for part in _PARTS)}

    @property
    def memory(self) -> SlotsSpec:
        """The latest inputs of each channel, in the dtype of the model."""
        return SlotsSpec((StatePart("conv", self.channels, (self.kernel_size - 1,), is_float32=False),))

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of an ordinary checkpoint with hidden size `hidden`, with names relative to `module`."""
        count = self.channels
        found: list[TensorSpec] = []
        for part in _PARTS:
            found.append(TensorSpec(f"{part}_proj.weight", (count, hidden), Sharding.OUTPUTS, count))
            if self.bias:
                found.append(TensorSpec(f"{part}_proj.bias", (count,), Sharding.OUTPUTS, count))
        of_ranks = Sharding.OUTPUTS, count, RankDtype.FLOAT32
        found.append(TensorSpec("conv.weight", (count, 1, self.kernel_size), *of_ranks))
        if self.bias:
            found.append(TensorSpec("conv.bias", (count,), *of_ranks))
        found.append(TensorSpec("out_proj.weight", (hidden, count), Sharding.INPUTS, count))
        return [*found, TensorSpec("out_proj.bias", (hidden,))] if self.bias else found

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        parts = self.channels, self.channels
        return [
            *(Tap(f"conv_{part}", Computation.PROJECTION, f"{part}_proj", False, *parts) for part in _PARTS),
            Tap("convolution", Computation.CONVOLUTION, "out_proj", True, *parts),
            Tap("out_proj", Computation.SUM, "out_proj"),
        ]

    @property
    def most_ranks(self) -> int:
        return self.channels

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"{self.channels} convolution channels"

    @property
    def shared_inputs(self) -> int:
        """Number of inputs of the output projection, which are divided among ranks."""
        return self.channels

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} inputs of the convolution's output"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks: b, c, x and the inputs of
        the convolution."""
        return 4 * self.channels // size
