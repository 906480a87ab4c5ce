"""What is made of a long list once, for all sequences that hold the very same list: the choices of one request.

`messages.read_request` gives them the same object. Looking it up by identity costs nothing, where hashing or comparing
a list as long as a context would cost as much as what is saved. Knows nothing of what is made.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

Ids = tuple  # of ints, or of tuples of ints


class MadeFrom(Protocol):
    """A value that keeps its key alive: as long as it lives, no other object can have that identity."""

    made_from: Ids


V = TypeVar("V", bound=MadeFrom)


class IdentityCache(Generic[V]):
    """Values by the identity of what they were made from. One is gone with the last sequence that holds it."""

    def __init__(self, make: Callable[[Ids], V]) -> None:
        self._make = make
        self._values: WeakValueDictionary[int, V] = WeakValueDictionary()

    def get(self, key: Ids) -> V:
        value = self._values.get(id(key))
        if value is None:
            value = self._values[id(key)] = self._make(key)
        return value
