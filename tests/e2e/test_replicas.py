"""Two replicas as a user runs them: prefixes are followed, a killed rank costs its own requests alone, and text is the
same on both.
"""

import contextlib
import json
import random
import socket
from collections import Counter
from pathlib import Path

import psutil
import pytest

from oarlock.workers.platform.processor import available_cores
from tests.e2e.block_reader import num_held, reading
from tests.e2e.long_context import LONG, long_context_demo
from tests.e2e.open_stream import OpenStream
from tests.e2e.running import DEMO, ROOT, RunningServer, eventually

pytestmark = [pytest.mark.slow, pytest.mark.soak]


def counted(server: RunningServer, metric: str) -> dict[str, float]:
    """Values of a metric by the label of the engine."""
    return {name: own[metric] for name, own in server.metrics_by_engine().items() if metric in own}


def free_neighbours(count: int) -> int:
    """The first of so many neighbouring ports that are free at this moment, below those that clients are given."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(count):
                stack.enter_context(socket.socket()).bind(("", port + number))
            return port


def test_a_killed_rank_costs_its_own_streams_alone_and_its_replica_comes_back(tmp_path):
    model = long_context_demo(tmp_path)
    with RunningServer(model, "-dp", 2, "--drain-timeout", 1) as server:
        engines = [
            child for child in psutil.Process(server.process.pid).children() if "oarlock.engine.core" in child.cmdline()
        ]
        assert len(engines) == 2 and "on each of 2 replicas" in server.log
        streams = [OpenStream(server, LONG) for _ in range(4)]
        for stream in streams:
            assert stream.flowing.wait(60), server.log
        assert counted(server, "vllm:num_requests_running") == {"0": 2, "1": 2}
        engines[0].children()[0].kill()
        eventually(lambda: sum(stream.done for stream in streams) == 2, 60, f"two streams end\n{server.log}")
        lost = [stream for stream in streams if stream.done]
        assert [stream.last["error"]["code"] for stream in lost] == ["replica_lost"] * 2
        others = [(stream, stream.last) for stream in streams if stream not in lost]
        assert server.client.get("/health").status_code == 200
        eventually(lambda: server.client.get("/health").json()["status"] == "ok", 120, f"it is back\n{server.log}")
        assert counted(server, "oarlock:engine_up") == {"0": 1, "1": 1}
        for stream, before in others:
            eventually(lambda stream=stream, before=before: stream.last is not before, 60, "it goes on")
            assert stream.is_alive() and "error" not in stream.last, "the others notice nothing"
        body = {"prompt": "def f(x):\n", "max_tokens": 20, "temperature": 0}
        texts = Counter()
        for _ in range(4):
            texts[server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]] += 1
        assert len(texts) == 1, "on whichever replica"
        assert min(counted(server, "oarlock:requests_accepted_total").values()) >= 1


def test_groups_stay_where_their_beginnings_are():
    with RunningServer(None, "-dp", 2) as server:
        beginnings = [f"# part {group}\n" + "import os\nprint(os.name)\n" * 30 for group in range(4)]
        cached = []
        for number in range(16):
            prompt = f"{beginnings[number % 4]}x = {number}\n"
            answer = server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert min(cached[4:]) > 100 and max(cached[:4]) < 100
        assert counted(server, "oarlock:requests_accepted_total") == {"0": 8, "1": 8}


def with_four_cores(folder: Path) -> dict[str, str]:
    """The environment of a server that takes the machine for one with four cores, where it has fewer: what follows is
    about ranks and not about speed."""
    if available_cores() < 4:
        lines = "from oarlock.workers.platform import processor\n\nprocessor.available_cores = lambda: 4\n"
        (folder / "sitecustomize.py").write_text(lines)
    return {"PYTHONPATH": f"{ROOT}:{folder}"}


def test_two_replicas_of_two_ranks_each_tell_what_their_caches_have(tmp_path):
    """Each on its own port, and requests go where the header says."""
    port, topic, size = free_neighbours(4), "kv@pod-1@demo", 16
    replay = port + 2
    config = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}", "topic": topic}
    config["enable_kv_cache_events"] = True
    flags = ("-dp", 2, "-tp", 2, "--block-size", size, "--kv-events-config", json.dumps(config))
    prompts = {rank: f"# part {rank}\n" + "import os\nprint(os.name)\n" * 20 for rank in (0, 1)}
    with RunningServer(DEMO, *flags, env=with_four_cores(tmp_path)) as server, contextlib.ExitStack() as stack:
        engines = [
            child for child in psutil.Process(server.process.pid).children() if "oarlock.engine.core" in child.cmdline()
        ]
        ranks = [[rank for rank in one.children() if "worker_process" in str(rank.cmdline())] for one in engines]
        assert [len(own) for own in ranks] == [2, 2]
        host = "tcp://127.0.0.1"
        each = [reading(f"{host}:{port + rank}", f"{host}:{replay + rank}", topic, rank) for rank in (0, 1)]
        readers = [stack.enter_context(one) for one in each]

        def ask(prompt: str, rank: int) -> dict:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            answer = server.client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})
            assert answer.status_code == 200, answer.text
            return answer.json()

        for rank in (0, 1, 1):
            ask(prompts[rank], rank)
        assert counted(server, "oarlock:requests_accepted_total") == {"0": 1, "1": 2}
        tokens = [server.client.post("/tokenize", json={"prompt": prompts[rank]}).json()["tokens"] for rank in (0, 1)]
        known = [reader.known(server) for reader in readers]
        for rank, found in enumerate(known):
            assert (found["lost"], found["ranks"], found["topics"]) == (0, [rank], [topic])
            assert num_held(found["blocks"], tokens[rank], size) == len(tokens[rank]) // size > 5
            assert num_held(found["blocks"], tokens[1 - rank], size) == 0, "the other's"
        # What a router does with it: it sends a prompt to the one that has its beginning.
        longer = prompts[1] + "x = 1\n"
        there, elsewhere = ask(longer, 1), ask(longer, 0)
        assert there["choices"][0]["text"] == elsewhere["choices"][0]["text"]
        cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (there, elsewhere)]
        assert cached == [len(tokens[1]) // size * size, 0]
