"""Reads `multipart/form-data` (RFC 7578, RFC 2046 section 5.1.1) piece by piece: a file is never whole in memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from oarlock.engine.errors import RequestError
from oarlock.server.errors import HttpError

MAX_PARTS = 16
MAX_HEADERS = 8 * 1024  # bytes, of one part
_BOUNDARY = re.compile(r"""boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE)
_PARAMETER = re.compile(r"""(?:^|;)\s*(name|filename)="((?:[^"\\]|\\.)*)\"""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """A part begins."""

    name: str
    filename: str | None  # None: it is a field, not a file


def boundary_of(content_type: str) -> bytes:
    """Raises `HttpError` (415) unless it is a form with a boundary."""
    found = _BOUNDARY.search(content_type)
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data" or found is None:
        raise HttpError(415, "The body must be a form: send 'Content-Type: multipart/form-data; boundary=…'.")
    return (found[1] or found[2]).encode("latin-1", "replace")


class MultipartReader:
    """Bytes in, parts and their contents out."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # so that the first delimiter is like the others
        self._state = "before"  # then "delimiter", "headers", "content" and, at the end, "after"
        self._num_parts = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last delimiter has come."""
        return self._state == "after"

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """A `Part` where one begins, and pieces of its content. Raises `RequestError`."""
        self._buffer += data
        while True:
            if self._state in ("before", "content"):
                content, found = self._content()
                if content and self._state == "content":
                    yield content
                if not found:
                    return
                self._state = "delimiter"
            elif self._state == "delimiter":
                if len(self._buffer) < 2:
                    return
                mark = bytes(self._buffer[:2])
                if mark not in (b"--", b"\r\n"):
                    raise _wrong("a delimiter is followed by neither a part nor the end")
                del self._buffer[:2]
                self._state = "after" if mark == b"--" else "headers"
            elif self._state == "headers":
                part = self._headers()
                if part is None:
                    return
                self._state = "content"
                yield part
            else:
                self._buffer.clear()  # what follows the end means nothing (RFC 2046)
                return

    def _content(self) -> tuple[bytes, bool]:
        """Take what is certainly content from the buffer, and tell whether a delimiter ended it."""
        at = self._buffer.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        content = bytes(self._buffer[:end])
        del self._buffer[: end + len(self._delimiter) if at >= 0 else end]
        return content, at >= 0

    def _headers(self) -> Part | None:
        at = self._buffer.find(b"\r\n\r\n")
        if (at if at >= 0 else len(self._buffer)) > MAX_HEADERS:
            raise _wrong(f"the headers of a part are longer than {MAX_HEADERS} bytes")
        if at < 0:
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _wrong(f"it has more than {MAX_PARTS} parts")
        lines = bytes(self._buffer[:at]).decode("utf-8", "replace").split("\r\n")
        del self._buffer[: at + 4]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "content-transfer-encoding" in headers and headers["content-transfer-encoding"].lower() != "binary":
            raise _wrong("a part has a Content-Transfer-Encoding; send its bytes as they are")
        kind, _, rest = headers.get("content-disposition", "").partition(";")
        found = {name.lower(): re.sub(r"\\(.)", r"\1", value) for name, value in _PARAMETER.findall(rest)}
        if kind.strip().lower() != "form-data" or "name" not in found:
            raise _wrong("a part has no 'Content-Disposition: form-data; name=\"…\"'")
        return Part(found["name"], found.get("filename"))


def _wrong(problem: str) -> RequestError:
    return RequestError(f"The form cannot be read: {problem}.", None, "invalid_form")
