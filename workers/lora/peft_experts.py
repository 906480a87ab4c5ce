"""The pairs of parameters that stack the matrices of all experts of a layer, as PEFT stores them. Torch-free.

PEFT's A [rank * experts, ...] holds the rows of an expert one after the other. Its B [..., rank * experts] holds the
columns of all experts in turn. Releases of PEFT differ in the half that reads the inputs: A, or the transposed B. Sizes
show it unless the matrices are square; then another parameter of the same adapter shows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oarlock.base.errors import StartupError, shown
from oarlock.workers.lora.adapted_modules import ExpertStack
from oarlock.workers.lora.adapter_config import AdapterConfig
from oarlock.workers.lora.adapter_pair import OTHER_MODEL, AdapterPair, StoredPair, check_shape


@dataclass(frozen=True, slots=True)
class StoredStack:
    """A pair of a parameter in a module of transformers."""

    name: str  # name of the module in PEFT's settings
    depth: int  # number of PEFT's wrappers around this pair's: the first parameter is the innermost
    pair: StoredPair
    stack: ExpertStack

    def key(self, parameter: str, config: AdapterConfig) -> str | None:
        """Return the name of a parameter in PEFT's settings; None if they do not target it."""
        return config.key_of_parameter(self.name, "weight" if self.stack.only is not None else parameter)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A parameter that a pair may belong to."""

    parameter: str
    is_swapped: bool  # the transposed B reads the inputs


def expert_pairs(path: Path, stacks: Sequence[StoredStack], config: AdapterConfig) -> Iterator[AdapterPair]:
    """Yield the pairs of all experts in `stacks`. Raise `StartupError` naming the tensor at fault."""
    layouts = [_layouts(path, one, stacks, config) for one in stacks]
    shown_by_sizes = {found[0].is_swapped for found in layouts if len(found) == 1}
    for one, found in zip(stacks, layouts, strict=True):
        possible = found if len(found) == 1 else [layout for layout in found if {layout.is_swapped} == shown_by_sizes]
        if len(possible) != 1:
            raise StartupError(
                f"{path}: tensor {shown(one.pair.a.name)} belongs to square matrices of experts, so that its shape "
                "does not show which half of the pair reads the inputs.",
                "Adapt both parameters of the experts, or store each expert by itself.",
            )
        key = one.key(possible[0].parameter, config)
        assert key is not None, "layouts are of parameters that are targeted"
        yield from _pairs(path, one, possible[0], key, config)


def _layouts(path: Path, one: StoredStack, stacks: Sequence[StoredStack], config: AdapterConfig) -> list[_Layout]:
    """Return each layout that the sizes of a pair allow."""
    a, b, stack = one.pair.a, one.pair.b, one.stack
    targeted = [parameter for parameter in stack.parameters if one.key(parameter, config) is not None]
    if not targeted:
        raise config.not_targeted(path, a.name)
    depths = sorted((other.depth for other in stacks if other.name == one.name), reverse=True)
    if len(depths) == len(targeted):
        targeted = [targeted[depths.index(one.depth)]]
    sizes = a.shape[1], b.shape[0]
    found = []
    for parameter in targeted:
        inputs, outputs = stack.sizes(parameter)
        found += [_Layout(parameter, False)] if sizes == (inputs, outputs) else []
        found += [_Layout(parameter, True)] if sizes == (outputs, inputs) else []
    if not found:
        raise StartupError(
            f"{path}: tensor {shown(a.name)} of shape {list(a.shape)}, with lora_B of shape {list(b.shape)}, fits no "
            f"parameter of {stack.module} that {config.path.name} targets.",
            OTHER_MODEL,
        )
    return found


def _pairs(path: Path, one: StoredStack, layout: _Layout, key: str, config: AdapterConfig) -> Iterator[AdapterPair]:
    a, b, stack = one.pair.a, one.pair.b, one.stack
    rank, scale = config.rank_of(key), config.scale_of(key)
    lines, implied = rank * stack.experts, f"{stack.experts} experts and {config.path.name}"
    check_shape(path, a, (lines, a.shape[1]), implied)
    check_shape(path, b, (b.shape[0], lines), implied)
    for expert in range(stack.experts):
        of_a = a.with_rows(a.rows.every(lines, expert * rank, rank))
        of_b = replace(b, columns=b.columns.every(stack.experts, expert))
        for part in stack.parts(layout.parameter, expert):
            reads, writes = of_a, of_b.with_rows(part.rows)
            if layout.is_swapped:
                reads = replace(of_b, transposed=True)
                writes = replace(of_a, columns=part.rows, transposed=True)
            yield AdapterPair(part.module, rank, scale, reads, writes, expert)
