"""Dequantised weights in the layouts of transformers' modules, which may hold the rows of several of ours."""

from collections.abc import Callable

import torch
from torch import Tensor

from oarlock.workers.layers.decoder_spec import FUSED_MODULES
from oarlock.workers.model_files.tensor_names import Blocks, TensorNames
from oarlock.workers.quantization.formats.weight_format import Arithmetic
from oarlock.workers.verify.dequantised_reference import DequantisedWeights


class TransformersLayout:
    """`DequantisedWeights` of a family under the names of transformers' modules."""

    def __init__(self, dequantised: DequantisedWeights, names: TensorNames) -> None:
        self._dequantised, self._names = dequantised, names

    def has(self, module: str) -> bool:
        return self._dequantised.has(self._ours(module))

    def weight(self, module: str) -> Tensor:
        return self._rows(self._ours(module), self._dequantised.weight)

    def arithmetic(self, module: str) -> Arithmetic:
        ours = self._ours(module)
        first = ours if self._dequantised.has(ours) else next(iter(self._parts(ours)), ours)
        return self._dequantised.arithmetic(first)

    def other(self, name: str) -> Tensor:
        module, _, kind = self._ours(name).rpartition(".")
        return self._rows(module, lambda one: self._dequantised.other(f"{one}.{kind}"))

    def _ours(self, name: str) -> str:
        ours = self._names.rename(name)
        assert ours is not None, f"{name} is a module of transformers that the family's table ignores"
        return ours

    def _parts(self, module: str) -> list[str]:
        """Return the modules whose rows our module `module` holds; empty if it cannot be stored in parts."""
        blocks = self._names.blocks_of(module)
        *above, parent, last = ["", "", *module.split(".")]
        parts = blocks.parts if blocks is not None else ()
        if not parts:
            parts = tuple(part.rpartition(".")[2] for part in FUSED_MODULES.get(f"{parent}.{last}", ()))
        return [".".join([*above[2:], parent, part]) for part in parts]

    def _rows(self, module: str, rows_of: Callable[[str], Tensor]) -> Tensor:
        """Return the rows of `module` in the order of transformers' module. `rows_of`: reads those of a module that is
        stored."""
        blocks = self._names.blocks_of(module)
        is_part = blocks is not None and module.rpartition(".")[2] in blocks.parts  # one part may have the whole's name
        if self._dequantised.has(module) and not is_part:
            whole = rows_of(module)
            if blocks is None:
                return whole
            parts = list(whole.split([rows * blocks.groups for rows in blocks.rows]))  # GGUF has one part after another
        elif names := self._parts(module):
            parts = [self._part(name, names, blocks, rows_of) for name in names]
        else:
            return rows_of(module)
        found = torch.cat(parts)
        if blocks is None:
            return found
        places = [row for part in blocks.parts for row in blocks.rows_of(part)]
        ordered = torch.empty_like(found)
        ordered[places] = found
        return ordered

    def _part(self, module: str, parts: list[str], blocks: Blocks | None, rows_of: Callable[[str], Tensor]) -> Tensor:
        """Return the rows of a part. All `parts` may be stored in one tensor, in their order."""
        above, _, last = module.rpartition(".")
        parent = above.rpartition(".")[2]
        for whole, inside in FUSED_MODULES.items():
            stored = f"{above}.{whole.rpartition('.')[2]}"
            if blocks is None or self._dequantised.has(module) or f"{parent}.{last}" not in inside:
                continue
            if self._dequantised.has(stored):
                lengths = {name: rows * blocks.groups for name, rows in zip(parts, blocks.rows, strict=True)}
                before = [f"{above}.{one.rpartition('.')[2]}" for one in inside[: inside.index(f"{parent}.{last}")]]
                first = sum(lengths[name] for name in before)
                return rows_of(stored)[first : first + lengths[module]]
        return rows_of(module)
