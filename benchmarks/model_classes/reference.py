"""A class's own forward of a whole text, in float32 and in float64: how exact transformers itself is.

transformers computes norms, softmax and routers in float32 even if the model is in float64. Here all of it is float64,
except cos and sin of rotated positions, which are part of a model's definition in float32.
"""

import copy
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

# The reference is usable if its own error is below this share of the largest logit.
LARGEST_OWN_ERROR = 1e-4


class Truth(NamedTuple):
    """Results of one text."""

    logits: Tensor  # float64 [T, vocab]
    largest: float  # absolute value of a logit
    own_error: float  # largest error of transformers in float32

    @property
    def bound(self) -> float:
        """The largest error that counts as right: twice transformers' own, as in the golden tests."""
        return 2 * self.own_error + 1e-6 * self.largest

    def error(self, logits: Tensor) -> float:
        """Return the largest error of `logits` [T, vocab]; infinity if some are not numbers."""
        found = (logits.double() - self.logits).abs().max().item()
        return float("inf") if math.isnan(found) else found


def truth(model: PreTrainedModel, tokens: list[int]) -> Truth:
    """Return the results of `model` (float32) for one text."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        own = model(input_ids=ids, use_cache=False).logits[0].double()
        exact = copy.deepcopy(model).double()
        with in_float64(exact):
            logits = exact(input_ids=ids, use_cache=False).logits[0].double()
    return Truth(logits, logits.abs().max().item(), (own - logits).abs().max().item())


@contextmanager
def in_float64(model: nn.Module) -> Generator[None]:
    """Compute in float64 wherever the classes of `model` ask for float32, within the context."""
    widening = _Widening()
    hooks = []
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            hooks.append(module.register_forward_pre_hook(widening.pause))
            hooks.append(module.register_forward_hook(widening.resume))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with widening:
            yield
    finally:
        torch.set_default_dtype(default)
        for hook in hooks:
            hook.remove()


class _Widening(TorchFunctionMode):
    """Replaces float32 by float64 in all calls, unless it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self._pauses = 0

    def pause(self, *_: Any) -> None:
        self._pauses += 1

    def resume(self, *_: Any) -> None:
        self._pauses -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self._pauses:
            return func(*args, **named)
        func: Any = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {name: torch.float64 if value is torch.float32 else value for name, value in named.items()}
        return func(*args, **named)
