"""Restarts and deaths of two servers behind nginx and Envoy, with the files of configs/.

Nothing is lost when one restarts, and only the streams of a server that is killed.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.long_context import LONG, long_context_demo
from tests.e2e.open_stream import OpenStream
from tests.e2e.proxies.load import Load, completion, headers
from tests.e2e.proxies.proxy import PROGRAMS, Proxy, why_missing
from tests.e2e.proxies.sessions import BY_SESSION, ROUND_ROBIN, share_through_nginx
from tests.e2e.running import RunningServer, eventually

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]  # many starts of servers
SOME = 1000  # tokens: an answer that is still open when the test acts, and over soon after
BLOCK = 32  # tokens: what is shared are full blocks
ANSWER = 200  # tokens: some are open at any time
PROBE, LOAD = "probe", "load"  # API keys: of single requests, and of those that come all the time


class Fleet:
    """Two servers on fixed ports, and every proxy of this machine before them."""

    def __init__(self, model, directory):
        self.model = model
        self.keys = directory / "keys"
        self.keys.write_text("".join(f"{key} {key}\n" for key in (PROBE, LOAD)))
        self.servers = [self._server(None), self._server(None)]
        self.proxies = {}
        for name in PROGRAMS:
            if why_missing(name) is None:
                folder = directory / name
                folder.mkdir()
                self.proxies[name] = Proxy(name, folder, [server.port for server in self.servers])

    def _server(self, port):
        return RunningServer(self.model, "--drain-timeout", 120, "--api-key-file", self.keys, port=port)

    def __enter__(self):
        for running in (*self.servers, *self.proxies.values()):
            running.__enter__()
        self.sessions = {name: self._sessions(name) for name in self.proxies}
        return self

    def __exit__(self, *error):
        for running in (*self.proxies.values(), *self.servers):
            running.__exit__(*error)

    def proxy(self, name):
        if name not in self.proxies:
            pytest.skip(why_missing(name))
        return self.proxies[name]

    def start_again(self, index):
        """Start a new server in the place of one that has ended; return once every proxy has found it."""
        old = self.servers[index]
        assert old.process.poll() is not None
        old.kill_all()
        self.servers[index] = self._server(old.port).__enter__()
        for name in self.proxies:
            session = self.sessions[name][index][0]
            eventually(partial(self._goes_to, index, name, session), 60, f"{name} sends requests to it again")

    def running(self, index):
        return self.servers[index].metrics()["vllm:num_requests_running"]

    def accepted(self, index):
        return self.servers[index].metrics()["oarlock:requests_accepted_total"]

    def _answered(self):
        """Number of single requests that each server has answered."""
        counts = []
        for server in self.servers:
            families = text_string_to_metric_families(server.client.get("/metrics").text)
            samples = (sample for family in families for sample in family.samples)
            counts.append(
                sum(s.value for s in samples if s.name == "oarlock:key_requests_total" and s.labels["key"] == PROBE)
            )
        return counts

    def _goes_to(self, index, name, session):
        return self._server_of(name, session) == index

    def _server_of(self, name, session):
        before = self._answered()
        assert completion(self.proxies[name].url, PROBE, session, {"prompt": session, "max_tokens": 1}, False).complete
        after = eventually(lambda: self._answered() if self._answered() != before else None, 30, "it is counted")
        (index,) = [index for index in range(2) if after[index] > before[index]]
        return index

    def _sessions(self, name, count=24):
        """Sessions by server: those that the proxy gives to the first one, and those for the second."""
        found = [], []
        for number in range(count):
            session = f"{name}-{number}"
            found[self._server_of(name, session)].append(session)
        assert min(map(len, found)) >= 2, "both servers have sessions"
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    if all(why_missing(name) for name in PROGRAMS):
        pytest.skip("; ".join(filter(None, map(why_missing, PROGRAMS))))
    model = long_context_demo(tmp_path_factory.mktemp("long-context"))
    with Fleet(model, tmp_path_factory.mktemp("proxies")) as fleet:
        yield fleet


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_session_stays_with_the_server_that_has_its_beginning(fleet, name):
    url = fleet.proxy(name).url
    for session in (sessions[0] for sessions in fleet.sessions[name]):
        prompt, computed = f"# {session}\n", 0
        for turn in range(4):
            prompt += f"def function_{turn}(first, second):\n    return first + second\n" * 8
            ending = completion(url, PROBE, session, {"prompt": prompt, "max_tokens": 1}, turn % 2 == 0)
            assert ending.complete
            assert ending.cached_tokens >= computed - BLOCK, f"turn {turn} found less than the one before had computed"
            computed = ending.prompt_tokens


def test_sessions_that_stay_find_more_than_requests_in_turns(fleet, tmp_path):
    fleet.proxy("nginx")
    found = {}
    for policy in (BY_SESSION, ROUND_ROBIN):
        folder = tmp_path / policy.replace(" ", "-")
        folder.mkdir()
        ports = [server.port for server in fleet.servers]
        found[policy] = share_through_nginx(policy, folder, ports, PROBE, sessions=5, turns=4)
    assert found[BY_SESSION] > found[ROUND_ROBIN]


@pytest.mark.parametrize("name", PROGRAMS)
def test_tokens_pass_at_once_and_a_client_that_leaves_is_noticed(fleet, name):
    proxy = fleet.proxy(name)
    body = {"prompt": "import os\n", "stream": True, "max_tokens": LONG, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{proxy.url}/v1/completions", json=body, headers=headers(PROBE, "1"), timeout=60, trust_env=False
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert fleet.running(0) + fleet.running(1) == 1, "the first token is there while the others are computed"
    eventually(lambda: fleet.running(0) + fleet.running(1) == 0, 30, "the request is aborted")


@pytest.mark.parametrize("name", PROGRAMS)
def test_refusals_have_the_shape_of_the_servers(fleet, name):
    url = fleet.proxy(name).url
    body, key = {"prompt": "x" * (16 * 2**20)}, headers(PROBE, "1")
    large = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=60, trust_env=False)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
    for path in ("/metrics", "/admin/drain"):
        assert httpx.get(url + path, trust_env=False).status_code == 404


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_any_server_the_proxy_says_so_in_the_same_shape(name, tmp_path):
    if reason := why_missing(name):
        pytest.skip(reason)
    with Proxy(name, tmp_path, (9, 9)) as proxy:  # nothing listens there
        answer = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "x"}, timeout=60, trust_env=False)
    assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == "no_server"


@pytest.fixture(scope="module")
def restarted(fleet):
    """Endings of clients' requests while one server after another was restarted, by proxy."""
    loads = {
        name: Load(proxy.url, LOAD, [session for found in fleet.sessions[name] for session in found[:2]], ANSWER)
        for name, proxy in fleet.proxies.items()
    }
    with contextlib.ExitStack() as stack:
        for load in loads.values():
            stack.enter_context(load)
        for index in range(2):
            eventually(partial(fleet.running, index), 60, "requests run there")
            server = fleet.servers[index]
            assert server.stop(within_s=130) == 0, f"requests were lost\n{server.log}"
            fleet.start_again(index)
    return loads


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rolling_restart_under_load_loses_nothing(fleet, restarted, name):
    fleet.proxy(name)
    load = restarted[name]
    print(f"{name}: {len(load.endings)} requests, {len(load.lost)} lost")
    assert not load.lost
    assert len({ending.session for ending in load.endings}) == 4


@pytest.fixture(scope="module", params=["server", "engine"])
def killed(fleet, request):
    """(what was killed, and what clients of each proxy saw: a stream there, one elsewhere, a plain request there)."""
    if fleet.servers[0].process.poll() is not None:
        fleet.start_again(0)
    seen, before = {}, fleet.accepted(0)
    for name, proxy in fleet.proxies.items():
        doomed, other = (sessions[0] for sessions in fleet.sessions[name])
        streams = OpenStream(proxy, LONG, headers(PROBE, doomed)), OpenStream(proxy, SOME, headers(PROBE, other))
        seen[name] = doomed, *streams
    assert all(stream.flowing.wait(60) for _, *streams in seen.values() for stream in streams)
    with ThreadPoolExecutor() as pool:
        body = {"prompt": "x", "max_tokens": SOME, "ignore_eos": True}
        plain = {
            name: pool.submit(completion, fleet.proxies[name].url, PROBE, doomed, body, False)
            for name, (doomed, *_) in seen.items()
        }
        eventually(lambda: fleet.accepted(0) == before + 2 * len(seen), 30, "all are there")
        process = psutil.Process(fleet.servers[0].process.pid)
        (process if request.param == "server" else process.children()[0]).kill()
        endings = {name: future.result(300) for name, future in plain.items()}
    for _, *streams in seen.values():
        for stream in streams:
            stream.join(300)
    after = {
        name: completion(fleet.proxies[name].url, PROBE, doomed, {"prompt": "x", "max_tokens": 1}, True)
        for name, (doomed, *_) in seen.items()
    }
    fleet.servers[0].process.wait(60)
    return request.param, {name: (*seen[name][1:], endings[name], after[name]) for name in seen}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_server_that_is_killed_loses_its_own_streams_only(fleet, killed, name):
    fleet.proxy(name)
    victim, seen = killed
    lost, kept, plain, after = seen[name]
    if victim == "server":
        assert lost.failure is not None, "a stream that is cut ends as an error, not as a short answer"
    else:
        assert lost.last["error"]["code"] == "engine_dead"
    assert kept.done and kept.failure is None and "error" not in kept.last
    assert plain.complete, f"nothing of it had been sent, so the other server answers: {plain}"
    assert after.complete, f"the session goes on elsewhere: {after}"
