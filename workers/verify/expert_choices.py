"""Choices of experts in a verification, which are the same in our run and in transformers' if only rounding decides.

A router chooses by comparing scores. If two scores are nearly equal, rounding of its logits decides, and a token that
gets another expert has other values in all later layers. This says nothing about either run, so transformers' runs
follow the choices of another run: the truth follows our ranks, and the run in the model's dtype follows the truth.

A run follows a choice only if its own router makes the same choice from the other run's logits. The logits are compared
by themselves. A router of ours that chooses in another way from right logits is therefore not followed.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.verify.compare import NEAR_TIES_FILE, Recorded, dense_routing, layer_tensors


def ranks_choose_otherwise(folder: Path, spec: DecoderSpec) -> bool:
    """Return whether the ranks have chosen other experts than the truth in `folder`, for any token in any layer."""
    recorded = Recorded(folder)
    names = _named(spec, ".routing")
    return any(_differ(recorded.ours(0, name) != 0, recorded.truth(name) != 0).any() for name in names)


def choices_of_ranks(folder: Path, spec: DecoderSpec) -> dict[str, Tensor]:
    """Return the logits of routers and the weights of experts that the ranks have recorded, by name."""
    recorded = Recorded(folder)
    return {name: recorded.ours(0, name) for kind in (".router", ".routing") for name in _named(spec, kind)}


def _named(spec: DecoderSpec, kind: str) -> Iterator[str]:
    return (name for name in layer_tensors(spec) if name.endswith(kind))


def _differ(ones: Tensor, others: Tensor) -> Tensor:
    """Return the tokens whose experts differ: two masks [T, E] -> bool [T]."""
    return (ones != others).any(1)


class ExpertChoices:
    """The choices of a recorded run, followed by a run of transformers."""

    def __init__(self, *runs: Mapping[str, Tensor]) -> None:
        """Follow the first of `runs`, each of which has the tensors of a run by name, such as `3.router` [T, experts].
        Some of its choices may come from the logits of the others, which it has followed."""
        self._runs = runs
        self._rows: Counter[int] = Counter()  # layer -> rows that its router has had
        self.followed = 0  # choices that were not the run's own

    def write(self, folder: Path) -> None:
        """Write the number of choices that were followed, for `Recorded.near_ties`."""
        (folder / NEAR_TIES_FILE).write_text(json.dumps(self.followed), "utf-8")

    def follow(self, layer: int, router: nn.Module, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> Any:
        """Return `result` of the `router` of `layer`, with the followed choice and its weights in each token that has
        another. `args`, `named`: the router's arguments."""
        chosen = self._runs[0][f"{layer}.routing"] != 0  # [T of all calls, experts]
        experts = chosen.shape[1]
        first = self._rows[layer]
        rows = slice(first, first + len(routing_in(result, experts)))
        self._rows[layer] = rows.stop
        chosen = chosen[rows].to(result[0].device)
        for run in self._runs:
            others = _differ(routing_in(result, experts) != 0, chosen)
            if not bool(others.any()):
                break
            with _FromLogits(run[f"{layer}.router"][rows]):
                again = router.forward(*args, **named)
            taken = others & ~_differ(routing_in(again, experts) != 0, chosen)
            self.followed += int(taken.sum())
            result = _merged(result, again, taken)
        return result


def _merged(result: Any, again: Any, taken: Tensor) -> Any:
    """Return `result` of a router with the choice and the weights of `again` in the tokens `taken`, and its logits."""
    is_dense = len(result) == 2  # Llama 4's (weights of all experts, logits); others return (logits, weights, ids)
    changed = (0,) if is_dense else (1, 2)
    return tuple(
        torch.where(taken.unsqueeze(1), again[index].to(one.dtype), one) if index in changed else one
        for index, one in enumerate(result)
    )


def routing_in(result: Any, experts: int) -> Tensor:
    """Return the weights of all experts [T, experts] in the result of a router of transformers."""
    return result[0] if len(result) == 2 else dense_routing(result[2], result[1], experts)


class _FromLogits(TorchFunctionMode):
    """Torch function mode in which the matmul of a router returns known logits [T, experts]."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._logits = logits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (F.linear, torch.mm):
            return result
        dtype = torch.promote_types(result.dtype, torch.float32)  # a coarser one would round the difference away
        return self._logits.to(result.device, dtype).view(result.shape)
