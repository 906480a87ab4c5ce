"""After many clients have left mid-answer neither host keeps anything: no block, no descriptor, no thread, no process.

`SOAK_SECONDS` is how long they come, with ranks and with stages; else they come a few seconds, with stages.
"""

import asyncio
import os

import pytest

from tests.e2e.running import DEMO, eventually
from tests.e2e.storm import storm
from tests.multihost.group import Group
from tests.multihost.hosts import Hosts

SECONDS = float(os.environ.get("SOAK_SECONDS", "3"))
SIZES = ("-tp", "-pp") if "SOAK_SECONDS" in os.environ else ("-pp",)
# KV memory for less than the clients want, so that sequences are preempted as well.
FLAGS = ("--max-model-len", 512, "--kv-cache-memory", "8MiB", "--block-size", 16, "--max-num-seqs", 16)


def held(group):
    """Numbers of descriptors and threads of each process of both hosts."""
    found = [process for server in group.servers for process in server.processes()]
    return {process.pid: (process.num_fds(), process.num_threads()) for process in found}


def idle(server):
    """Metrics of the server once nothing runs or waits any more, else None."""
    figures = server.metrics()
    running, waiting = figures["vllm:num_requests_running"], figures["vllm:num_requests_waiting"]
    return figures if running == waiting == 0 else None


@pytest.mark.soak
@pytest.mark.timeout(60 + 2 * SECONDS + 300)
@pytest.mark.parametrize("size", SIZES)
def test_clients_that_leave_cost_no_host_anything(size):
    with Hosts("loopback") as hosts, Group(hosts, DEMO, *FLAGS, size, 2) as group:
        asyncio.run(
            storm(group.head.url, 0, seed=1, num_alone=1)
        )  # warm: pools of threads and connections have their usual size
        eventually(lambda: idle(group.head), 60, "the warm-up's requests are over")
        before = held(group)
        ends = asyncio.run(storm(group.head.url, SECONDS))
        assert min(ends["finished"], ends["left"], ends["same"]) > 3, ends
        after = eventually(lambda: idle(group.head), 60, "nothing runs or waits")
        blocks = after["oarlock:kv_blocks_total"]
        assert after["oarlock:kv_blocks_free"] + after["oarlock:kv_blocks_cached"] == blocks > 0
        assert held(group).keys() == before.keys(), "the same processes"

        def has_no_more():
            return all(
                fds <= before[pid][0] and threads <= before[pid][1] + 4 for pid, (fds, threads) in held(group).items()
            )

        eventually(has_no_more, 60, f"descriptors and threads as before: {before}, {held(group)}")
        # Every block can be handed out again: a request that needs the whole context fits.
        whole = group.head.complete([7] * 400, max_tokens=112, ignore_eos=True)
        assert whole["usage"]["completion_tokens"] == 112
        group.head.stop()
        assert group.statuses(30) == [0, 0], group.logs
