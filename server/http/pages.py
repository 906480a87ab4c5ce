"""Documents that are the same bytes for every request: made and compressed once, and not sent again to who has them.

The web page at `GET /` is such a document, with its parts below `/static/`. It holds no secret and asks the API like
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

# What an HTML page may load and do, before its own sources are added: no markup from text, no frames around it.
_LOCKED = {
    "default-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_KEPT = ("Cache-Control", "ETag", "Vary")  # where the client has the document already


def page_headers(sources: Mapping[str, str]) -> dict[str, str]:
    """The headers of an HTML page, which keep its rights small. `sources`: directives of its own, such as `img-src`."""
    policy = _LOCKED | dict(sources)
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
        """A document with its ETag. `headers`: more that every answer with it carries."""
        digest = hashlib.blake2b(body, digest_size=12).hexdigest()
        own = {
            "Cache-Control": "no-cache",  # asked for again each time, and not sent again: a new version shows at once
            "Content-Type": media_type,
            "ETag": f'W/"{digest}"',
            "Vary": "Accept-Encoding",
        }
        return ConstantDocument(body, gzip.compress(body, mtime=0), {**(headers or {}), **own})

    def answer(self, request: Request) -> Response:
        """The document, compressed where the client can read that; or 304."""
        if self.headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={name: self.headers[name] for name in _KEPT})
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.zipped, headers={**self.headers, "Content-Encoding": "gzip"})
        return Response(self.body, headers=self.headers)


class MadeOnce:
    """Documents that depend on the model alone: made when first asked for, and again only for another model."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[object, ConstantDocument]] = {}

    def get(self, name: str, model: object, make: Callable[[], ConstantDocument]) -> ConstantDocument:
        """The document of that name. `model`: the object whose identity says whether it is still the same model."""
        made_for, document = self._made.get(name, (None, None))
        if document is None or made_for is not model:
            document = make()
            self._made[name] = model, document
        return document


_FOLDER = Path(__file__).resolve().parent / "static"
_MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_SOURCES = {"script-src": "'self'", "style-src": "'self'", "img-src": "'self'", "connect-src": "'self'"}
_HEADERS = page_headers(_SOURCES)  # only this server's own scripts, styles and answers
# The page that compares servers may ask those that its reader names: a document of its own, so that the chat may not.
_COMPARING = page_headers(_SOURCES | {"connect-src": "'self' http: https:"})

# What only readers of the source need. No text of the page spans lines or has braces, so none of it looks like this.
_COMMENTS = re.compile(r"^ *(?:/\*\*.*?\*/|//[^\n]*)\n", re.MULTILINE | re.DOTALL)
_SPACES = re.compile(r"(?<=[{};:,]) +| +(?=[{}])")
_INDENTATION = re.compile(r"^ +", re.MULTILINE)


def _read(path: Path) -> ConstantDocument:
    """A part of the page. Libraries of others, in `vendor/`, stay byte for byte what was published."""
    text = path.read_text("utf-8")
    if path.parent == _FOLDER:
        if path.suffix == ".js":
            text = _COMMENTS.sub("", text)
        elif path.suffix == ".css":
            text = _SPACES.sub("", text)
        text = _INDENTATION.sub("", text)
    headers = _COMPARING if path.name == "compare.html" else _HEADERS
    return ConstantDocument.of(text.encode(), f"{_MEDIA[path.suffix]}; charset=utf-8", headers)


_PARTS = {path.relative_to(_FOLDER).as_posix(): _read(path) for path in _FOLDER.rglob("*") if path.suffix in _MEDIA}
_PAGES = {"/": _PARTS.pop("index.html"), "/compare": _PARTS.pop("compare.html")}
PATHS = frozenset(f"/static/{name}" for name in _PARTS) | _PAGES.keys()


def document_at(path: str) -> ConstantDocument | None:
    """The page, or the part of it, at this path of the server; None: there is none."""
    return _PAGES.get(path) or _PARTS.get(path.removeprefix("/static/"))


router = APIRouter(route_class=ErrorHandlingRoute, include_in_schema=False)


@router.get("/")
@router.get("/compare")
async def page(request: Request) -> Response:
    """The page itself, or the one that compares answers."""
    return _PAGES["/" + request.url.path.rpartition("/")[2]].answer(request)


@router.get("/static/{name:path}")
async def part(request: Request, name: str) -> Response:
    """One of its scripts, its styles, its icon, or a library in `vendor/`."""
    if name not in _PARTS:
        raise HttpError(404, f"The web page has no part '{name[:100]}'.", code="route_not_found")
    return _PARTS[name].answer(request)
