"""Requests that nginx and Envoy retry on another server, and how often, with the files of configs/ before four
servers that fail on purpose.
"""

import http.server
import socketserver
import threading

import httpx
import pytest

from tests.e2e.proxies.load import SESSION
from tests.e2e.proxies.proxy import PROGRAMS, Proxy, why_missing
from tests.e2e.running import eventually

SESSIONS = [str(number) for number in range(40)]


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers as the body of a POST asks. Connections are kept, as the server keeps them."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer is one packet
    server: "Server"

    def do_GET(self):  # /health
        self._send(200, b"{}")

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(asked)
        if asked == b"cut":
            self.close_connection = True  # without a word
        elif asked == b"begun":
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            self.close_connection = True
        else:
            self._send(int(asked), b"{}")

    def _send(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.got = []  # bodies of POST requests


@pytest.fixture(scope="module")
def servers():
    four = [Server() for _ in range(4)]
    for server in four:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield four
    for server in four:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module", params=PROGRAMS)
def client(request, servers, tmp_path_factory):
    """Client of a proxy before all four servers."""
    if reason := why_missing(request.param):
        pytest.skip(reason)
    ports = [server.server_port for server in servers]
    first, *_ = WRITTEN[request.param]
    more = "".join(WRITTEN[request.param][1].format(port=port) for port in ports[2:])
    changes = {first: rf"\g<0>{more}"}
    with (
        Proxy(request.param, tmp_path_factory.mktemp(request.param), ports[:2], changes) as proxy,
        httpx.Client(base_url=proxy.url, timeout=60, trust_env=False) as client,
    ):
        yield client


# The line of the second server in each file, and how one more is written.
WRITTEN = {
    "nginx": (r" *server 10\.0\.0\.12:8000 .*\n", "    server 127.0.0.1:{port} max_fails=1 fail_timeout=1s;\n"),
    "envoy": (
        r" *- endpoint: .*10\.0\.0\.12.*\n",
        "              - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}\n",
    ),
}


def all_are_well(servers, client):
    """Whether every session is answered, and every server has had one."""
    answers = [client.post("/", content=b"200", headers={SESSION: session}) for session in SESSIONS]
    return all(answer.status_code == 200 for answer in answers) and all(b"200" in server.got for server in servers)


def sent_to(servers, client, body):
    """Number of requests with this body at each server, in order of size, and the answer. Before it all servers are
    well, and each has answered, so that a connection to it may be kept."""
    for server in servers:
        server.got.clear()
    eventually(lambda: all_are_well(servers, client), 60, "the proxy sends requests to all servers")
    answer = error = None
    try:
        answer = client.post("/", content=body, headers={SESSION: "1"})
    except httpx.HTTPError as caught:
        error = caught
    got = sorted(server.got.count(body) for server in servers)
    return got, answer, error


def test_a_request_that_every_server_breaks_off_reaches_two(servers, client):
    got, answer, _ = sent_to(servers, client, b"cut")
    assert got == [0, 0, 1, 1]
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_server"


def test_a_503_is_sent_on_once(servers, client):
    got, answer, _ = sent_to(servers, client, b"503")
    assert got == [0, 0, 1, 1] and answer.status_code == 503


def test_any_other_answer_is_the_clients(servers, client):
    for status in (400, 429, 500):
        got, answer, _ = sent_to(servers, client, str(status).encode())
        assert got == [0, 0, 0, 1] and answer.status_code == status


def test_an_answer_that_has_begun_is_not_begun_again(servers, client):
    got, _, error = sent_to(servers, client, b"begun")
    assert got == [0, 0, 0, 1] and error is not None
