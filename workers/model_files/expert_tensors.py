"""Experts' tensors under the names that `layers/experts_spec.py` uses, for all names and fusions of checkpoints.

Checkpoints store either each expert separately or the tensors of all experts as one; transformers writes both. Here a
tensor of all experts is split into views, each a range of bytes, or some rows or columns of it, so that no other code
knows the difference. Torch-free.
"""

import math
import re
from collections.abc import Iterator

from oarlock.base.errors import StartupError, shown
from oarlock.workers.model_files.located import LocatedTensor

_OF_ALL = re.compile(r"(?P<module>.*\.)experts\.(?P<part>gate_up_proj|up_proj|down_proj)(\.weight)?")
# gpt-oss alternates rows of gate and up. Matrices are transposed in floating point but not in MXFP4.
_INTERLEAVED = re.compile(r"(?P<module>.*\.experts)\.(?P<part>gate_up_proj|down_proj)(_(?P<kind>blocks|scales|bias))?")
_DIMENSIONS = {None: 3, "blocks": 4, "scales": 3, "bias": 2}


_MOST_EXPERTS = 4096  # experts of one layer; the largest known model has 1,024


def split_experts(tensors: dict[str, LocatedTensor]) -> dict[str, LocatedTensor]:
    """Return `tensors` under the names of a checkpoint that stores experts separately."""
    if not any("experts" in name for name in tensors):
        return tensors
    found: dict[str, LocatedTensor] = {}
    for stored, located in tensors.items():
        match = _INTERLEAVED.fullmatch(stored)
        is_interleaved = match is not None and f"{match['module']}.{match['part']}_bias" in tensors
        parts = _interleaved_experts(match, located) if match and is_interleaved else _split(stored, located)
        for name, one in parts:
            if name in found:
                raise StartupError(
                    f"tensor {name!r} is stored twice, the second time as {stored!r} in {located.path.name}.",
                    "Use a checkpoint that holds each expert once.",
                )
            found[name] = one
    return found


def _split(name: str, located: LocatedTensor) -> Iterator[tuple[str, LocatedTensor]]:
    match, shape = _OF_ALL.fullmatch(name), located.entry.shape
    if name.endswith("e_score_correction_bias") and len(shape) == 2 and shape[0] == 1:
        yield name, located.part(0)
    elif match is None or len(shape) != 3:
        yield name, located
    else:
        for expert in _experts(name, located):
            yield from _halves(f"{match['module']}experts.{expert}", match["part"], located.part(expert))


def experts_by_inputs(
    name: str, located: LocatedTensor, hidden: int, width: int
) -> Iterator[tuple[str, LocatedTensor]]:
    """Yield the experts of a tensor [experts, inputs, outputs], or `located` itself if it is another tensor.

    A tensor [experts, outputs, inputs] is another one, even if both are of the same shape, as in transformers.
    """
    match, shape = _OF_ALL.fullmatch(name), located.entry.shape
    outputs_inputs = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    usual = outputs_inputs.get(match["part"], ()) if match is not None else ()
    if match is None or shape[1:] != tuple(reversed(usual)) or shape[1:] == usual:
        yield name, located
        return
    for expert in _experts(name, located):
        one, module = located.part(expert).transpose(), f"{match['module']}experts.{expert}"
        if match["part"] == "down_proj":
            yield f"{module}.down_proj.weight", one
            continue
        for first, part in ((0, "gate_proj"), (width, "up_proj")):
            yield f"{module}.{part}.weight", one.every(2 * width, first, width)


def _experts(name: str, located: LocatedTensor) -> range:
    """Return the numbers of the experts in a tensor of all experts.

    Raise `StartupError` if there are too many, or if they are empty: a tensor without bytes could claim any number.
    """
    shape = located.entry.shape
    if shape[0] > _MOST_EXPERTS or 0 in shape:
        raise StartupError(
            f"{located.path}: tensor {shown(name)} holds experts in the shape {shown(list(shape))}; a layer has 1 to "
            f"{_MOST_EXPERTS} of them, none of which is empty.",
            "Fetch that file of the checkpoint again.",
        )
    return range(shape[0])


def _interleaved_experts(match: re.Match[str], located: LocatedTensor) -> Iterator[tuple[str, LocatedTensor]]:
    """Yield the tensors of gpt-oss's experts.

    The source is a matrix [E, K, N], or in MXFP4 `blocks` uint8 [E, N, K / 32, 16] and `scales` [E, N, K / 32]; or the
    biases [E, N].
    """
    kind, part, shape = match["kind"], match["part"], located.entry.shape
    if len(shape) != _DIMENSIONS[kind] or (part == "gate_up_proj" and shape[2 if kind is None else 1] % 2):
        yield match.string, located  # another model's tensor: it stays unused, so it is refused by its name
        return
    for expert in _experts(match.string, located):
        one, module = located.part(expert), f"{match['module']}.{expert}"
        if kind is None:
            one = one.transpose()
        elif kind == "blocks":
            rows, *rest = one.entry.shape
            one = one.shaped(rows, math.prod(rest))
        if part == "down_proj":
            yield f"{module}.{part}.{kind or 'weight'}", one
            continue
        for first, name in enumerate(("gate_proj", "up_proj")):
            yield f"{module}.{name}.{kind or 'weight'}", one.every(2, first)


def _halves(module: str, part: str, located: LocatedTensor) -> Iterator[tuple[str, LocatedTensor]]:
    """Yield a matrix, or the gate and up halves of a matrix that stacks them."""
    rows, *rest = located.entry.shape
    if part != "gate_up_proj" or rows % 2:
        yield f"{module}.{part}.weight", located
        return
    if located.transposed:
        for first, name in enumerate(("gate_proj", "up_proj")):
            yield f"{module}.{name}.weight", located.every(rows, first * (rows // 2), rows // 2)
        return
    both = located.shaped(2, rows // 2, *rest)
    yield f"{module}.gate_proj.weight", both.part(0)
    yield f"{module}.up_proj.weight", both.part(1)
