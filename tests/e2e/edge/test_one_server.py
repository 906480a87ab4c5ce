"""One server on a Unix socket, below a path, behind nginx and Caddy with HTTPS."""

import ssl

import httpx
import pytest

from tests.contract.edge.certificates import Authority, Pair
from tests.e2e.edge.front import NAMES, Front, why_missing
from tests.e2e.long_context import LONG, long_context_demo
from tests.e2e.running import RunningServer, eventually

pytestmark = [pytest.mark.slow, pytest.mark.soak]
KEYS = ("anna-7f3", "bert-9c1")
KEY, CHAT = {"Authorization": f"Bearer {KEYS[1]}"}, "https://chat.example.org"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "model").mkdir()
    uds = folder / "http.sock"
    flags = ("--uds", uds, "--root-path", "/llm", "--allowed-origins", CHAT)
    running = RunningServer(long_context_demo(folder / "model"), *flags, env={"OARLOCK_API_KEY": ", ".join(KEYS)})
    running.client = httpx.Client(
        transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://localhost", timeout=60, headers=KEY
    )
    running.uds = uds
    with running:
        yield running
        assert not [key for key in KEYS if key in running.log]
    assert not uds.exists()  # a server that ends leaves no socket


@pytest.fixture(scope="module", params=NAMES)
def front(request, server, authority, tmp_path_factory):
    if reason := why_missing(request.param):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(request.param)
    pair = Pair(folder / "fullchain.pem", folder / "privkey.pem")
    authority.write(pair, "localhost")
    with Front(request.param, folder, server.uds, pair) as running:
        yield running


@pytest.fixture
def client(front, authority):
    context = ssl.create_default_context(cafile=str(authority.file))
    with httpx.Client(verify=context, timeout=60, trust_env=False, headers=KEY) as client:
        yield client


def test_answers_and_the_path(front, client):
    answer = client.post(f"{front.url}/v1/completions", json={"prompt": "import os\n", "max_tokens": 8})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
    assert client.get(f"{front.url}/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert client.get(f"{front.url}/health", headers={"Authorization": ""}).status_code == 200
    assert client.get(f"{front.url}/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get(f"{front.url}/v1/models", headers={"Authorization": f"Bearer {KEYS[0]}"}).status_code == 200
    assert client.get(f"{front.url}/").headers["content-type"].startswith("text/html")


def test_tokens_pass_at_once_and_a_client_that_leaves_is_noticed(front, client, server):
    body = {"prompt": "import os\n", "stream": True, "max_tokens": LONG, "ignore_eos": True}
    with client.stream("POST", f"{front.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: an iterator that goes away closes the stream
        assert next(lines).startswith("data: ")
        eventually(lambda: server.metrics()["vllm:num_requests_running"] == 1, 30, "the rest is still computed")
    eventually(lambda: server.metrics()["vllm:num_requests_running"] == 0, 30, "the request is aborted")


def test_refusals_are_the_servers_and_what_is_private_stays_inside(front, client, server):
    large = client.post(f"{front.url}/v1/completions", json={"prompt": "x" * (16 * 2**20)})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
    for path in ("/metrics", "/admin/drain", "/admin/abort", "/v1/requests/one"):
        assert client.post(front.url + path).status_code == client.get(front.url + path).status_code == 404
    assert server.client.get("/metrics").status_code == 200


def test_a_page_of_another_origin_may_ask_through_it(front, client):
    asks = {"Origin": CHAT, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = client.options(f"{front.url}/v1/completions", headers={**asks, "Authorization": ""})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (204, CHAT)
