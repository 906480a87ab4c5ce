"""Specification of the gated MLP: its width and activation; its tensors, memory and operations.

Torch-free. `gated_mlp.py` computes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from oarlock.workers.layers.tensor_spec import Computation, DividedEvenly, Sharding, Tap, TensorSpec, WithoutContext


@dataclass(frozen=True, slots=True)
class GatedMLPSpec(DividedEvenly, WithoutContext):
    """A gated MLP: `down(activation(gate(x)) * up(x))`."""

    intermediate_size: int
    activation: str = "silu"  # silu | gelu_tanh
    bias: bool = False  # gate, up and down have biases
    # Factor of the gate before its activation. The branch scales the input by it, and the result by its inverse, since
    # up is larger by it as well; without biases.
    gate_scale: float = 1.0

    module: ClassVar[str] = "mlp"
    title: ClassVar[str] = "mlp"
    reads: ClassVar[str] = "mlp_norm"  # names, in a verification, of the sublayer's input and of the residual after it
    leaves: ClassVar[str] = "mlp_residual"
    # GGUF names of the modules, and of the norms before and after. A fused gate and up has the GGUF name of up.
    gguf: ClassVar[Mapping[str, str]] = {
        "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "gate_up_proj": "ffn_up",
    }  # fmt: skip
    gguf_norms: ClassVar[tuple[str, str]] = ("ffn_norm", "post_ffw_norm")
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {"gate_up_proj": ("gate_proj", "up_proj")}

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of an ordinary checkpoint with hidden size `hidden`, with names relative to `module`."""
        width = self.intermediate_size
        found: list[TensorSpec] = []
        for part in ("gate", "up"):
            found.append(TensorSpec(f"{part}_proj.weight", (width, hidden), Sharding.OUTPUTS, width))
            if self.bias:
                found.append(TensorSpec(f"{part}_proj.bias", (width,), Sharding.OUTPUTS, width))
        found.append(TensorSpec("down_proj.weight", (hidden, width), Sharding.INPUTS, width))
        return [*found, TensorSpec("down_proj.bias", (hidden,))] if self.bias else found

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        width = self.intermediate_size
        return [
            Tap("gate", Computation.PROJECTION, "gate_proj", False, width, width, is_compared=False),
            Tap("gate_up", Computation.GATED, "down_proj", True, width, width, factor=self.gate_scale),
            Tap("mlp", Computation.SUM, "down_proj", factor=self.gate_scale),
        ]

    @property
    def memory(self) -> None:
        """Nothing is kept of a sequence."""

    @property
    def most_ranks(self) -> int:
        return self.intermediate_size

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"intermediate size {self.intermediate_size}"

    @property
    def shared_inputs(self) -> int:
        """Number of inputs of the down projection, which are divided among ranks."""
        return self.intermediate_size

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} of the MLP's"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks."""
        return 3 * self.intermediate_size // size
