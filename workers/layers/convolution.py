"""Depthwise causal convolution on one rank: its weights, and the base of the layers whose inputs pass one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from oarlock.workers.attention.backend import LayerStep
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.method import StoredRows
from oarlock.workers.recurrent import operations
from oarlock.workers.weights.source import WeightSource


class ConvolutionWeights:
    """Taps of the channels of this rank: `weight` float32 [channels, taps] after loading, for `causal_convolution`.

    The last tap is the token's own. A checkpoint has a tensor [channels, 1, taps] for each part, or one for all.
    """

    def __init__(
        self,
        parts: Sequence[StoredRows],
        taps: int,
        placement: Placement,
        fused: str | None = None,
        *,
        has_bias: bool = False,
        scales: Sequence[float] = (),
    ) -> None:
        """Describe this rank's channels of each part. `fused`: module under which all parts may be stored as one.
        `scales`: factor of the inputs of each part; (): none."""
        self.parts = tuple(parts)
        self.taps = taps
        self.placement = placement
        self.fused = fused
        self.has_bias = has_bias
        self.scales = tuple(scales)
        self.bias: Tensor | None = None  # float32 [channels]

    @property
    def channels(self) -> int:
        """Number of channels of this rank."""
        return sum(part.count for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        return 4 * self.channels * (self.taps + self.has_bias)

    def load(self, weights: WeightSource) -> None:
        self.weight = self._taken(weights, "weight", self.taps)
        if self.scales:  # the convolution is linear: the factors of its inputs are factors of its weight
            of_parts = self.weight.split([part.count for part in self.parts])
            for part, scale in zip(of_parts, self.scales, strict=True):
                part.mul_(scale)
        self.bias = self._taken(weights, "bias") if self.has_bias else None

    def __call__(self, x: Tensor, step: LayerStep, *, silu: bool) -> Tensor:
        """Return the convolution of `x` [T, channels], and write its state, the first of the layer: [T, channels].

        `silu`: the results pass through SiLU.
        """
        assert step.states is not None and step.state_step is not None, "a convolution has slots of state"
        states = step.states.parts[0]
        return operations.causal_convolution(x, states, self.weight, self.bias, step.state_step, silu=silu)

    def _taken(self, weights: WeightSource, kind: str, *inner: int) -> Tensor:
        """Return this rank's rows of all parts, separate or fused: float32 [channels, *inner]."""
        into = torch.empty((self.channels, *inner), dtype=torch.float32, device=self.placement.device)
        is_fused = self.fused is not None and weights.has(f"{self.fused}.{kind}")
        all_rows = sum(part.rows for part in self.parts)
        row = above = 0
        for part in self.parts:
            name, rows, first = (self.fused, all_rows, above) if is_fused else (part.name, part.rows, 0)
            stored = weights.shape_of(f"{name}.{kind}")
            # GGUF files and dummy weights hold a matrix, other checkpoints the weight of torch's module.
            shape = (1, *inner) if stored is not None and len(stored) == 3 else inner
            view = into[row : row + part.count].view(part.count, *shape)
            weights.take(f"{name}.{kind}", view, shape=(rows, *shape), start=first + part.first)
            row += part.count
            above += part.rows
        return into


class ConvolvedLayer:
    """Base of the recurrent layers whose projected inputs pass a convolution and SiLU."""

    convolution: ConvolutionWeights

    def convolve(self, rows: Tensor, step: LayerStep) -> Tensor:
        """Return the convolution of `rows` [T, channels], and write its state: [T, channels]."""
        return self.convolution(rows, step, silu=True)
