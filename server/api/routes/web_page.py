"""`GET /`: the web page, and its parts below `/static/`. It holds no secret and asks the API like any other client."""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.api_route import ErrorHandlingRoute
from server.errors import HttpError

_FOLDER = Path(__file__).resolve().parents[1] / "static"
_MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Only this server's own scripts, styles and answers; no markup from text, no frames, no forms that leave the page.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Cache-Control": "no-cache",  # asked for again each time, and not sent again: a new version shows at once
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# What only readers of the source need. No text of the page spans lines or has braces, so none of it looks like this.
_COMMENTS = re.compile(r"^ *(?:/\*\*.*?\*/|//[^\n]*)\n", re.MULTILINE | re.DOTALL)
_SPACES = re.compile(r"(?<=[{};:,]) +| +(?=[{}])")
_INDENTATION = re.compile(r"^ +", re.MULTILINE)
_KEPT = ("Cache-Control", "ETag", "Vary")  # where the browser has the part already


@dataclass(frozen=True, slots=True)
class _Part:
    """One file of the page, as it is sent."""

    body: bytes
    zipped: bytes
    headers: dict[str, str]


def _read(path: Path) -> _Part:
    text = path.read_text("utf-8")
    if path.suffix == ".js":
        text = _COMMENTS.sub("", text)
    elif path.suffix == ".css":
        text = _SPACES.sub("", text)
    body = _INDENTATION.sub("", text).encode()
    digest = hashlib.blake2b(body, digest_size=12).hexdigest()
    headers = {**_HEADERS, "Content-Type": f"{_MEDIA[path.suffix]}; charset=utf-8", "ETag": f'W/"{digest}"'}
    return _Part(body, gzip.compress(body, mtime=0), headers)


_PARTS = {path.name: _read(path) for path in _FOLDER.iterdir()}
_PAGE = _PARTS.pop("index.html")
PATHS = frozenset(f"/static/{name}" for name in _PARTS) | {"/"}

router = APIRouter(route_class=ErrorHandlingRoute, include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page itself."""
    return _send(request, _PAGE)


@router.get("/static/{name}")
async def part(request: Request, name: str) -> Response:
    """One of its scripts, its styles or its icon."""
    if name not in _PARTS:
        raise HttpError(404, f"The web page has no part '{name[:100]}'.", code="route_not_found")
    return _send(request, _PARTS[name])


def _send(request: Request, part: _Part) -> Response:
    if part.headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={name: part.headers[name] for name in _KEPT})
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(part.zipped, headers={**part.headers, "Content-Encoding": "gzip"})
    return Response(part.body, headers=part.headers)
