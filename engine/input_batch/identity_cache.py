"""Cache of values computed from a long tuple, for all sequences that hold the same object: the choices of a request.

`messages.RequestReader` gives them the same object. The lookup is by identity: hashing or comparing a tuple as long as
a context would cost as much as is saved.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

Ids = tuple  # of ints, or of tuples of ints


class MadeFrom(Protocol):
    """A value that keeps its key alive: while it lives, no other object can have the same identity."""

    made_from: Ids


V = TypeVar("V", bound=MadeFrom)


class IdentityCache(Generic[V]):
    """Values by the identity of their key. A value is dropped with the last sequence that holds it."""

    def __init__(self, make: Callable[[Ids], V]) -> None:
        self._make = make
        self._values: WeakValueDictionary[int, V] = WeakValueDictionary()

    def get(self, key: Ids) -> V:
        value = self._values.get(id(key))
        if value is None:
            value = self._values[id(key)] = self._make(key)
        return value
