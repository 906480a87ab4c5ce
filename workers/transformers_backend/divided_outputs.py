"""Outputs of a linear layer that ranks divide, followed in one look at a class, without values.

A rank has some of the outputs. The class may compute with each of them alone, view them as heads, or hand them to a
layer that takes divided inputs. A mean over all of them would be one rank's mean, which is another number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Operations that combine values along a dimension, and keep or drop it.
_ACROSS = {
    "amax", "amin", "argmax", "argmin", "argsort", "cumprod", "cumsum", "flip", "kthvalue", "layer_norm",
    "linalg_vector_norm", "log_softmax", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "norm",
    "normalize", "prod", "quantile", "rms_norm", "roll", "softmax", "sort", "std", "std_mean", "sum", "topk", "var",
    "var_mean",
}  # fmt: skip
# After these, the last dimension may be one head, so the outputs are not followed further.
_VIEWS = {"view", "reshape", "unflatten", "transpose", "permute", "swapaxes", "movedim", "new_empty", "new_zeros"}


class Divided(Tensor):
    """A rank's part of outputs, along the last dimension. `use` is called with an operation that needs the others."""

    use: Callable[[str], None]

    @staticmethod
    def of(outputs: Tensor, use: Callable[[str], None]) -> "Divided":
        found = _plain(outputs).as_subclass(Divided)
        found.use = use
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        first = next(one for one in _flat((*args, *named.values())) if isinstance(one, Divided))
        name = getattr(func, "__name__", "")
        if name in _ACROSS and _is_across(name, first.dim(), args, named):
            first.use(name)
        result = func(*_plain(args), **_plain(named))
        if name in _VIEWS or name in _ACROSS:
            return result
        if type(result) in (tuple, list):  # of `chunk` or `split`
            return type(result)(_followed(one, first) for one in result)
        return _followed(result, first)


def _followed(result: Any, before: Divided) -> Any:
    """Return `result` as a part of outputs too, if it has the dimensions of the outputs that it was computed from."""
    if type(result) is not Tensor or result.dim() != before.dim() or result.shape[-1] == 1:
        return result
    return Divided.of(result, before.use)


def _is_across(name: str, dims: int, args: tuple, named: Mapping[str, Any]) -> bool:
    """Return whether an operation combines values along the last of `dims` dimensions; True if it is not known."""
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):  # of two tensors, value by value
        return False
    at = 2 if name in ("norm", "normalize", "linalg_vector_norm", "topk", "kthvalue", "quantile", "roll") else 1
    given = named.get("dim", args[at] if len(args) > at else None)
    if given is None:
        return True
    several = given if isinstance(given, tuple | list) else (given,)
    return any(not isinstance(dim, int) or dim in (-1, dims - 1) for dim in several)


def _flat(values: Any) -> list[Any]:
    return [one for value in values for one in (_flat(value) if isinstance(value, tuple | list) else (value,))]


def _plain(value: Any) -> Any:
    """Return `value` with plain tensors in the place of followed ones."""
    if isinstance(value, Divided):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if type(value) in (tuple, list):
        return type(value)(_plain(one) for one in value)
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value
