"""HTTPS: answers and refusals through it, certificates that are renewed meanwhile, and files that cannot be used."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import ssl
import threading
import time

import httpx
import pytest
import uvloop
from cryptography import x509

from oarlock.base.errors import StartupError
from oarlock.engine.stats import EngineStats
from oarlock.server.http.listeners import bind
from oarlock.server.http.tls import ServerTls
from oarlock.server.http.uvicorn_server import HttpServer
from oarlock.server.observability.metrics import HttpCounters, exposition
from tests.contract.edge.certificates import Authority, Pair

LOOPS = {"asyncio": None, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path / "fullchain.pem", tmp_path / "privkey.pem")


@pytest.fixture(params=LOOPS)
def serve(request, make_stage, wait_for):
    """HTTPS on a free port, with a certificate: (port, the server's stage)."""
    running = []

    def start(pair, *args, **options):
        tls = ServerTls(str(pair.certificate), str(pair.key))
        listener, stage = bind("127.0.0.1", 0), make_stage(*args, **options)
        server = HttpServer(stage.app, listener, tls=tls)

        def run():
            with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
                runner.run(server.run_until_stopped())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        running.append((server, thread))
        return listener.getsockname()[1], stage

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def _client(authority):
    return ssl.create_default_context(cafile=str(authority.file))


def _serial(port, authority, name="localhost"):
    """The serial number of the certificate that a client gets, which must be one that it trusts."""
    context = _client(authority)
    context.check_hostname = name is not None
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True)).serial_number


@pytest.mark.slow
def test_requests_streams_and_kept_connections(serve, authority, pair):
    authority.write(pair, "localhost")
    port, stage = serve(pair, "one two three", always_stream_usage=True)
    with httpx.Client(base_url=f"https://localhost:{port}", verify=_client(authority), trust_env=False) as client:
        plain = client.post("/v1/completions", json={"prompt": "x"})
        assert (plain.status_code, plain.json()["choices"][0]["text"]) == (200, "one two three")
        with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        text = "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line[6:])["choices"])
        assert text == "one two three"
        large = client.post("/v1/completions", json={"prompt": "x", "user": "y" * 200_000})  # read whole
        assert (large.status_code, large.json()["error"]["param"]) == (400, "user")
    assert len(stage.engine.requests) == 2


def test_a_refusal_reaches_a_client_that_is_still_writing(serve, authority, pair):
    """Without TLS our half of the connection is closed then, which TLS cannot do."""
    authority.write(pair, "localhost")
    port, _ = serve(pair, max_body_size=1024)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        _client(authority).wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(head + b"Content-Length: 3000000\r\n\r\n")
        for _ in range(30):
            connection.sendall(b"x" * 100_000)
        received = connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 413 ") and b"connection: close" in received.lower()


def test_connections_without_tls_are_closed_and_others_served(serve, authority, pair):
    serial = authority.write(pair, "localhost")
    port, stage = serve(pair)
    for data in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", os.urandom(100), b""):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            try:
                while chunk := connection.recv(4096):
                    received += chunk
            except ConnectionResetError:
                pass
            assert not received.startswith(b"HTTP")
    assert _serial(port, authority) == serial
    assert stage.counters.responses == {}


def test_a_handshake_that_does_not_come_has_a_deadline(serve, authority, pair, monkeypatch):
    monkeypatch.setattr("oarlock.server.http.uvicorn_server.HEAD_TIMEOUT_S", 0.2)
    authority.write(pair, "localhost")
    port, _ = serve(pair)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        assert connection.recv(4096) == b""


@pytest.mark.slow
def test_a_renewed_certificate_is_taken_over_and_open_connections_stay(serve, authority, pair, wait_for):
    first = authority.write(pair, "localhost")
    port, _ = serve(pair)
    with httpx.Client(base_url=f"https://localhost:{port}", verify=_client(authority), trust_env=False) as kept:
        assert kept.get("/health").status_code == 200
        assert _serial(port, authority) == first
        second = authority.write(pair, "localhost")
        wait_for(lambda: _serial(port, authority) == second)
        assert _serial(port, authority, None) == second  # a client that names no server
        assert kept.get("/health").status_code == 200


@pytest.mark.slow
def test_a_renewal_through_links_as_certbot_makes_it(serve, authority, pair, tmp_path, wait_for):
    live = Pair(tmp_path / "live.pem", tmp_path / "live-key.pem")
    first = authority.write(pair, "localhost")
    live.certificate.symlink_to(pair.certificate)
    live.key.symlink_to(pair.key)
    port, _ = serve(live)
    assert _serial(port, authority) == first
    newer = Pair(tmp_path / "fullchain2.pem", tmp_path / "privkey2.pem")
    second = authority.write(newer, "localhost")
    for link, target in ((live.certificate, newer.certificate), (live.key, newer.key)):
        link.unlink()
        link.symlink_to(target)
    wait_for(lambda: _serial(port, authority) == second)


def test_files_that_do_not_fit_are_logged_and_the_certificate_stays(authority, pair, tmp_path, caplog):
    authority.write(pair, "localhost")
    tls = ServerTls(str(pair.certificate), str(pair.key))
    before = tls._newest
    shutil.copy(pair.key, tmp_path / "old-key")
    authority.write(pair, "localhost")
    shutil.copy(tmp_path / "old-key", pair.key)
    for _ in range(4):
        tls.renew()
    assert tls._newest is before
    assert caplog.text.count("event=certificate_not_renewed") == 1  # once for these files, not every second
    authority.write(pair, "localhost", "other.example")
    tls.renew()
    assert tls._newest is before  # it has only just changed: the other file may be about to
    tls.renew()
    assert tls._newest is not before and tls.names == ("localhost", "other.example")
    counters = HttpCounters()
    counters.certificate = tls
    page = exposition([EngineStats()], None, counters, "m").decode()
    assert tls.expires > time.time() and "oarlock:certificate_expiry_timestamp_seconds" in page


def test_an_expired_certificate_is_served_with_a_warning(authority, pair, caplog):
    authority.write(pair, "localhost", days=-1)
    ServerTls(str(pair.certificate), str(pair.key))
    assert "it has expired" in caplog.text


def _broken(authority, pair, how):
    authority.write(pair, "localhost", passphrase=b"secret" if how == "locked" else None)
    if how == "no certificate":
        pair.certificate.unlink()
    elif how == "no key":
        pair.key.unlink()
    elif how == "not a certificate":
        pair.certificate.write_text("-----BEGIN CERTIFICATE-----\nbm90IG9uZQ==\n-----END CERTIFICATE-----\n")
    elif how == "not a key":
        pair.key.write_bytes(b"\x00\xff")
    elif how == "of another":
        authority.write(Pair(pair.certificate.with_name("other"), pair.key), "localhost")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("no certificate", r"--ssl-certfile .* cannot be read: No such file"),
        ("no key", r"--ssl-keyfile .* cannot be read: No such file"),
        ("not a certificate", "contains no certificate in PEM"),
        ("not a key", "contains no private key in PEM"),
        ("locked", "protected by a passphrase"),
        ("of another", "does not belong to the certificate"),
    ],
)
def test_files_that_cannot_be_used_end_the_start(authority, pair, how, cause):
    _broken(authority, pair, how)
    with pytest.raises(StartupError, match=cause) as caught:
        ServerTls(str(pair.certificate), str(pair.key))
    assert caught.value.fix
