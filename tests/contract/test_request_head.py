"""Which heads are refused, alone and by a server that reads them from a socket."""

import json
import socket

import pytest

from oarlock.server.config.option_checks import AllowedHosts
from oarlock.server.http.request_head import head_error

HOST = (b"host", b"localhost:8000")
GOOD = [
    ("1.1", b"/", [HOST]),
    ("1.1", b"/v1/models?a=b", [(b"host", b"")]),
    ("1.1", b"/", [(b"host", b"[::1]:8000")]),
    ("1.1", b"/", [(b"host", b"[fe80::1%eth0]")]),
    ("1.1", b"/", [(b"host", b"gpu_box.local:")]),
    ("1.0", b"/", []),
    ("1.1", b"http://localhost:8000/v1/models", [HOST]),
    ("1.1", b"HTTP://LocalHost/", [(b"host", b"localhost:80")]),
    ("1.1", b"*", [HOST]),
    ("1.1", b"/", [HOST, (b"transfer-encoding", b" Chunked ")]),
]
BAD = [
    ("2.0", b"/", [HOST], "HTTP/2.0 is not supported"),
    ("0.9", b"/", [HOST], "HTTP/0.9 is not supported"),
    ("1.1", b"/", [], "no Host header"),
    ("1.1", b"/", [(b"host", b"[::1].evil.example")], "not a name or an address"),
    ("1.1", b"/", [(b"host", b"localhost@evil.example")], "not a name or an address"),
    ("1.1", b"/", [(b"host", b"localhost:80:90")], "not a name or an address"),
    ("1.1", b"/", [(b"host", b"localhost/evil")], "not a name or an address"),
    ("1.1", b"/", [(b"host", "b\xfccher.example".encode("latin-1"))], "not a name or an address"),
    ("1.1", b"/", [HOST, (b"transfer-encoding", b"gzip, chunked")], "Transfer-Encoding"),
    ("1.1", b"/", [HOST, (b"transfer-encoding", b"identity")], "Transfer-Encoding"),
    ("1.1", b"/", [HOST, *[(b"transfer-encoding", b"chunked")] * 2], "Transfer-Encoding"),
    ("1.0", b"/", [HOST, (b"transfer-encoding", b"chunked")], "Transfer-Encoding"),
    ("1.1", b"http://evil.example/v1/models", [HOST], "another server"),
    ("1.1", b"http://localhost:8001/v1/models", [HOST], "another server"),
    ("1.1", b"http://user@localhost:8000/", [HOST], "another server"),
    ("1.1", b"ftp://localhost:8000/", [HOST], "another protocol"),
]


@pytest.mark.parametrize(("version", "target", "headers"), GOOD)
def test_heads_that_can_be_read_in_one_way_only_are_accepted(version, target, headers):
    assert head_error(version, target, headers) is None


@pytest.mark.parametrize(("version", "target", "headers", "cause"), BAD)
def test_heads_that_rfc_9112_forbids_are_refused_with_the_cause(version, target, headers, cause):
    assert cause in (head_error(version, target, headers) or "")


def _raw(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


@pytest.mark.parametrize(("version", "target", "headers", "cause"), BAD)
def test_a_server_answers_such_a_head_with_one_400_and_closes(make_server, version, target, headers, cause):
    """The request behind it must not be answered: a proxy may have taken it for this one's body."""
    fields = b"".join(b"%s: %s\r\n" % field for field in headers)
    follower = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = _raw(make_server().port, b"POST %s HTTP/%s\r\n%s\r\n%s" % (target, version.encode(), fields, follower))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]  # and nothing behind it
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["[::1].evil.example", "[::1]evil", "localhost:80:90", "[::1", "[localhost]x:80"])
def test_a_name_around_an_allowed_one_is_not_allowed(name):
    assert name.encode() not in AllowedHosts("127.0.0.1")
    assert b"[::1]:80" in AllowedHosts("127.0.0.1")
