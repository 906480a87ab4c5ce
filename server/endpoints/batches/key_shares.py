"""Shares of API keys among the batches: their names on the disk, their quotas, and their running requests."""

import asyncio
import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from oarlock.server.http.api_keys import ApiKeys, Key
from oarlock.server.http.server_state import ServerState

_COST = {"n": 2**12, "r": 8, "p": 1, "dklen": 16}  # about 10 ms, once for each key
MAX_BYTES = 32 * 2**20  # bytes of the lines of all batch requests that run at a time; a single request may have more
_Waiting = tuple[asyncio.Future[None], int]


class KeyNames:
    """Names of API keys on the disk. They are slow to compute, so that a description does not reveal the key.

    A key has the same name after a restart, at any position among the keys.
    """

    def __init__(self, keys: ApiKeys, salt: bytes) -> None:
        """Compute the names of `keys` with the directory's `salt`."""
        self._names = {key.digest: hashlib.scrypt(key.digest, salt=salt, **_COST).hex() for key in keys}
        self._keys = {self._names[key.digest]: key for key in keys}

    def of(self, key: Key | None) -> str | None:
        """Return the name of a key, or None if there are no keys."""
        return None if key is None else self._names[key.digest]

    def key_of(self, name: str | None) -> Key | None:
        """Return the key with this name, or None if the key was removed."""
        return None if name is None else self._keys.get(name)


class KeyQuota:
    """A limit that keys share: a single key may hold all of it, each of several keys at most as much as it leaves free.

    So the next key always finds something free, and no share is unused because its key needs nothing.
    """

    def __init__(self, limit: int, *, is_shared: bool) -> None:
        """Share `limit` among several keys if `is_shared` is true, else give all of it to one key."""
        self.limit = limit
        self.total = 0
        self.is_shared = is_shared
        self._held: Counter[str | None] = Counter()

    def held(self, owner: str | None) -> int:
        """Return the amount that a key holds."""
        return self._held[owner]

    def fits(self, owner: str | None, amount: int) -> bool:
        """Return whether a key may hold `amount` more."""
        others = self.total - self._held[owner]
        most = (self.limit - others) // 2 if self.is_shared else self.limit - others
        return self._held[owner] + amount <= most

    def add(self, owner: str | None, amount: int) -> None:
        """Count `amount` more, or less if it is below 0, even if it does not fit."""
        self.total += amount
        self._held[owner] += amount
        if not self._held[owner]:
            del self._held[owner]

    @property
    def rule(self) -> str:
        """Sentence about the share of one key, for errors."""
        return " An API key may use as much as it leaves free." if self.is_shared else ""


class FairLimiter:
    """A limiter with `size` permits. Waiting requests of the same key get them in the order in which they asked."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_held = 0
        self._held: Counter[str | None] = Counter()
        # Keys with waiting requests. The key that got a permit last is at the end.
        self._waiting: OrderedDict[str | None, deque[_Waiting]] = OrderedDict()

    async def acquire(self, owner: str | None, num_bytes: int = 0) -> None:
        """Wait for a permit. `num_bytes`: size of the request that it is for."""
        permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((permit, num_bytes))
        self.grant()
        try:
            await permit
        except asyncio.CancelledError:
            if permit.done() and not permit.cancelled():
                self.release(owner, num_bytes)
            else:
                self._leave(owner, (permit, num_bytes))
            raise

    def release(self, owner: str | None, num_bytes: int = 0) -> None:
        """Return a permit, which goes to the next in line."""
        self._count(owner, -1, -num_bytes)
        self.grant()

    @asynccontextmanager
    async def permit(self, owner: str | None) -> AsyncGenerator[None]:
        """Hold a permit while the context lasts."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    def grant(self) -> None:
        """Hand out the free permits."""
        while self._waiting:
            owner = min(self._waiting, key=lambda one: self._held[one])  # ties: the key that has waited longest
            permit, num_bytes = self._waiting[owner][0]
            if not self._has_permit(owner, num_bytes):
                return
            self._waiting[owner].popleft()
            if self._waiting[owner]:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            if not permit.done():
                self._count(owner, 1, num_bytes)
                permit.set_result(None)

    def _has_permit(self, owner: str | None, num_bytes: int) -> bool:
        """Return whether `owner`, the next in turn, can have a permit for a request of `num_bytes`."""
        return self.num_held < self.size

    def _count(self, owner: str | None, num_permits: int, num_bytes: int) -> None:
        self.num_held += num_permits
        self._held[owner] += num_permits
        if not self._held[owner]:
            del self._held[owner]

    def _leave(self, owner: str | None, waiting: _Waiting) -> None:
        """Remove a waiting request from its line."""
        line = self._waiting.get(owner)
        if line is not None:
            with suppress(ValueError):
                line.remove(waiting)
            if not line:
                del self._waiting[owner]
        self.grant()  # other requests may fit although this one did not


class BatchLimiter(FairLimiter):
    """Limiter of running batch requests: the number of the engine's rows, or half of it while other requests are open.

    The first request of a key gets a permit at once, because requests of another key may hold all permits until their
    responses are complete. The engine divides its rows between the keys.
    """

    def __init__(self, num_rows: int, state: ServerState, *, is_shared: bool = False) -> None:
        """Limit requests to `num_rows`, the engine's concurrent sequences. `is_shared`: there are several keys."""
        super().__init__(num_rows)
        self._size_if_busy = max(1, num_rows // 2)
        self._state = state
        self._bytes = KeyQuota(MAX_BYTES, is_shared=is_shared)
        self._until_idle: asyncio.Task[None] | None = None

    def for_key(self, owner: str | None) -> "KeyLimiter":
        """Return the view of this limiter for one key."""
        return KeyLimiter(self, owner)

    def _has_permit(self, owner: str | None, num_bytes: int) -> bool:
        if self._bytes.total and not self._bytes.fits(owner, num_bytes):
            return False
        if not self._held[owner]:
            return True
        if self._state.num_in_flight and self.num_held >= self._size_if_busy:
            if self._until_idle is None and self.num_held < self.size:
                self._until_idle = asyncio.create_task(self._follow())
            return False
        return super()._has_permit(owner, num_bytes)

    def _count(self, owner: str | None, num_permits: int, num_bytes: int) -> None:
        super()._count(owner, num_permits, num_bytes)
        self._bytes.add(owner, num_bytes)

    async def _follow(self) -> None:
        """Hand out the other half of the permits after the last other request has ended."""
        await self._state.idle.wait()
        self._until_idle = None
        self.grant()

    def close(self) -> None:
        """Stop waiting for the end of other requests."""
        if self._until_idle is not None:
            self._until_idle.cancel()


class KeyLimiter:
    """A limiter as one API key sees it, for a `BatchRun`."""

    def __init__(self, limiter: FairLimiter, owner: str | None) -> None:
        self._limiter = limiter
        self._owner = owner

    async def acquire(self, num_bytes: int) -> None:
        """Wait for a permit for a request whose line has `num_bytes`."""
        await self._limiter.acquire(self._owner, num_bytes)

    def release(self, num_bytes: int) -> None:
        """Return the permit."""
        self._limiter.release(self._owner, num_bytes)
