"""What browsers ask before they let the web page of another origin use this server (CORS, in the Fetch standard).

Keys travel in a header that the page itself sets, never in a cookie, so no answer allows credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_METHODS = "GET, HEAD, POST"
_EXPOSED = b"X-Request-Id, Retry-After, X-Ignored-Parameters, X-Should-Retry"
_MAX_AGE_S = "7200"  # browsers keep the answer to a preflight no longer
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_LONGEST_NAMES = 2048  # bytes


class Cors:
    """The origins whose pages may use the server."""

    def __init__(self, origins: Iterable[str]) -> None:
        """`origins`: such as `https://chat.example.org`; `*` for any."""
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What every answer carries, errors too, so that the page can read them. None without allowed origins."""
        if not self._origins:
            return []
        if b"*" in self._origins:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        vary = (b"vary", b"Origin")  # for caches: without an origin the answer has fewer headers
        origin = request.get(b"origin", b"")
        if origin not in self._origins:
            return [vary]
        return [
            vary,
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
        ]

    def preflight(self, method: str, request: Mapping[bytes, bytes]) -> dict[str, str] | None:
        """More headers of the answer, if this request is the question before one, and of an allowed origin."""
        origin = request.get(b"origin")
        if method != "OPTIONS" or origin is None or b"access-control-request-method" not in request:
            return None
        if b"*" not in self._origins and origin not in self._origins:
            return None
        answer = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _MAX_AGE_S}
        names = request.get(b"access-control-request-headers", b"")
        if len(names) <= _LONGEST_NAMES and _NAMES.fullmatch(names):  # one by one: `*` would leave out Authorization
            answer["Access-Control-Allow-Headers"] = names.decode("ascii")
        return answer
