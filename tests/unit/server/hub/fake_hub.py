"""A model hub on loopback: the description of one repository, and its files, whole or from a byte on.

It can send slowly, refuse, close the connection early or ignore ranges, and it records the requests.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
_API = re.compile(r"/api/models/(?P<model>[^/]+/[^/]+)(/revision/(?P<revision>.+))?")
_FILE = re.compile(r"/(?P<model>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
LARGE = 64 * 1024  # bytes; beyond, a hub keeps a file apart and names it by its SHA-256
_CHUNK = 4096


def etag(content: bytes, *, is_large: bool) -> str:
    """Name that a hub gives a content: the SHA-256 of a large file, git's hash of a small one."""
    if is_large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class FakeHub:
    """One repository, `model`. `files`: name -> bytes. Use as a context manager."""

    def __init__(self, files: dict[str, bytes], model: str = "owner/model") -> None:
        self.model = model
        self.files = files
        self.revisions = {"main": COMMIT, COMMIT: COMMIT}
        self.bytes_per_second: float | None = None  # of large files
        self.refuse: tuple[int, dict[str, str]] | None = None  # status and headers of every answer
        self.refuse_files: tuple[int, dict[str, str]] | None = None  # only of files
        self.break_off_after: int | None = None  # bytes of the next large file, once
        self.knows_ranges = True
        self.asked: list[tuple[str, int | None]] = []  # name of each file that was asked for, and its first byte
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def names_asked(self) -> set[str]:
        return {name for name, _ in self.asked}

    def environment(self, home: Any) -> dict[str, str]:
        """Environment variables that point a program here, with its cache in `home`."""
        found = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        return found | {"HF_TOKEN": "", "no_proxy": "127.0.0.1"}

    def description(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            found: dict[str, Any] = {
                "rfilename": name,
                "size": len(content),
                "blobId": etag(content, is_large=False),
            }
            if len(content) > LARGE:
                found["lfs"] = {"sha256": etag(content, is_large=True), "size": len(content), "pointerSize": 134}
            siblings.append(found)
        return {"id": self.model, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is killed in the middle of a request resets its connection: not an error here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            return None

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            api, file = _API.fullmatch(path), _FILE.fullmatch(path)
            match = api or file
            if hub.refuse is not None or match is None or match["model"] != hub.model:
                self._end(*(hub.refuse or (404, {"X-Error-Code": "RepoNotFound"})))
            elif (match["revision"] or "main") not in hub.revisions:
                self._end(404, {"X-Error-Code": "RevisionNotFound"})
            elif api is not None:
                self._end(200, {"Content-Type": "application/json"}, json.dumps(hub.description()).encode())
            elif hub.refuse_files is not None:
                self._end(*hub.refuse_files)
            elif match["name"] not in hub.files:
                self._end(404, {"X-Error-Code": "EntryNotFound"})
            else:
                self._send_file(match["name"], hub.files[match["name"]])

        do_HEAD = do_GET

        def _end(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def _send_file(self, name: str, content: bytes) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            begin = int(asked[1]) if asked and hub.knows_ranges else 0
            is_large = len(content) > LARGE
            self.send_response(206 if begin else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etag(content, is_large=is_large)}"')
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            if self.command == "HEAD":
                return
            hub.asked.append((name, int(asked[1]) if asked else None))
            limit = len(content)
            if is_large and hub.break_off_after is not None:
                limit, hub.break_off_after = begin + hub.break_off_after, None
            try:
                for start in range(begin, limit, _CHUNK):
                    self.wfile.write(content[start : min(start + _CHUNK, limit)])
                    if is_large and hub.bytes_per_second:
                        time.sleep(_CHUNK / hub.bytes_per_second)
            except OSError:  # the client has gone
                pass
            if limit < len(content):
                self.close_connection = True
                self.connection.close()

    return Handler
