"""transformers' side of a quantised model: weights in floating point that mean the same, and products as ours compute.

They are whole, as no rank has them, so that a rank which cuts a scale wrongly differs.
"""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oarlock.workers.quantization import int8, scaled_float8
from oarlock.workers.quantization.formats.form import Arithmetic
from oarlock.workers.verify.meant_weights import MeantWeights

RoundRows = Callable[[Tensor], tuple[Tensor, Tensor]]  # [T, K] -> numbers [T, K], and scales [T]
_ROUNDED: dict[tuple[str, Arithmetic], RoundRows] = {
    ("cpu", Arithmetic.ROUNDED_INPUTS): int8.round_rows,
    ("cuda", Arithmetic.FLOAT8_INPUTS): scaled_float8.round_rows,
}


@dataclass(frozen=True, slots=True)
class LayerLoss:
    """Distance of one layer from the model before its weights were rounded: root mean squares, relative."""

    layer: int
    weights: float  # of all products of the layer
    hidden: float  # of the residual stream after the layer, in float64


@dataclass(frozen=True, slots=True)
class RoundingLoss:
    """Error that rounding the weights adds to each layer, and to the logits at the end."""

    layers: list[LayerLoss]
    logits: float

    def write(self, folder: Path) -> None:
        (folder / "rounding.json").write_text(json.dumps(asdict(self)), "utf-8")

    @staticmethod
    def read(folder: Path) -> "RoundingLoss | None":
        """Reads the loss; None where no weight was rounded at load."""
        path = folder / "rounding.json"
        if not path.is_file():
            return None
        read = json.loads(path.read_text("utf-8"))
        return RoundingLoss([LayerLoss(**layer) for layer in read["layers"]], read["logits"])


class MeantModel:
    """A transformers model whose quantised weights are replaced, in float32, by what they mean."""

    def __init__(
        self, model: nn.Module, meant: MeantWeights, dtype: torch.dtype, *, was_dense: bool, device: str
    ) -> None:
        """`dtype`: what the model computes in. `was_dense`: it has the weights it was stored with, in that dtype.

        `device`: where ranks serve it, by which products round inputs.
        """
        self.was_dense = was_dense
        self._model = model
        self._dtype = dtype
        self._was: dict[Tensor, Tensor] = {}
        self._meant: dict[Tensor, Tensor] = {}
        self._rounds: dict[Tensor, RoundRows | None] = {}  # how its product rounds inputs
        seen: set[Tensor] = set()
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding) or module.weight in seen:
                continue
            seen.add(module.weight)  # a head may be the embedding, and not be stored by itself
            arithmetic, weight = meant.arithmetic(name), module.weight
            if arithmetic is Arithmetic.DENSE:
                if not was_dense:
                    weight.data = meant.weight(name).to(weight.device, dtype)
                continue
            if was_dense:
                self._was[weight] = weight.data
            self._meant[weight] = weight.data = meant.weight(name).to(weight.device, torch.float32)
            self._rounds[weight] = _ROUNDED.get((device, arithmetic))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and hasattr(module, "embed_scale"):
                # part of what the model means: rounded as the model's own weights were
                module.embed_scale = torch.as_tensor(module.embed_scale).to(dtype)

    @contextmanager
    def as_it_was(self) -> Generator[None]:
        """Gives the model the weights that it was stored with, within the context."""
        self._use(self._was)
        try:
            yield
        finally:
            self._use(self._meant)

    def _use(self, weights: dict[Tensor, Tensor]) -> None:
        for parameter, data in weights.items():
            parameter.data = data

    def errors(self, layers: nn.ModuleList) -> Iterator[float]:
        """Distance that rounding moved the weights of each layer, relative to their size."""
        for layer in layers:
            moved = size = 0.0
            for parameter in layer.parameters():
                if parameter in self._meant:
                    was = self._was[parameter].double()
                    moved += (self._meant[parameter].double() - was).square().sum().item()
                    size += was.square().sum().item()
            yield (moved / size) ** 0.5

    @contextmanager
    def as_served(self) -> Generator[None]:
        """Makes products of quantised weights compute in float32 and round inputs where ours do, within the context."""
        changed = []
        for module in self._model.modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module.weight in self._meant:
                module.forward = self._forward(module)  # ty: ignore[invalid-assignment]
                changed.append(module)
        try:
            yield
        finally:
            for module in changed:
                del module.forward

    def _forward(self, module: nn.Linear | nn.Embedding) -> Callable[[Tensor], Tensor]:
        if isinstance(module, nn.Embedding):
            scale = getattr(module, "embed_scale", 1.0)
            return lambda ids: F.embedding(ids, module.weight).to(self._dtype) * scale
        rounds = self._rounds[module.weight]
        return lambda x: _product(module, x, rounds)


def _product(module: nn.Linear, x: Tensor, rounds: RoundRows | None) -> Tensor:
    rows = x.flatten(0, -2).float()
    if rounds is not None:
        values, scales = rounds(rows)
        rows = values.float() * scales.unsqueeze(1)
    y = rows @ module.weight.T
    if module.bias is not None:
        y = y + module.bias.float()
    return y.unflatten(0, x.shape[:-1]).to(x.dtype)
