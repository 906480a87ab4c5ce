"""Whether the modules of a class keep something of one forward for the next one.

Steps of a server belong to different requests, so whatever a module keeps would reach another request: a cache of
its own, the length of the longest row so far, frequencies that were computed for it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn


class _Kept(NamedTuple):
    """One value of a module. It is referred to, so that no other object can get its id."""

    value: Any
    changes: int  # times that the tensor was written


class ModuleState:
    """The values that the modules of a model hold at one time."""

    def __init__(self, model: nn.Module, ignored: Mapping[type[nn.Module], str]) -> None:
        """Note the values of all modules of `model`. `ignored`: an attribute of each of some classes of ours."""
        self._model, self._ignored = model, ignored
        self._kept = dict(self._values())

    def changed(self) -> str | None:
        """Return the name of a value that is another one now, or was added or written; None: there is none."""
        now = dict(self._values())
        for name, kept in now.items():
            before = self._kept.get(name)
            if before is None or (before.value is not kept.value and not _is_conversion(before.value, kept.value)):
                return name
            if before.changes != kept.changes and before.value is kept.value:
                return name
        return next((name for name in self._kept if name not in now), None)

    def _values(self) -> Iterator[tuple[str, _Kept]]:
        for prefix, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name == self._ignored.get(type(module)):
                    continue
                path = f"{prefix}.{name}" if prefix else name
                yield path, _kept(value)
                # Also the entries of its lists and dicts, such as buffers, or tensors by their layer.
                entries = value.items() if isinstance(value, dict) else enumerate(value if type(value) is list else ())
                for key, entry in entries:
                    yield (f"{prefix}.{key}" if name in ("_buffers", "_parameters") else f"{path}[{key}]"), _kept(entry)


def _kept(value: Any) -> _Kept:
    # A tensor that was made in inference mode does not count its changes.
    return _Kept(value, value._version if isinstance(value, Tensor) and not value.is_inference() else 0)


def _is_conversion(before: Any, now: Any) -> bool:
    """Return whether `now` may be `before` in the model's dtype, as a class converts a table at its first use."""
    if not isinstance(before, Tensor) or not isinstance(now, Tensor):
        return False
    return before.shape == now.shape and before.dtype != now.dtype
