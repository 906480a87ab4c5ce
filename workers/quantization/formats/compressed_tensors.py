"""compressed-tensors, as llm-compressor writes it: integers packed along the inputs or in bytes, or float8.

For integer weights, the format rounds activations as our kernels do: to 8 bits, with a scale for each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oarlock.workers.quantization.formats.fp8 import FLOAT8, FP8Format, block_of
from oarlock.workers.quantization.formats.module_pattern import ModulePattern
from oarlock.workers.quantization.formats.weight_format import (
    SCALES,
    USE_ANOTHER,
    Arithmetic,
    QuantizationSettings,
    StoredFormat,
    StoredTensor,
    check_divides,
    stored,
)
from oarlock.workers.quantization.groups import fp8_bytes, integer_bytes

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod

_PACKED, _INTEGERS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_FORMATS = (_PACKED, _INTEGERS, _FLOATS, "naive-quantized", "mixed-precision")
_PATTERN = "re:"  # prefix of a target that is a regular expression
# Values of `actorder`: either inputs are assigned to groups individually, or only the order of rounding differs.
_BY_GROUP, _BY_WEIGHT = ("group", "dynamic", True), ("weight", "static", False)


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """`StoredFormat` of integers."""

    bits: int
    packed: bool  # True: 32-bit words along the inputs, 2 ** (bits - 1) added; False: one value per byte
    strategy: str  # scope of a scale: the tensor, a channel (an output), or a group of an output's inputs
    group: int | None  # inputs that share a scale; None: all
    symmetric: bool
    ordered: bool = False  # True if `weight_g_idx` has the group of each input

    @property
    def spare(self) -> tuple[str, ...]:
        return ("weight_shape", "weight_g_idx")

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.ROUNDED_INPUTS

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.packed_integers import GroupedLinearMethod, IntegerReader

        return GroupedLinearMethod(IntegerReader(self.bits, self.packed, self.group, self.symmetric))

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        in_word = 32 // self.bits
        groups = inputs // (self.group or inputs)
        found = {
            "weight_scale": _scales(self.strategy, rows, groups),
            "weight_g_idx": stored(("I32", "I64"), inputs, required=self.ordered),
            "weight_shape": stored(("I64", "I32"), 2, required=False),
        }
        if self.packed:
            found["weight_packed"] = stored("I32", rows, -(-inputs // in_word))
        else:
            found["weight"] = stored("I8", rows, inputs)
        if not self.symmetric:
            packed, plain = stored("I32", -(-rows // in_word), groups), stored("I8", rows, groups)
            found["weight_zero_point"] = packed if self.packed else plain
        return found

    def check(self, module: str, rows: int, inputs: int) -> None:
        check_divides(module, "groups", inputs, self.group or inputs)

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return integer_bytes(rows, inputs, self.bits, self.group, offsets=not self.symmetric)


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """`StoredFormat` of float8 with a scale for each output or for each group of its inputs."""

    strategy: str  # channel | group
    group: int | None
    rounds_rows: bool  # True if the settings round inputs to float8

    @property
    def spare(self) -> tuple[str, ...]:
        return ()

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.FLOAT8_INPUTS if self.rounds_rows and self.group is None else Arithmetic.EXACT_INPUTS

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.fp8 import FP8LinearMethod

        return FP8LinearMethod("weight_scale", (1, self.group), rounds_rows=self.rounds_rows)

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        groups = inputs // (self.group or inputs)
        return {"weight": stored(FLOAT8, rows, inputs), "weight_scale": _scales(self.strategy, rows, groups)}

    def check(self, module: str, rows: int, inputs: int) -> None:
        check_divides(module, "groups", inputs, self.group or inputs)

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return fp8_bytes(rows, inputs, self.group or inputs)


def _scales(strategy: str, rows: int, groups: int) -> StoredTensor:
    shapes: dict[str, tuple[tuple[int | None, ...], ...]] = {
        "tensor": ((), (1,)), "channel": ((rows, 1), (rows,)), "group": ((rows, groups),)
    }  # fmt: skip
    return StoredTensor(SCALES, shapes[strategy])


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules of one format."""

    targets: tuple[str, ...]  # names of modules and of kinds of layers
    patterns: tuple[ModulePattern, ...]
    weight_format: StoredFormat

    def has(self, module: str) -> bool:
        return module in self.targets or any(pattern.matches(module) for pattern in self.patterns)

    @property
    def describes_all(self) -> bool:
        return "Linear" in self.targets


@dataclass(frozen=True, slots=True)
class CompressedTensorsScheme:
    """`Scheme` of compressed-tensors."""

    description: str
    groups: tuple[_Group, ...]

    def format_of(self, module: str) -> StoredFormat | None:
        """Return the format of `module`. A name or a pattern takes precedence over a kind of layer."""
        named = [group.weight_format for group in self.groups if group.has(module)]
        return next(iter(named + [group.weight_format for group in self.groups if group.describes_all]), None)


def compressed_tensors(settings: QuantizationSettings) -> CompressedTensorsScheme:
    """Parse compressed-tensors' settings. Raise `StartupError` for unsupported settings."""
    sparsity = settings.table("sparsity_config")
    sparsity.one_of(("format",), "dense", ("dense",))
    settings.refuse("transform_config", ({}, {"config_groups": {}}))
    outer = settings.one_of(("format",), _PACKED, _FORMATS)
    tables = settings.tables("config_groups")
    if not tables:
        raise settings.unsupported("config_groups", settings.get("config_groups"))
    groups, kinds = [], []
    for table in tables:
        weights = table.table("weights")
        if not weights.raw:
            raise table.unsupported("weights", table.get("weights"))
        rounds_rows = _has_activations(table)
        own = table.one_of(("format",), outer, _FORMATS)
        kind = weights.one_of(("type",), "int", ("int", "float"))
        weight_format = _integers(weights, own) if kind == "int" else _floats(weights, own, rounds_rows)
        targets = table.names("targets")
        names = tuple(target for target in targets if not target.startswith(_PATTERN))
        patterns = tuple(
            ModulePattern(target.removeprefix(_PATTERN), f"{table.location}.targets")
            for target in targets
            if target.startswith(_PATTERN)
        )
        groups.append(_Group(names, patterns, weight_format))
        kinds.append(_described(weight_format))
    return CompressedTensorsScheme(f"compressed-tensors ({'; '.join(dict.fromkeys(kinds))})", tuple(groups))


def _integers(weights: QuantizationSettings, own: str) -> IntegerFormat:
    bits = weights.one_of(("num_bits",), 8, (4, 8))
    group, strategy = _group(weights, ("tensor", "channel", "group"))
    if own == _FLOATS:
        raise weights.unsupported("type", "int", f"Repair the settings: format {own!r} is of another type.")
    ordered = weights.one_of(("actorder",), False, (*_BY_GROUP, *_BY_WEIGHT)) in _BY_GROUP
    if ordered and group is None:
        raise weights.unsupported("actorder", weights.get("actorder"), "Repair the settings: there are no groups.")
    return IntegerFormat(bits, own == _PACKED, strategy, group, weights.flag("symmetric", default=True), ordered)


def _floats(weights: QuantizationSettings, own: str, rounds_rows: bool) -> FP8Format | FloatFormat:
    weights.one_of(("num_bits",), 8, (8,))
    weights.one_of(("symmetric",), True, (True,))
    weights.one_of(("actorder",), False, _BY_WEIGHT)
    if own in (_PACKED, _INTEGERS):
        raise weights.unsupported("type", "float", f"Repair the settings: format {own!r} is of another type.")
    group, strategy = _group(weights, ("tensor", "channel", "group", "block"))
    if strategy == "block":
        return FP8Format(block_of(weights, "block_structure"), "weight_scale", rounds_rows)
    if strategy == "tensor":
        return FP8Format(None, "weight_scale", rounds_rows)
    return FloatFormat(strategy, group, rounds_rows)


def _group(weights: QuantizationSettings, strategies: tuple[str, ...]) -> tuple[int | None, str]:
    """Return (inputs that share a scale, None for all; the strategy). The group size may imply the strategy."""
    size = weights.group_size(("group_size",), -1)
    implied = "group" if size is not None else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = weights.one_of(("strategy",), implied, strategies)
    if strategy == "group" and size is None:
        raise weights.unsupported("group_size", weights.get("group_size"), "Repair the settings.")
    return (size if strategy == "group" else None), strategy


def _has_activations(table: QuantizationSettings) -> bool:
    """Return whether activations are rounded.

    Raise `StartupError` unless they are dynamic with 8 bits: kernels or scales for all others are missing.
    """
    if table.get("output_activations") is not None:
        raise table.unsupported("output_activations", table.get("output_activations"))
    if table.get("input_activations") is None:
        return False
    inputs = table.table("input_activations")
    inputs.one_of(("num_bits",), 8, (8,))
    if inputs.get("dynamic") is not True:
        raise inputs.unsupported(
            "dynamic", inputs.get("dynamic"), f"Activations with stored scales are not supported. {USE_ANOTHER}"
        )
    return True


def _described(weight_format: IntegerFormat | FP8Format | FloatFormat) -> str:
    if isinstance(weight_format, FP8Format):
        return weight_format.description
    what = "fp8" if isinstance(weight_format, FloatFormat) else f"{weight_format.bits} bits"
    group, strategy = weight_format.group, weight_format.strategy
    return f"{what}, {f'a scale for each {strategy}' if group is None else f'groups of {group}'}"
