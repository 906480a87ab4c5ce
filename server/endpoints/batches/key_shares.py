"""API keys in the directory of batches: how the disk names them, and how much each may hold."""

from __future__ import annotations

import hashlib
from collections import Counter

from oarlock.server.http.api_keys import ApiKeys, Key

_COST = {"n": 2**12, "r": 8, "p": 1, "dklen": 16}  # about 10 ms for each key, once


class KeyNames:
    """Names of keys on the disk: slow to compute from a key, so that nobody learns one by reading a description.

    A key has the same name after a restart, whatever its place among the others is.
    """

    def __init__(self, keys: ApiKeys, salt: bytes) -> None:
        """`salt`: of the directory."""
        self._names = {key.digest: hashlib.scrypt(key.digest, salt=salt, **_COST).hex() for key in keys}
        self._keys = {self._names[key.digest]: key for key in keys}

    def of(self, key: Key | None) -> str | None:
        """The name of a key; None: there are no keys."""
        return None if key is None else self._names[key.digest]

    def key_of(self, name: str | None) -> Key | None:
        """The key of that name, unless it is a key no more."""
        return None if name is None else self._keys.get(name)


class KeyQuota:
    """A limit that keys share: one alone may hold all of it, each of several at most as much as it leaves free.

    So whatever the others hold, something is left for the next one, and no share lies idle for keys that want none.
    """

    def __init__(self, limit: int, *, is_shared: bool) -> None:
        """`is_shared`: there are several keys."""
        self.limit = limit
        self.total = 0
        self.is_shared = is_shared
        self._held: Counter[str | None] = Counter()

    def held(self, owner: str | None) -> int:
        """How much of it a key holds."""
        return self._held[owner]

    def fits(self, owner: str | None, amount: int) -> bool:
        """Whether a key may hold so much more."""
        others = self.total - self._held[owner]
        most = (self.limit - others) // 2 if self.is_shared else self.limit - others
        return self._held[owner] + amount <= most

    def add(self, owner: str | None, amount: int) -> None:
        """Count so much more, or less, whether it fits or not."""
        self.total += amount
        self._held[owner] += amount
        if not self._held[owner]:
            del self._held[owner]

    @property
    def rule(self) -> str:
        """Sentence about the share of one key, for errors."""
        return " An API key may hold as much as it leaves free." if self.is_shared else ""
