"""The listening socket: its URL, the warning for an exposed one, and errors of what cannot be opened."""

from __future__ import annotations

import errno
import os
import socket
import stat

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.config.option_checks import is_loopback
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import Settings, make_settings
from oarlock.server.http.listeners import bind, bind_unix, inherited, listen, remove_unused, url_of, warn_if_exposed


def test_addresses():
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "127.9.9.9", "0.0.0.0", "evil")] == [
        *[True] * 4,
        False,
        False,
    ]
    assert warn_if_exposed(Settings(host="0.0.0.0"))
    assert warn_if_exposed(Settings(host="0.0.0.0", api_key=("k",))) is None
    assert warn_if_exposed(Settings()) is None
    assert warn_if_exposed(Settings(host="0.0.0.0", uds="/run/x.sock")) is None  # --host does not count then
    listener = bind("127.0.0.1", 0)
    assert url_of(listener).startswith("http://127.0.0.1:")
    assert url_of(listener, "https").startswith("https://127.0.0.1:")
    listener.close()


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EACCES, "not allowed to open port"),
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


def test_a_unix_socket_is_open_to_anyone_who_can_reach_its_folder(tmp_path):
    path = tmp_path / "http.sock"
    with listen(Settings(uds=str(path))) as listener:
        assert url_of(listener) == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        with pytest.raises(StartupError, match="Another process listens") as caught:
            bind_unix(str(path))
        assert "--uds" in caught.value.fix
        assert not remove_unused(str(path)) and path.exists()


def test_a_unix_socket_that_nobody_listens_on_is_replaced(tmp_path):
    path = tmp_path / "http.sock"
    bind_unix(str(path)).close()  # its process was killed: the name stays
    assert path.exists()
    with bind_unix(str(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert remove_unused(str(path)) and not path.exists()
    assert remove_unused(str(path))


def test_files_that_are_no_sockets_are_not_replaced(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("kept")
    with pytest.raises(StartupError, match="is not a socket"):
        bind_unix(str(path))
    assert path.read_text() == "kept"
    with pytest.raises(StartupError, match="No such file") as caught:
        bind_unix(str(tmp_path / "none" / "http.sock"))
    assert "--uds" in caught.value.fix


def test_a_socket_that_is_handed_over_must_be_one_that_listens(tmp_path):
    with pytest.raises(StartupError, match="passes 2 sockets"):
        inherited(2)
    (tmp_path / "file").touch()
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(StartupError, match="is not a socket"):
        inherited(1, descriptor)
    os.close(descriptor)
    with socket.socket() as unbound, pytest.raises(StartupError, match="is not a listening"):
        inherited(1, os.dup(unbound.fileno()))
    with bind("127.0.0.1", 0) as listener:
        descriptor = os.dup(listener.fileno())
        os.set_inheritable(descriptor, True)
        with inherited(1, descriptor) as taken:
            assert url_of(taken) == url_of(listener)
            assert not taken.get_inheritable()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"uds": "/" + "x" * 107}, "107 at most"),
        ({"ssl_certfile": "cert.pem"}, "without --ssl-keyfile"),
        ({"ssl_keyfile": "key.pem"}, "without --ssl-certfile"),
        ({"root_path": "llm"}, "--root-path"),
        ({"root_path": "/llm/"}, "--root-path"),
        ({"root_path": "/"}, "--root-path"),
        ({"root_path": "/a b"}, "--root-path"),
        ({"allowed_origins": ("https://a.example/",)}, "--allowed-origins"),
        ({"allowed_origins": ("a.example",)}, "--allowed-origins"),
        ({"allowed_origins": ('["*"]',)}, "--allowed-origins"),
        ({"allowed_origins": ("https://A.example",)}, "--allowed-origins"),
    ],
)
def test_addresses_that_cannot_be_bound_or_matched_are_refused(options, words):
    with pytest.raises(OptionError, match=words) as caught:
        make_settings(options)
    assert "--" in caught.value.fix


def test_origins_in_the_form_that_browsers_send_are_accepted():
    origins = (
        "https://chat.example.org",
        "http://localhost:3000",
        "http://[::1]:8080",
        "chrome-extension://abcdef",
        "*",
    )
    assert make_settings({"allowed_origins": origins, "root_path": "/models/llm-1"}).allowed_origins == origins
