"""Web pages of other origins: which may read answers (CORS, in the Fetch standard), and which may cause anything.

A browser asks before a page may read an answer, but not before a form or a request without a body is sent: so what a
request to change something says about the page that it comes from is checked here as well. Keys travel in a header that
the page itself sets, never in a cookie, so no answer allows credentials.
"""

import re
from collections.abc import Iterable, Mapping

from oarlock.server.errors import HttpError

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing
_OWN_PAGES = (b"same-origin", b"none")  # values of Sec-Fetch-Site; none: the user's own doing, such as an address typed
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
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
        """Headers of every answer, errors too, so that the page can read them. Empty without allowed origins."""
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

    def check(self, method: str, request: Mapping[bytes, bytes]) -> None:
        """Raise `HttpError` (403) for a request of another origin's page that is not allowed and may change something.

        Programs that are no browsers send neither header, and are not meant.
        """
        site, origin = request.get(b"sec-fetch-site"), request.get(b"origin") or None
        if method in _SAFE or (site is None and origin is None) or site in _OWN_PAGES:
            return
        if b"*" in self._origins or origin in self._origins:
            return
        # Browsers leave Sec-Fetch-Site out where the address is neither HTTPS nor of this machine.
        if site is None and origin is not None and _is_own(origin, request):
            return
        shown = (origin or b"").decode("latin-1")[:100]
        allowed = shown if shown not in ("", "null") else "*"
        raise HttpError(
            403,
            f"A web page of another origin ({shown or 'not named'}) sent this request, and it is not allowed to. If it "
            f"should be, start the server with --allowed-origins '{allowed}'.",
            code="origin_not_allowed",
        )


def _is_own(origin: bytes, request: Mapping[bytes, bytes]) -> bool:
    """Whether a page of this server has that origin: it names the host that was asked.

    Proxies that ask under another name say in X-Forwarded-Host which one they were asked for. No foreign page can set
    that header: a browser would first ask whether it may.
    """
    scheme, _, authority = origin.lower().partition(b"://")
    default = _DEFAULT_PORTS.get(scheme, b"")
    asked = (request.get(b"host", b""), request.get(b"x-forwarded-host", b"").partition(b",")[0])
    return bool(authority) and authority in [name.strip().lower().removesuffix(default) for name in asked]
