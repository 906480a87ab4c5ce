"""After many clients have left mid-answer nothing is kept: no block, no descriptor, no task, no thread."""

import asyncio
import os
import signal

import pytest

from tests.e2e.running import DEMO, RunningServer, eventually
from tests.e2e.storm import storm

# KV memory for about 2,000 tokens: far less than 32 clients want, so that sequences are preempted as well.
FLAGS = ("--max-model-len", 512, "--kv-cache-memory", "16MiB", "--block-size", 16, "--max-num-seqs", 16)
SECONDS = float(os.environ.get("SOAK_SECONDS", "5"))  # of the longer form; `make soak` takes a minute


def descriptors(server):
    return {process.pid: process.num_fds() for process in server.processes()}


def threads(server):
    return {process.pid: process.num_threads() for process in server.processes()}


def tasks(server, file):
    """Number of tasks in the server's event loop."""
    file.unlink(missing_ok=True)
    server.send(signal.SIGUSR1)
    return int(eventually(lambda: file.exists() and file.read_text(), 60, "the server counts its tasks"))


def counted(tmp_path, *flags):
    """A server that can be asked for its tasks, and the file where it writes them."""
    file = tmp_path / "tasks"
    env = {"COUNTED_TASKS_FILE": str(file)}
    return RunningServer(DEMO, *FLAGS, *flags, env=env, module="tests.e2e.counted"), file


def idle(server):
    """The figures, once nothing runs or waits any more."""
    figures = server.metrics()
    running, waiting = figures["vllm:num_requests_running"], figures["vllm:num_requests_waiting"]
    return figures if running == waiting == 0 else None


def check_nothing_is_kept(server, file, seconds):
    """Let many clients disconnect, and check everything that must hold after them."""
    asyncio.run(storm(server.url, 0, seed=1, num_alone=1))  # warm: thread pools and connections have their usual size
    eventually(lambda: idle(server), 60, "the warm-up's requests are over")
    before_descriptors, before_threads = descriptors(server), threads(server)
    before_tasks = tasks(server, file)

    ends = asyncio.run(storm(server.url, seconds))
    assert ends["finished"] > 10
    assert ends["left"] > 10
    assert ends["same"] > 5

    after = eventually(lambda: idle(server), 60, "nothing runs or waits")
    blocks = after["oarlock:kv_blocks_total"]
    assert after["oarlock:kv_blocks_free"] + after["oarlock:kv_blocks_cached"] == blocks > 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    eventually(lambda: tasks(server, file) <= before_tasks, 60, f"no more tasks than before: {before_tasks}")
    eventually(lambda: descriptors(server) == before_descriptors, 60, f"descriptors as before: {before_descriptors}")
    after_threads = threads(server)
    assert after_threads.keys() == before_threads.keys()
    # Pools grow up to their size; a thread kept for each of hundreds of requests would be more.
    assert all(after_threads[pid] <= count + 4 for pid, count in before_threads.items())
    # Every block can be handed out again: a request that needs the whole context fits.
    assert server.complete([7] * 400, max_tokens=112, ignore_eos=True)["usage"]["completion_tokens"] == 112
    return ends


def test_disconnects(tmp_path):
    server, file = counted(tmp_path, "--async-scheduling")
    with server:
        check_nothing_is_kept(server, file, seconds=1)


@pytest.mark.soak
@pytest.mark.timeout(600 + SECONDS)
@pytest.mark.parametrize(("ranks", "scheduling"), [(1, "--no-async-scheduling"), (2, "--async-scheduling")])
def test_disconnects_for_long(ranks, scheduling, tmp_path):
    server, file = counted(tmp_path, "-tp", ranks, scheduling)
    with server:
        print(check_nothing_is_kept(server, file, seconds=SECONDS))
