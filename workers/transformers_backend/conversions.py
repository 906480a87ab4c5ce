"""One conversion of stored tensors to tensors of a class, by transformers' own operations, whole or for one expert."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oarlock.workers.transformers_backend.private_parts import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    Split,
    Transpose,
    WeightConverter,
)

Shape = tuple[int, ...]

_WITHIN_ENTRIES = {1, 2, -1}  # dimensions of a stack that are surely not the first


class ShapesOfClass:
    """What operations ask of a model: its config, and the shapes of its whole parameters. It holds no values."""

    def __init__(self, config: Any, tensors: Mapping[str, Shape]) -> None:
        self.config, self.tensors = config, tensors

    def get_parameter(self, name: str) -> Tensor:
        """Return a tensor of the parameter's shape on the meta device."""
        return torch.empty(self.tensors[name], device="meta")

    def of_one_expert(self) -> "ShapesOfClass":
        """Return the same shapes, as if every stacked tensor had one entry."""
        stacks = {name: (1, *shape[1:]) if len(shape) > 2 else shape for name, shape in self.tensors.items()}
        return ShapesOfClass(self.config, stacks)


@dataclass(slots=True, eq=False)
class Conversion:
    """A converter with the stored tensors that it reads, in its order."""

    converter: WeightConverter
    target: str  # class's name of the first tensor that it makes
    sources: dict[str, list[str]]  # pattern of the converter -> stored names

    @property
    def stored_names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    @property
    def has_one_target(self) -> bool:
        patterns = self.converter.target_patterns
        return len(patterns) == 1 and "*" not in patterns[0]

    def run(self, read: Callable[[str], Tensor], shapes: ShapesOfClass) -> dict[str, Tensor]:
        """Return class's names -> whole tensors. `read` returns the whole tensor of a stored name."""
        return self._convert(self.sources, read, shapes)

    def run_expert(self, expert: int, read: Callable[[str], Tensor], shapes: ShapesOfClass) -> dict[str, Tensor]:
        """Return class's names -> stacks [1, ...] of one expert. Only if `is_by_expert`.

        `read` returns a stored tensor of this expert, or the entry [1, ...] of a stored stack. `shapes`: those
        `of_one_expert`.
        """
        sources = self.sources
        if self.is_of_lists:
            parts = self._parts
            sources = {
                pattern: [names[part * -(-len(names) // parts) + expert] for part in range(parts)]
                for pattern, names in sources.items()
            }
        return self._convert(sources, read, shapes)

    def _convert(
        self, sources: Mapping[str, Sequence[str]], read: Callable[[str], Tensor], shapes: ShapesOfClass
    ) -> dict[str, Tensor]:
        converter: Any = deepcopy(self.converter)  # it collects the tensors of one conversion
        for pattern, names in sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, read(name))
        made = converter.convert(self.target, model=shapes, config=shapes.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    @property
    def is_of_lists(self) -> bool:
        """Whether experts are stored one by one, and stacked first."""
        first = self.converter.operations[0]
        if isinstance(first, MergeModulelist):
            return first.dim == 0
        return isinstance(first, ErnieFuseAndSplitTextVisionExperts) and first.stack_dim == 0 != first.concat_dim

    @property
    def is_by_expert(self) -> bool:
        """Whether every operation computes each entry of a stack [experts, ...] from entries of that index alone."""
        operations = self.converter.operations
        return all(map(_keeps_entries, operations[1:] if self.is_of_lists else operations))

    def rows_of_expert(self, expert: int) -> list[str] | None:
        """Return the stored tensors that one after the other are the rows of this expert; None if more is needed."""
        first, *others = self.converter.operations
        is_concatenated = len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1
        if not isinstance(first, MergeModulelist) or first.dim != 0 or (others and not is_concatenated):
            return None
        patterns = [one for one in self.converter.source_patterns if one in self.sources]
        if (len(patterns) > 1) != is_concatenated or any(expert >= len(self.sources[one]) for one in patterns):
            return None
        return [self.sources[one][expert] for one in patterns]

    @property
    def _parts(self) -> int:
        """Stacks that each list is divided into."""
        is_divided = isinstance(self.converter.operations[0], ErnieFuseAndSplitTextVisionExperts)
        return len(self.converter.target_patterns) if is_divided else 1


def _keeps_entries(operation: object) -> bool:
    """Return whether an operation on stacks [experts, ...] leaves the first dimension alone."""
    if isinstance(operation, Transpose):
        return {operation.dim0, operation.dim1} <= _WITHIN_ENTRIES
    if isinstance(operation, (Chunk, Concatenate, Interleave, Split)):
        return operation.dim in _WITHIN_ENTRIES
    return False


# What transformers' operations raise for tensors that do not fit.
CONVERSION_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def made_shapes(conversion: Conversion, stored: Mapping[str, Shape], shapes: ShapesOfClass) -> dict[str, Shape] | str:
    """Return the shapes that a conversion makes of stored shapes, or the reason why it fails; no data is read."""
    try:
        made = conversion.run(lambda name: torch.empty(stored[name], device="meta"), shapes)
    except CONVERSION_ERRORS as error:
        return one_line(error)
    return {name: tuple(tensor.shape) for name, tensor in made.items()}


def one_line(error: Exception) -> str:
    """Return the kind and the text of an error, shortened if it is long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
