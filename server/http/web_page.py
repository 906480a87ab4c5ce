"""`GET /`: the web page, and its parts below `/static/`. It holds no secret and asks the API like any other client."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.errors import HttpError
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.constant_document import ConstantDocument, page_headers

_FOLDER = Path(__file__).resolve().parent / "static"
_MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = page_headers(  # only this server's own scripts, styles and answers
    {"script-src": "'self'", "style-src": "'self'", "img-src": "'self'", "connect-src": "'self'"}
)

# What only readers of the source need. No text of the page spans lines or has braces, so none of it looks like this.
_COMMENTS = re.compile(r"^ *(?:/\*\*.*?\*/|//[^\n]*)\n", re.MULTILINE | re.DOTALL)
_SPACES = re.compile(r"(?<=[{};:,]) +| +(?=[{}])")
_INDENTATION = re.compile(r"^ +", re.MULTILINE)


def _read(path: Path) -> ConstantDocument:
    text = path.read_text("utf-8")
    if path.suffix == ".js":
        text = _COMMENTS.sub("", text)
    elif path.suffix == ".css":
        text = _SPACES.sub("", text)
    body = _INDENTATION.sub("", text).encode()
    return ConstantDocument.of(body, f"{_MEDIA[path.suffix]}; charset=utf-8", _HEADERS)


_PARTS = {path.name: _read(path) for path in _FOLDER.iterdir()}
_PAGE = _PARTS.pop("index.html")
PATHS = frozenset(f"/static/{name}" for name in _PARTS) | {"/"}

router = APIRouter(route_class=ErrorHandlingRoute, include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page itself."""
    return _PAGE.answer(request)


@router.get("/static/{name}")
async def part(request: Request, name: str) -> Response:
    """One of its scripts, its styles or its icon."""
    if name not in _PARTS:
        raise HttpError(404, f"The web page has no part '{name[:100]}'.", code="route_not_found")
    return _PARTS[name].answer(request)
