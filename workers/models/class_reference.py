"""What a class's own code gives for a prompt, to which its results on the ranks are compared before it serves.

The interface between a model that such code computes and the self-test in the runner. Does not know transformers.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Expected:
    """What the class's own uncached forward gives for a prompt, after its first layers."""

    layers: int  # number of these layers
    hidden: Tensor  # float32 [T, width]: their result in float32
    rounding: Tensor  # float32 [T]: relative error of each token's result in the model's dtype


class ClassReference(Protocol):
    """The class's own forward with the checkpoint's weights. Only the first rank runs it."""

    @property
    def prompt(self) -> Sequence[int]:
        """The ids for which there is a result. They are the same on every rank."""

    @property
    def share(self) -> float:
        """The share of tokens whose errors count: see `largest`."""

    @property
    def is_wanted(self) -> bool:
        """Whether the ranks must be compared: no success is remembered. False on every rank but the first."""

    @property
    def expected(self) -> Expected | None:
        """The result; None on every rank but the first, and if the class's own forward could not run."""

    def prepare(self, on_progress: Callable[[], None]) -> None:
        """Run the class's own forward if no success is remembered. It takes memory only during this call.

        `on_progress` is called before and after long work.
        """

    def recorded(self) -> AbstractContextManager[list[Tensor]]:
        """Return a context in which every step adds the result [T, width] of its first layers to a list. The list stays
        empty if there is nothing to compare with."""

    def remember(self, facts: dict[str, float]) -> None:
        """Remember the success. `facts`: what was found, for readers of the file."""


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return the relative error of each token of `found`, both [T, width]: float32 [T]."""
    expected, found = expected.float(), found.float()
    each = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    return each.nan_to_num(nan=float("inf"))


def largest(errors: Tensor, share: float) -> float:
    """Return the largest of the errors [T]; `share` of the tokens are at most as far.

    The others may be farther: where a router chooses between equally good experts, rounding changes a token's result
    for a good reason.
    """
    return float(errors.quantile(share, interpolation="higher"))


def least_distance(dtype: torch.dtype) -> float:
    """Return a distance that is always rounding in `dtype`: kernels add in other orders."""
    return max(1e-4, torch.finfo(dtype).eps)
