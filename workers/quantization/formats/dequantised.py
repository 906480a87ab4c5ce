"""Weights that are written out at load, so that products take inputs as they are (`--dequantize`). Torch-free.

Products of quantised weights round inputs where that makes them fast: to 8 bits on CPUs, to float8 on CUDA devices. A
weight in the dtype that the model computes in needs no such product, and takes that dtype's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from oarlock.workers.quantization.formats.form import Arithmetic, Form, WeightForms
from oarlock.workers.quantization.registry import Quantization

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod

# What products of an arithmetic do to their inputs, by the device that they run on.
_ROUNDING = {
    ("cpu", Arithmetic.ROUNDED_INPUTS): "8 bits",
    ("cuda", Arithmetic.FLOAT8_INPUTS): "float8 where there are many rows",
}


def input_rounding(forms: WeightForms, modules: Iterable[str], device: str) -> str | None:
    """Number type to which products of some of `modules` round their inputs; None: none of them rounds."""
    found = {_ROUNDING.get((device, forms.form_of(module).arithmetic)) for module in modules}
    return next((text for text in _ROUNDING.values() if text in found), None)


@dataclass(frozen=True, slots=True)
class DequantisedForm:
    """`Form` of a weight that is written out."""

    stored: Form

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.DENSE

    def method(self) -> LinearMethod:
        return _dequantising(self.stored.method)

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return rows * inputs * item_bytes


class DequantisedForms:
    """`WeightForms` of which those that round inputs on `device` are written out."""

    def __init__(self, forms: WeightForms, device: str) -> None:
        self._forms, self._device = forms, device

    @property
    def of_head(self) -> DequantisedForms:
        return DequantisedForms(self._forms.of_head, self._device)

    def form_of(self, module: str) -> Form:
        form = self._forms.form_of(module)
        return DequantisedForm(form) if (self._device, form.arithmetic) in _ROUNDING else form

    def ignores(self, name: str) -> bool:
        return self._forms.ignores(name)


def served_forms(forms: WeightForms, device: str, *, dequantize: bool) -> WeightForms:
    """`forms` as ranks on `device` hold them."""
    return dequantised_forms(forms, device) if dequantize else forms


def dequantised_forms(forms: WeightForms, device: str) -> WeightForms:
    """`forms` for products that round no inputs on `device`."""
    if not isinstance(forms, Quantization):
        return DequantisedForms(forms, device)
    if (device, forms.arithmetic) not in _ROUNDING:
        return forms
    # `group` stays, so that shards begin where they do for rounded inputs, and weights are rounded in the same groups.
    plain = replace(
        forms, method=partial(_dequantising, forms.method), bits=None, bytes_per_row=0, bytes_per_group=0, head=None
    )
    return plain if forms.head is None else replace(plain, head=dequantised_forms(forms.head, device))


def _dequantising(method: Callable[[], LinearMethod]) -> LinearMethod:
    from oarlock.workers.quantization.unquantized import DequantisingLinearMethod

    return DequantisingLinearMethod(method())
