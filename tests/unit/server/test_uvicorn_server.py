"""The listening socket: its URL, the warning for an exposed one, and errors of a port that cannot be opened."""

from __future__ import annotations

import errno
import os

import pytest

from engine.errors import StartupError
from server.api.uvicorn_server import bind, url_of, warn_if_exposed
from server.config.allowed_hosts import is_loopback


def test_addresses():
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "127.9.9.9", "0.0.0.0", "evil")] == [
        *[True] * 4,
        False,
        False,
    ]
    assert warn_if_exposed("0.0.0.0", False)
    assert warn_if_exposed("0.0.0.0", True) is None
    assert warn_if_exposed("127.0.0.1", False) is None
    listener = bind("127.0.0.1", 0)
    assert url_of(listener).startswith("http://127.0.0.1:")
    listener.close()


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EACCES, "may not be opened by this user"),
        (errno.EADDRNOTAVAIL, "not an address of this machine"),
        (errno.EINVAL, "Cannot listen"),
    ],
)
def test_a_port_that_cannot_be_opened_is_explained(monkeypatch, number, cause):
    def refuse(self, address):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("socket.socket.bind", refuse)
    with pytest.raises(StartupError, match=cause):
        bind("127.0.0.1", 80)
