"""Limits for requests that the server handles without the engine: tokenizing, detokenizing and rendering of prompts.

The engine's queue does not see these requests. The number of open requests is limited to the sequences that the engine
would run and queue. A further request is refused as by a full queue. If their bodies are large, two requests are
processed at a time and the API keys take turns, because the token ids of a text take ten times its memory.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request

from oarlock.engine.errors import QueueFullError
from oarlock.server.config.settings import Settings
from oarlock.server.endpoints.batches.key_shares import FairLimiter, KeyQuota
from oarlock.server.http.request_record import label_of
from oarlock.server.http.server_sent_events import until_disconnect

LARGE_BYTES = 64 * 1024  # size above which a body is large
LARGE_AT_ONCE = 2
_RETRY_S = 1.0
_T = TypeVar("_T")


class TextPermits:
    """Permits for the requests of one application, which are taken after a body has been read."""

    def __init__(self, settings: Settings) -> None:
        self._open = KeyQuota(settings.max_num_seqs + settings.max_waiting_requests, is_shared=True)
        self._large = FairLimiter(LARGE_AT_ONCE)

    @staticmethod
    def of(request: Request) -> "TextPermits":
        """Return the permits of the request's application."""
        return request.app.state.text_permits

    async def run(self, request: Request, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of `work`, or raise `ClientGoneError` as soon as the client has left.

        Raises `QueueFullError` if there is no permit for the request's API key.
        """
        owner = label_of(request.scope)
        if not self._open.fits(owner, 1):
            raise QueueFullError(
                f"{self._open.total} requests for tokens or rendered prompts are open (at most "
                f"{self._open.limit} may be).{self._open.rule} Retry later.",
                _RETRY_S,
            )
        self._open.add(owner, 1)
        try:
            return await until_disconnect(request, self._in_turn(request, owner, work))
        finally:
            self._open.add(owner, -1)

    async def _in_turn(self, request: Request, owner: str | None, work: Callable[[], Awaitable[_T]]) -> _T:
        if _is_small(request):
            return await work()
        async with self._large.permit(owner):
            return await work()


def _is_small(request: Request) -> bool:
    """Return whether the request declares a small body. The length was checked when the body was read."""
    length = request.headers.get("content-length", "")
    return length.isascii() and length.isdigit() and len(length) < 10 and int(length) <= LARGE_BYTES
