"""The gated MLP of a decoder layer: activation(gate) * up, then down, with one all-reduce."""

from torch import Tensor

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.linear import GatedParallelLinear, RowParallelLinear
from oarlock.workers.layers.placement import Placement


class GatedMLP:
    """`x` [T, hidden] (normed) -> [T, hidden]: the residual plus the MLP output, or without a residual that alone."""

    def __init__(self, name: str, spec: DecoderSpec, place: Placement) -> None:
        self.gate_up = GatedParallelLinear(
            name, spec.hidden_size, spec.intermediate_size, spec.mlp_bias, spec.activation, place
        )
        self.down = RowParallelLinear(
            f"{name}.down_proj", spec.intermediate_size, spec.hidden_size, spec.mlp_bias, place
        )

    @property
    def parts(self) -> list[GatedParallelLinear | RowParallelLinear]:
        return [self.gate_up, self.down]

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.down(self.gate_up(x), residual)

    def unrounded(self, x: Tensor) -> Tensor:
        """The MLP's output without a residual, as `RowParallelLinear.unrounded` gives it."""
        return self.down.unrounded(self.gate_up(x))
