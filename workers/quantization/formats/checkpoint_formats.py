"""Formats of the weights of a quantised checkpoint, in safetensors files or in GGUF. Torch-free.

The settings describe how weights are quantised; the tensors show which weights are. A module whose weight is stored in
floating point of 16 bits or more is read unquantised, whatever the module lists of the settings contain. In GGUF every
tensor has its own type, and weights in blocks are multiplied without dequantising them.

With `--dequantize` weights are written out at load. Matmuls of quantised weights round inputs if that makes them fast:
to 8 bits on CPUs, to float8 on CUDA devices. A weight in the model's compute dtype needs no such matmul, and takes the
memory of that dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_header import GROUP_LAYOUTS, GroupLayout
from oarlock.workers.model_files.gguf_model import GGUFCheckpoint
from oarlock.workers.platform.dtypes import SAFETENSORS_DTYPES
from oarlock.workers.quantization.formats.weight_format import (
    Arithmetic,
    Scheme,
    StoredFormat,
    WeightFormat,
    WeightFormats,
)
from oarlock.workers.quantization.groups import group_of_blocks, packed_bytes
from oarlock.workers.quantization.registry import NONE, Quantization

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod


# Fused module -> its parts, which a checkpoint may store as one module; `layers/` describes such sublayers.
Fused = Mapping[str, tuple[str, ...]]
_LARGEST_BIAS = 1 << 20  # bytes
# Scales of a KV cache. Our keys and values are not quantised, so these scales are ignored.
_OF_THE_KV_CACHE = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
# (device, arithmetic) -> the format to which matmuls round their inputs.
_ROUNDING = {
    ("cpu", Arithmetic.ROUNDED_INPUTS): "8 bits",
    ("cuda", Arithmetic.FLOAT8_INPUTS): "float8 where there are many rows",
    ("cuda", Arithmetic.FLOAT8_BLOCKS): "float8 where there are many rows",
}


class CheckpointFormats:
    """`WeightFormats` of a quantised checkpoint."""

    def __init__(self, scheme: Scheme, checkpoint: Checkpoint, fused: Fused) -> None:
        self.description = scheme.description
        self._fused = {part: whole for whole, parts in fused.items() for part in parts}
        self._scheme = scheme
        self._checkpoint = checkpoint
        self._modules: set[str] = set()  # modules and their ancestors
        for name in checkpoint.tensors:
            while name := name.rpartition(".")[0]:
                self._modules.add(name)

    @property
    def of_head(self) -> CheckpointFormats:
        return self

    @property
    def of_gates(self) -> CheckpointFormats:
        return self

    def has(self, module: str) -> bool:
        """Return whether the checkpoint holds a tensor of the module."""
        return module in self._modules

    def format_of(self, module: str) -> WeightFormat:
        return self.stored_format(module) or NONE

    def stored_format(self, module: str) -> StoredFormat | None:
        """Return the stored format of a module's weight, or None if it is not quantised."""
        stored = self._stored_module(module)
        weight = self._checkpoint.find(f"{stored}.weight")
        if (weight is not None and weight.entry.dtype in SAFETENSORS_DTYPES) or not self.has(stored):
            return None
        return self._scheme.format_of(self._checkpoint.stored_module(stored))

    def ignores(self, name: str) -> bool:
        if name.endswith(_OF_THE_KV_CACHE):
            return True
        module, _, kind = name.rpartition(".")
        weight_format = self.stored_format(module)
        if weight_format is None:
            return False
        return kind in weight_format.spare or (kind == "bias" and self._is_zero(name))

    def _stored_module(self, module: str) -> str:
        """Return the module's name, or the name of the fused module in which the checkpoint holds it."""
        above, _, part = module.rpartition(".")
        inner = above.rpartition(".")
        fused = self._fused.get(f"{inner[2]}.{part}")
        if fused is None or self.has(module) or not self.has(f"{inner[0]}.{fused}"):
            return module
        return f"{inner[0]}.{fused}"

    def _is_zero(self, name: str) -> bool:
        """Return whether a bias is all zeros. Old tools store such a bias for every module that they quantised."""
        found = self._checkpoint.find(name)
        if found is None or found.entry.end - found.entry.begin > _LARGEST_BIAS:
            return False
        with found.path.open("rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little") + found.entry.begin)
            return not any(file.read(found.entry.end - found.entry.begin))


@dataclass(frozen=True, slots=True)
class GGUFFormat:
    """`WeightFormat` of weights in blocks."""

    group: int
    bits: int
    has_offsets: bool
    is_float: bool = False

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.ROUNDED_INPUTS

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.grouped import GGUFLinearMethod

        return GGUFLinearMethod(GroupLayout(self.group, self.bits, self.has_offsets, self.is_float))

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        group = group_of_blocks(self.group, inputs, slices)
        if group is None:
            return rows * inputs * item_bytes
        return packed_bytes(rows, inputs, self.bits, group, offsets=self.has_offsets)


class GGUFFormats:
    """`WeightFormats` of a GGUF model."""

    def __init__(self, checkpoint: GGUFCheckpoint, fused: Fused) -> None:
        self._checkpoint = checkpoint
        self._siblings = {part: (whole, parts) for whole, parts in fused.items() for part in parts}

    @property
    def description(self) -> str:
        """Types of the model's matrices, the most frequent first."""
        kinds = [found.entry.dtype for found in self._checkpoint.tensors.values() if len(found.entry.shape) == 2]
        return f"gguf ({', '.join(sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind)))})"

    @property
    def of_head(self) -> GGUFFormats:
        return self

    @property
    def of_gates(self) -> GGUFFormats:
        return self

    def format_of(self, module: str) -> WeightFormat:
        """Return one format for weights that are multiplied together, such as q, k and v. It can hold all their types.

        If one of them is stored in floating point, the others are dequantised.
        """
        above, _, last = module.rpartition(".")
        layer, _, parent = above.rpartition(".")
        fused, parts = self._siblings.get(f"{parent}.{last}", ("", ()))
        names = [f"{layer}.{part}" for part in parts] or [module]
        if self._checkpoint.find(f"{layer}.{fused}.weight") is not None:
            names = [f"{layer}.{fused}"]
        found = [self._checkpoint.find(f"{name}.weight") for name in names]
        formats = [GROUP_LAYOUTS.get(one.entry.dtype) for one in found if one is not None]
        known = [weight_format for weight_format in formats if weight_format is not None]
        if not known or len(known) < len(formats):
            return NONE
        is_float = all(weight_format.is_float for weight_format in known)
        return GGUFFormat(
            min(weight_format.group for weight_format in known),
            # Doubled 4-bit floats (-12 to 12), combined with integers, are stored as integers of 8 bits.
            8
            if any(weight_format.is_float for weight_format in known) and not is_float
            else max(weight_format.bits for weight_format in known),
            any(weight_format.has_offsets for weight_format in known),
            is_float,
        )

    def ignores(self, name: str) -> bool:
        """Return False: every tensor of a GGUF model is used."""
        return False


def input_rounding(formats: WeightFormats, modules: Iterable[str], device: str) -> str | None:
    """Return the type to which matmuls of some of `modules` round their inputs, or None if none of them rounds."""
    found = {_ROUNDING.get((device, formats.format_of(module).arithmetic)) for module in modules}
    return next((text for text in _ROUNDING.values() if text in found), None)


@dataclass(frozen=True, slots=True)
class DequantisedFormat:
    """`WeightFormat` of a weight that is dequantised at load."""

    stored: WeightFormat

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.DENSE

    def method(self) -> LinearMethod:
        return _dequantising(self.stored.method)

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return rows * inputs * item_bytes


class DequantisedFormats:
    """`WeightFormats` that dequantise the weights whose matmuls would round inputs on `device`."""

    def __init__(self, formats: WeightFormats, device: str) -> None:
        self._formats, self._device = formats, device

    @property
    def of_head(self) -> DequantisedFormats:
        return DequantisedFormats(self._formats.of_head, self._device)

    @property
    def of_gates(self) -> DequantisedFormats:
        return DequantisedFormats(self._formats.of_gates, self._device)

    def format_of(self, module: str) -> WeightFormat:
        weight_format = self._formats.format_of(module)
        return (
            DequantisedFormat(weight_format) if (self._device, weight_format.arithmetic) in _ROUNDING else weight_format
        )

    def ignores(self, name: str) -> bool:
        return self._formats.ignores(name)


def served_formats(formats: WeightFormats, device: str, *, dequantize: bool) -> WeightFormats:
    """Return `formats` as ranks on `device` hold them."""
    return dequantised_formats(formats, device) if dequantize else formats


def dequantised_formats(formats: WeightFormats, device: str) -> WeightFormats:
    """Return `formats` for matmuls that do not round inputs on `device`."""
    if not isinstance(formats, Quantization):
        return DequantisedFormats(formats, device)
    if (device, formats.arithmetic) not in _ROUNDING:
        return formats
    # `group` stays, so that shards have the same borders as with rounded inputs, and weights the same groups.
    plain = replace(
        formats, method=partial(_dequantising, formats.method), bits=None, bytes_per_row=0, bytes_per_group=0, head=None
    )
    return plain if formats.head is None else replace(plain, head=dequantised_formats(formats.head, device))


def _dequantising(method: Callable[[], LinearMethod]) -> LinearMethod:
    from oarlock.workers.quantization.method import DequantisingLinearMethod

    return DequantisingLinearMethod(method())
