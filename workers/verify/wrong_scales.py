"""Wrong scales of a quantised weight, found from the inputs and outputs of its matmul."""

import torch
from torch import Tensor

_WRONG = 0.1  # a scale is wrong if its relative error is above this
_UNEXPLAINED = 0.1  # relative distance that wrong scales may leave: rounding, accumulated over all layers
_GROUPS = (128, 64, 32, 16)  # group sizes to try if not all inputs share a scale


def wrong_scales(inputs: Tensor, weight: Tensor, outputs: Tensor) -> str | None:
    """Describe the wrong scales that explain `outputs`; None if none do, or if there are too few tokens to decide.

    `inputs` [T, K], `weight` [N, K] as expected, `outputs` [T, N] as found, with or without a bias; all float64.
    """
    width = inputs.shape[1]
    groups = [width, *(group for group in _GROUPS if group < width)]
    return next((found for group in groups if (found := _of_groups(inputs, weight, outputs, group))), None)


def _of_groups(inputs: Tensor, weight: Tensor, outputs: Tensor, group: int) -> str | None:
    """Describe wrong scales if there is a scale for every `group` inputs; else None. Solves, for each output, the least
    squares problem of a factor for each group."""
    tokens, width = inputs.shape
    starts = range(0, width, group)
    if tokens < 2 * (len(starts) + 1):
        return None
    shares = torch.stack(
        [inputs[:, start : start + group] @ weight[:, start : start + group].T for start in starts], dim=-1
    )  # [T, N, groups]
    terms = torch.cat((shares, shares.new_ones(tokens, len(weight), 1)), dim=-1).transpose(0, 1)  # with a constant
    wanted = outputs.T.unsqueeze(2)  # [N, T, 1]
    factors = torch.linalg.lstsq(terms, wanted, driver="gelsd").solution  # [N, groups + 1, 1]
    unexplained = (terms @ factors - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)  # [N, 1]
    wrong = ((factors[:, :-1, 0] - 1).abs() > _WRONG).nonzero()  # [count, 2]
    if unexplained.max() > _UNEXPLAINED or len(wrong) == 0:
        return None
    output, first = wrong[0].tolist()
    factor = factors[output, first, 0].item()
    inputs_of = "" if len(starts) == 1 else f", inputs {first * group} to {min(first * group + group, width) - 1}"
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"wrong scales: that of its output {output}{inputs_of} is {factor:.2g} times the right one{more}"
