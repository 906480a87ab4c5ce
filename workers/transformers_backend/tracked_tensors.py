"""Tensors without values that know where they come from, for one look at a class: masks, positions, states, logits.

Each is a tensor on the meta device whose operations are followed while the class computes with it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oarlock.workers.transformers_backend.mask_kinds import MaskKind

_SAME_VALUES = {"__getitem__", "expand", "to", "contiguous", "bool", "clone", "detach"}
# Operations on logits that give the same values whichever part of the vocabulary a rank has.
_ELEMENTWISE = {
    "__getitem__", "__mul__", "__rmul__", "__imul__", "__truediv__", "__itruediv__", "__rtruediv__", "__add__",
    "__iadd__", "mul", "mul_", "div", "div_", "truediv", "add", "add_", "tanh", "tanh_", "sigmoid", "to", "float",
    "type_as", "contiguous", "view", "reshape", "clone", "detach", "clamp",
}  # fmt: skip


PositionUse = Callable[[str, tuple, Mapping[str, Any], "Positions"], None]


class Mask(Tensor):
    """A mask [1, 1, queries, keys] without values that knows its kind, also after it is cut or expanded."""

    kind: MaskKind

    @staticmethod
    def of(kind: MaskKind, queries: int, keys: int) -> "Mask":
        mask = torch.empty((1, 1, queries, keys), dtype=torch.bool, device="meta").as_subclass(Mask)
        mask.kind = kind
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Mask):
            name = _name(func)
            before = next((one.kind for one in args if isinstance(one, Mask) and hasattr(one, "kind")), None)
            keeps = name in _SAME_VALUES and before is not None
            result.kind = before if keeps else MaskKind(other=f"is changed by the class ({name})")
        return result


class Positions(Tensor):
    """Positions of tokens, or numbers that follow only from them; `numbers` holds their values.

    `use` is called if they are combined with other tensors: (operation, its arguments, those with names, the positions
    among them).
    """

    numbers: Tensor | None = None  # None: not known
    is_own: bool = False  # the class has counted the tokens of the row by itself
    use: PositionUse

    @staticmethod
    def of(numbers: Tensor, use: PositionUse, *, is_own: bool = False) -> "Positions":
        found = torch.empty_like(numbers, device="meta").as_subclass(Positions)
        found.numbers, found.use, found.is_own = numbers, use, is_own
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        given = list(_tensors((*args, *kwargs.values())))
        positions = [one for one in given if isinstance(one, Positions) and hasattr(one, "use")]
        if not isinstance(result, Positions) or not positions:
            return result
        first = next((one for one in positions if one.is_own), positions[0])
        if any(not isinstance(one, Positions) and one.dim() for one in given):
            first.use(_name(func), args, kwargs, first)
            return result.as_subclass(Tensor)
        result.use, result.is_own, result.numbers = first.use, first.is_own, None
        numbers = _applied(func, args, kwargs, result)
        result.numbers = numbers if numbers is not None and numbers.shape == result.shape else None
        return result


def _applied(func: Callable, args: tuple, kwargs: Mapping[str, Any], result: Tensor) -> Tensor | None:
    """Return the numbers of `result`, by `func` of the numbers of its arguments; None if they are not known."""

    def numbers(one: Any) -> Any:
        return one.numbers if isinstance(one, Positions) else one

    if _name(func) in ("to", "cpu", "cuda", "contiguous", "clone", "detach"):
        first = numbers(args[0])
        return None if first is None else first.to(result.dtype)
    try:
        found = func(*map(numbers, args), **{key: numbers(one) for key, one in kwargs.items()})
    except Exception:  # of numbers that are not known, or on another device
        return None
    return found if isinstance(found, Tensor) and found.device.type == "cpu" else None


class EarlierState(Tensor):
    """The state of a layer before the tokens of the look. `use` is called once the class computes with it."""

    use: Callable[[], None]

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, use: Callable[[], None]) -> "EarlierState":
        state = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(EarlierState)
        state.use = use
        return state

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, EarlierState):
            for one in _tensors((*args, *kwargs.values())):
                if isinstance(one, EarlierState) and hasattr(one, "use"):
                    one.use()
            return result.as_subclass(Tensor)
        return result


class Logits(Tensor):
    """Logits of this rank's part of the vocabulary. `use` is called with an operation that needs the other parts."""

    use: Callable[[str], None]

    @staticmethod
    def of(logits: Tensor, use: Callable[[str], None]) -> "Logits":
        found = logits.as_subclass(Logits)
        found.use = use
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        before = next((one for one in _tensors(args) if isinstance(one, Logits) and hasattr(one, "use")), None)
        name = _name(func)
        if before is None:
            return result
        if name == "__setitem__" or (
            isinstance(result, Tensor) and (name not in _ELEMENTWISE or result.shape[-1:] != before.shape[-1:])
        ):
            before.use(name)
        if isinstance(result, Logits):
            result.use = before.use
        return result


def _name(func: Callable) -> str:
    return getattr(func, "__name__", str(func))


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among `values`, also those in its lists and tuples."""
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)
