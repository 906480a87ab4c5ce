"""Documents that are the same for every request: built and compressed once, and not sent again to a client's cache.

The web page at `GET /` is such a document, with its parts below `/static/`. It holds no secret and calls the API like
any other client.
"""

import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.errors import HttpError
from oarlock.server.http.api_route import ErrorHandlingRoute

# Content policy of an HTML page before its own sources are added: no markup from text, no frames around it.
_BASE_POLICY = {
    "default-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_KEPT = ("Cache-Control", "ETag", "Vary")  # headers of a 304 response


def page_headers(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an HTML page, which restrict its rights. `sources`: extra directives, such as `img-src`."""
    policy = _BASE_POLICY | dict(sources)
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


@dataclass(frozen=True, slots=True)
class ConstantDocument:
    """One document, as it is sent."""

    body: bytes
    zipped: bytes
    headers: dict[str, str]

    @staticmethod
    def of(body: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> "ConstantDocument":
        """Return a document with its ETag. `headers`: additional headers of every response that carries it."""
        digest = hashlib.blake2b(body, digest_size=12).hexdigest()
        own = {
            "Cache-Control": "no-cache",  # revalidated each time but not sent again, so a new version appears at once
            "Content-Type": media_type,
            "ETag": f'W/"{digest}"',
            "Vary": "Accept-Encoding",
        }
        return ConstantDocument(body, gzip.compress(body, mtime=0), {**(headers or {}), **own})

    def answer(self, request: Request) -> Response:
        """Return the document, compressed if the client accepts gzip, or 304."""
        if self.headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={name: self.headers[name] for name in _KEPT})
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.zipped, headers={**self.headers, "Content-Encoding": "gzip"})
        return Response(self.body, headers=self.headers)


class CachedDocuments:
    """Documents that depend only on the model: built at the first request, and rebuilt only for another model."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[object, ConstantDocument]] = {}

    def get(self, name: str, model: object, make: Callable[[], ConstantDocument]) -> ConstantDocument:
        """Return the document `name`. `model`: an object that keeps its identity as long as the model is the same."""
        made_for, document = self._made.get(name, (None, None))
        if document is None or made_for is not model:
            document = make()
            self._made[name] = model, document
        return document


_FOLDER = Path(__file__).resolve().parent / "static"
_MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_SOURCES = {"script-src": "'self'", "style-src": "'self'", "img-src": "'self'", "connect-src": "'self'"}
_HEADERS = page_headers(_SOURCES)  # only this server's own scripts, styles and responses
# The page that compares servers may send requests to servers that its user names. It is a separate document, so the
# chat may not.
_COMPARE_HEADERS = page_headers(_SOURCES | {"connect-src": "'self' http: https:"})

# Text that only readers of the source need. No text on the page spans lines or has braces, so none matches these.
_COMMENTS = re.compile(r"^ *(?:/\*\*.*?\*/|//[^\n]*)\n", re.MULTILINE | re.DOTALL)
_SPACES = re.compile(r"(?<=[{};:,]) +| +(?=[{}])")
_INDENTATION = re.compile(r"^ +", re.MULTILINE)


def _read(path: Path) -> ConstantDocument:
    """Read a part of the page. Third-party libraries in `vendor/` stay exactly as published."""
    text = path.read_text("utf-8")
    if path.parent == _FOLDER:
        if path.suffix == ".js":
            text = _COMMENTS.sub("", text)
        elif path.suffix == ".css":
            text = _SPACES.sub("", text)
        text = _INDENTATION.sub("", text)
    headers = _COMPARE_HEADERS if path.name == "compare.html" else _HEADERS
    return ConstantDocument.of(text.encode(), f"{_MEDIA[path.suffix]}; charset=utf-8", headers)


_FILES = {path.relative_to(_FOLDER).as_posix(): _read(path) for path in _FOLDER.rglob("*") if path.suffix in _MEDIA}
_PAGES = {"/": _FILES.pop("index.html"), "/compare": _FILES.pop("compare.html")}
PATHS = frozenset(f"/static/{name}" for name in _FILES) | _PAGES.keys()


def document_at(path: str) -> ConstantDocument | None:
    """Return the page, or the part of it, at this path of the server; None if there is none."""
    return _PAGES.get(path) or _FILES.get(path.removeprefix("/static/"))


router = APIRouter(route_class=ErrorHandlingRoute, include_in_schema=False)


@router.get("/")
@router.get("/compare")
async def page(request: Request) -> Response:
    """Send the main page, or the page that compares responses."""
    return _PAGES["/" + request.url.path.rpartition("/")[2]].answer(request)


@router.get("/static/{name:path}")
async def part(request: Request, name: str) -> Response:
    """Send a script, a style, the icon, or a library in `vendor/`."""
    if name not in _FILES:
        raise HttpError(404, f"The web page has no file '{name[:100]}'.", code="route_not_found")
    return _FILES[name].answer(request)
