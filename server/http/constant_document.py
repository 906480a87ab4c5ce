"""Answers that are the same bytes for every request: made and compressed once, and not sent again to who has them."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

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
    def of(body: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> ConstantDocument:
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
