"""The order of a weight's inputs in which groups of one scale lie in one piece, and in equal pieces.

In most checkpoints they do already, but for a group that the border of a slice cuts: then all groups are cut into
pieces of their greatest common length, so that every number of ranks adds the same pieces up. With act-order the inputs
of a group are scattered: they are sorted by group within each slice, and a group's last piece is filled up.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.workers.errors import StartupError

LEAST = 16  # inputs: the shortest piece that products take


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A rank's inputs in pieces of `group` inputs."""

    group: int
    group_of: Tensor  # int64 [pieces]: the stored group of each
    inputs: Tensor | None = None  # int64 [K']: which of the rank's inputs stands there; None: each in its own place
    filled_up: Tensor | None = None  # bool [K']: where that input only fills a piece up, with a weight of zero


def check_groups(tensor: str, groups: Tensor, count: int, size: int | None = None) -> None:
    """Raise `StartupError` unless `tensor`, whose numbers are `groups` [K], names groups below `count` alone, and with
    `size` each of them for so many inputs."""
    lowest, highest = int(groups.min()), int(groups.max())
    wrong = None
    if lowest < 0 or highest >= count:
        wrong = f"names group {lowest if lowest < 0 else highest} of {count}"
    elif size is not None:
        members = torch.bincount(groups, minlength=count)  # inputs of each group
        group = int((members != size).int().argmax())
        if members[group] != size:
            wrong = f"names group {group} for {int(members[group])} inputs, not {size}"
    if wrong is not None:
        raise StartupError(
            f"tensor '{tensor}' {wrong}.", "Download the checkpoint again, or use another quantisation of the model."
        )


def regroup(groups: Tensor, slices: int, here: slice, least: int = LEAST) -> Regrouped:
    """`groups` int64 [K]: the stored group of each input of the whole model, which are cut into `slices`.

    `here`: the inputs of this rank, whole slices. `least`: pieces have a multiple of so many inputs.
    """
    inputs = len(groups)
    length = inputs // slices
    begins = torch.cat((torch.tensor([True]), groups[1:] != groups[:-1]))  # [K]
    begins[::length] = True
    starts = begins.nonzero().flatten()
    group = math.gcd(*starts.tolist(), length if slices > 1 else 0)
    if len(starts) == 1:
        group = -(-inputs // least) * least  # one scale for all
    if group % least == 0:
        return Regrouped(group, groups[here][::group])
    return _sorted(groups, slices, here, least)


def _sorted(groups: Tensor, slices: int, here: slice, least: int) -> Regrouped:
    length = len(groups) // slices
    counts = torch.stack([torch.bincount(part, minlength=int(groups.max()) + 1) for part in groups.split(length)])
    group = math.gcd(*counts[counts > 0].tolist())
    group = group if group % least == 0 else least
    pieces = -(-counts // group)  # [slices, groups]
    longest = int(pieces.sum(1).max()) * group  # inputs of a slice, filled up
    inputs, filled_up, group_of = [], [], []
    for index in range(here.start // length, here.stop // length):
        order = torch.argsort(groups[index * length : (index + 1) * length], stable=True)
        first = index * length - here.start
        places, is_filled = torch.full((longest,), first), torch.ones(longest, dtype=torch.bool)
        ends = (pieces[index] * group).cumsum(0)
        for run, end, padded in zip(
            order.split(counts[index].tolist()), ends.tolist(), pieces[index].tolist(), strict=True
        ):
            start = end - padded * group
            places[start : start + len(run)] = run + first
            is_filled[start : start + len(run)] = False
        inputs.append(places)
        filled_up.append(is_filled)
        own = torch.repeat_interleave(torch.arange(len(ends)), pieces[index])
        group_of.append(torch.nn.functional.pad(own, (0, longest // group - len(own)), value=int(own[-1])))
    return Regrouped(group, torch.cat(group_of), torch.cat(inputs), torch.cat(filled_up))
