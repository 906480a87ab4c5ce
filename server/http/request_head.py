"""Checks of a request's head that RFC 9112 demands and the parser leaves to the server.

A proxy and this server must understand the same bytes as the same request, or one client's request can be hidden in
another's. A head that two programs may read differently is therefore refused, even if this server could handle it.
"""

import re
from collections.abc import Iterable

_VERSIONS = ("1.0", "1.1")
# RFC 9110, 4.2.3 and RFC 3986, 3.2.2: a name or an address, in brackets if it is IPv6, and perhaps a port.
_AUTHORITY = re.compile(rb"(\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._~%-]+)?\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_ABSOLUTE = re.compile(rb"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)")
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}


def head_error(version: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the reason to refuse a request (400), or None if its head is in order.

    `version`: such as `1.1`. `target`: the request target as it was sent. `headers`: names in lower case. Several Host
    fields are not refused here: `ApiMiddleware` does that for every server that it runs in.
    """
    if version not in _VERSIONS:
        return f"HTTP/{version} is not supported on this connection: send HTTP/1.1."
    host = None
    codings = []
    for name, value in headers:
        if name == b"host":
            host = value.strip(b" \t")
        elif name == b"transfer-encoding":
            codings.append(value.strip(b" \t").lower())
    if codings and (version == "1.0" or codings != [b"chunked"]):  # RFC 9112, 6.1
        return "Transfer-Encoding must be 'chunked', sent once, in HTTP/1.1. Or send Content-Length."
    if host is None:
        return "The request has no Host header, which HTTP/1.1 requires." if version == "1.1" else None
    if not _AUTHORITY.fullmatch(host):
        return "The Host header is not a name or an address, with or without a port."
    return None if target.startswith(b"/") else _target_error(target, host)


def _target_error(target: bytes, host: bytes) -> str | None:
    """Return the reason to refuse a request target that names a different server: RFC 9112, 3.2.2."""
    absolute = _ABSOLUTE.match(target)
    if absolute is None:  # `*` of OPTIONS; the parser refuses all others
        return None
    scheme, authority = absolute[1].lower(), absolute[2].lower()
    default = _DEFAULT_PORTS.get(scheme)
    if default is None:
        return "The request target is an address of another protocol. Send a path, such as /v1/models."
    if authority.removesuffix(default) != host.lower().removesuffix(default):
        return "The request target names another server than the Host header. Send a path, such as /v1/models."
    return None
