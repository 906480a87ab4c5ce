"""transformers' side of a quantised model: weights that mean what the rounded ones do, in products that round too.

Weights are rounded whole, as no rank has them, so that a rank which cuts a scale wrongly differs.
"""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from workers.layers.quantization import int4, int8
from workers.layers.quantization.registry import QUANTIZATIONS
from workers.weights.checkpoint import Checkpoint

_ROWS = 8192  # of a weight that are rounded at once


def weight_meant(model: Path, quantization: str, name: str) -> Tensor:
    """What the weight `name` of a checkpoint stands for in the form that it is served in: float64 [N, K]."""
    entry = Checkpoint.open(model).find(name)
    assert entry is not None, "the ranks have loaded it"
    with safe_open(entry.path, "pt") as file:
        stored = file.get_tensor(name)
    return _MEANING[_form_of(name.removesuffix(".weight"), quantization)](stored).double()


def _form_of(name: str, quantization: str) -> str:
    """The form of the weight of the module `name`."""
    form = QUANTIZATIONS[quantization]
    of_head = next(other for other, its in QUANTIZATIONS.items() if its is form.of_head)
    return of_head if name in ("lm_head", "model.embed_tokens") else quantization


@dataclass(frozen=True, slots=True)
class LayerLoss:
    """How far one layer is from the model before its weights were rounded: root mean squares, relative."""

    layer: int
    weights: float  # of all products of the layer
    hidden: float  # of the residual stream after the layer, in float64


@dataclass(frozen=True, slots=True)
class RoundingLoss:
    """What rounding the weights costs, by layer, and of the logits at the end."""

    layers: list[LayerLoss]
    logits: float

    def write(self, folder: Path) -> None:
        (folder / "rounding.json").write_text(json.dumps(asdict(self)), "utf-8")

    @staticmethod
    def read(folder: Path) -> "RoundingLoss | None":
        """None where no weight was rounded at load."""
        path = folder / "rounding.json"
        if not path.is_file():
            return None
        read = json.loads(path.read_text("utf-8"))
        return RoundingLoss([LayerLoss(**layer) for layer in read["layers"]], read["logits"])


class RoundedWeights:
    """A transformers model whose weights of products are replaced, in float32, by what their rounded forms mean."""

    def __init__(self, model: nn.Module, quantization: str, dtype: torch.dtype) -> None:
        """`quantization`: one of `QUANTIZATIONS` that rounds. `dtype`: what the model computes in."""
        self._model = model
        self._dtype = dtype
        self._original: dict[Tensor, Tensor] = {}
        self._rounded: dict[Tensor, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                self._add(module, _form_of(name, quantization))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and hasattr(module, "embed_scale"):
                # part of what the model means: rounded as the model's own weights were
                module.embed_scale = torch.as_tensor(module.embed_scale).to(dtype)
        self._use(self._rounded)

    def _add(self, module: nn.Linear | nn.Embedding, form: str) -> None:
        weight = module.weight
        if weight not in self._rounded:
            self._original[weight] = weight.data
            self._rounded[weight] = torch.cat([_MEANING[form](rows) for rows in weight.data.split(_ROWS)])

    def _use(self, weights: dict[Tensor, Tensor]) -> None:
        for parameter, data in weights.items():
            parameter.data = data

    @contextmanager
    def not_rounded(self) -> Generator[None]:
        """While this lasts, the model has the weights that it was stored with."""
        self._use(self._original)
        try:
            yield
        finally:
            self._use(self._rounded)

    def errors(self, layers: nn.ModuleList) -> Iterator[float]:
        """Of the weights of each layer: the distance that rounding moved them, relative to their size."""
        for layer in layers:
            moved = size = 0.0
            for parameter in layer.parameters():
                if parameter in self._rounded:
                    was = self._original[parameter].double()
                    moved += (self._rounded[parameter].double() - was).square().sum().item()
                    size += was.square().sum().item()
            yield (moved / size) ** 0.5

    @contextmanager
    def products_round(self) -> Generator[None]:
        """While this lasts, each product rounds the rows of its inputs to 8 bits first, and computes in float32."""
        changed = []
        for module in self._model.modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module.weight in self._rounded:
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
        return lambda x: _product(module, x)


def _product(module: nn.Linear, x: Tensor) -> Tensor:
    values, scales = int8.round_rows(x.flatten(0, -2))
    y = (values.float() * scales.unsqueeze(1)) @ module.weight.T
    if module.bias is not None:
        y = y + module.bias.float()
    return y.unflatten(0, x.shape[:-1]).to(x.dtype)


def _int8(weight: Tensor) -> Tensor:
    values, scales = int8.round_rows(weight)
    return values.float() * scales.unsqueeze(1)


def _int4(weight: Tensor) -> Tensor:
    return int4.dequantised(*int4.round_groups(weight))


# What the rounded form of a weight [N, K] stands for, float32.
_MEANING: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda weight: weight, "int8": _int8, "int4": _int4}
