"""Specification of the MLP without a gate: its width and activation; its tensors, memory and operations.

Torch-free. `mlp.py` computes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from oarlock.workers.layers.tensor_spec import Computation, DividedEvenly, Sharding, Tap, TensorSpec, WithoutContext


@dataclass(frozen=True, slots=True)
class MLPSpec(DividedEvenly, WithoutContext):
    """An MLP without a gate: `down(activation(up(x)))`."""

    intermediate_size: int
    activation: str  # gelu | gelu_tanh | relu | relu2
    bias: bool = False  # up and down have biases

    module: ClassVar[str] = "mlp"
    title: ClassVar[str] = "mlp"
    reads: ClassVar[str] = "mlp_norm"  # names, in a verification, of the sublayer's input and of the residual after it
    leaves: ClassVar[str] = "mlp_residual"
    # GGUF names of the modules, and of the norms before and after.
    gguf: ClassVar[Mapping[str, str]] = {"up_proj": "ffn_up", "down_proj": "ffn_down"}
    gguf_norms: ClassVar[tuple[str, str]] = ("ffn_norm", "post_ffw_norm")
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of an ordinary checkpoint with hidden size `hidden`, with names relative to `module`."""
        width = self.intermediate_size
        found = [TensorSpec("up_proj.weight", (width, hidden), Sharding.OUTPUTS, width)]
        if self.bias:
            found.append(TensorSpec("up_proj.bias", (width,), Sharding.OUTPUTS, width))
        found.append(TensorSpec("down_proj.weight", (hidden, width), Sharding.INPUTS, width))
        return [*found, TensorSpec("down_proj.bias", (hidden,))] if self.bias else found

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        width = self.intermediate_size
        return [
            Tap("projected", Computation.PROJECTION, "up_proj", False, width, width, is_compared=False),
            Tap("up", Computation.ACTIVATED, "down_proj", True, width, width),
            Tap("mlp", Computation.SUM, "down_proj"),
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
        """Return the values per token that exist at the same time on each of `size` ranks: the projection, which may be
        float32, and its activation."""
        return 3 * self.intermediate_size // size
