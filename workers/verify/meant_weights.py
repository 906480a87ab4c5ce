"""Dequantised weights of a model in the form that it is served in: whole, in floating point, without our readers.

A form is one that checkpoints store, one that weights are rounded to at load, or the dtype of the checkpoint.
"""

from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import stored_quantization, weight_forms
from oarlock.workers.quantization import int4, int8
from oarlock.workers.quantization.formats.checkpoint_forms import CheckpointForms
from oarlock.workers.quantization.formats.form import Arithmetic
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.verify.dequantise import dequantised
from oarlock.workers.verify.dequantise_gguf import dequantised_gguf
from oarlock.workers.weights.checkpoint import Checkpoint
from oarlock.workers.weights.gguf_model import gguf_file, open_checkpoint

_ROWS = 8192  # of a weight that are rounded at once


class MeantWeights(Protocol):
    """Dequantised weights by module, named as in transformers' models."""

    def has(self, module: str) -> bool:
        """Whether the module's weight is stored by itself, and not fused with others."""

    def weight(self, module: str) -> Tensor:
        """The weight of a linear module or an embedding: [N, K], in the dtype it is stored in, float32 or float64."""

    def arithmetic(self, module: str) -> Arithmetic:
        """Arithmetic of the module's product; weights that are looked up or not quantised are `DENSE`."""

    def other(self, name: str) -> Tensor:
        """A tensor that is no such weight: of a norm, or a bias."""


def meant_weights(model: Path, quantization: str, dtype: torch.dtype | None = None) -> MeantWeights:
    """Opens a model's weights. `quantization`: as preflight resolves it. `dtype`: to round from; None: their own."""
    if gguf_file(model) is not None:
        return _OfGGUF(model, quantization)
    if quantization in QUANTIZATIONS:
        return _AtLoad(model, quantization, dtype)
    return _Stored(model)


class WrittenOut:
    """`MeantWeights` that are rounded to the dtype of the model, and multiplied with inputs as they are."""

    def __init__(self, meant: MeantWeights, dtype: torch.dtype) -> None:
        self._meant, self._dtype = meant, dtype

    def has(self, module: str) -> bool:
        return self._meant.has(module)

    def weight(self, module: str) -> Tensor:
        return self._meant.weight(module).to(self._dtype)

    def arithmetic(self, module: str) -> Arithmetic:
        of_stored = self._meant.arithmetic(module)
        return of_stored if of_stored is Arithmetic.DENSE else Arithmetic.EXACT_INPUTS

    def other(self, name: str) -> Tensor:
        return self._meant.other(name)


class _AtLoad:
    """Rounded by us, or not at all."""

    def __init__(self, model: Path, quantization: str, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._checkpoint = Checkpoint.open(model)
        form = QUANTIZATIONS[quantization]
        head = next(name for name, other in QUANTIZATIONS.items() if other is form.of_head)
        self._of_layers, self._of_head = quantization, head

    def has(self, module: str) -> bool:
        return self._checkpoint.find(f"{module}.weight") is not None

    def weight(self, module: str) -> Tensor:
        return rounded(_tensor(self._checkpoint, f"{module}.weight").to(self._dtype), self._form_of(module))

    def arithmetic(self, module: str) -> Arithmetic:
        return QUANTIZATIONS[self._form_of(module)].arithmetic

    def other(self, name: str) -> Tensor:
        return _tensor(self._checkpoint, name)

    def _form_of(self, module: str) -> str:
        return self._of_head if module in ("lm_head", "model.embed_tokens") else self._of_layers


class _Stored:
    """`MeantWeights` of a quantised checkpoint in safetensors files."""

    def __init__(self, model: Path) -> None:
        stored = stored_quantization(model, read_config(model))
        assert stored is not None, "preflight has resolved a stored form"
        self._model = model
        self._checkpoint = Checkpoint.open(model)
        self._forms = CheckpointForms(stored.scheme, self._checkpoint)

    def has(self, module: str) -> bool:
        return self._forms.has(module)

    def weight(self, module: str) -> Tensor:
        return dequantised(self._model, module)

    def arithmetic(self, module: str) -> Arithmetic:
        return self._forms.form_of(module).arithmetic

    def other(self, name: str) -> Tensor:
        return _tensor(self._checkpoint, name)


class _OfGGUF:
    """`MeantWeights` of the GGUF file that a described model links to."""

    def __init__(self, model: Path, quantization: str) -> None:
        self._model = model
        self._checkpoint = open_checkpoint(model)
        self._forms = weight_forms(quantization, None, self._checkpoint)

    def has(self, module: str) -> bool:
        return self._checkpoint.find(f"{module}.weight") is not None

    def weight(self, module: str) -> Tensor:
        return dequantised_gguf(self._model, f"{module}.weight")

    def arithmetic(self, module: str) -> Arithmetic:
        return self._forms.form_of(module).arithmetic

    def other(self, name: str) -> Tensor:
        return dequantised_gguf(self._model, name)


def rounded(weight: Tensor, form: str) -> Tensor:
    """Rounds `weight` [N, K] to one of `QUANTIZATIONS`, and dequantises it: float32 [N, K]."""
    if form == "none":
        return weight
    rows = weight.split(_ROWS)
    if form == "int8":
        values_and_scales = map(int8.round_rows, rows)
        return torch.cat([values.float() * scales.unsqueeze(1) for values, scales in values_and_scales])
    return torch.cat([int4.dequantised(*int4.round_groups(some)) for some in rows])


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    found = checkpoint.find(name)
    assert found is not None, f"{name}: the ranks have loaded it"
    with safe_open(found.path, "pt") as file:
        return file.get_tensor(name)
