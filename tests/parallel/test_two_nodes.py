"""Rank processes of two nodes of this machine: they answer like one host's, and a lost one is named on both."""

import json
import os
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import pytest

from oarlock.workers.config import NodesConfig
from oarlock.workers.errors import WorkerError
from oarlock.workers.executor import Executor, start_executor
from oarlock.workers.python_child import start_python
from tests.e2e.running import eventually, free_port
from tests.golden.tiny_models import make_tiny
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_multiproc_executor import config_for, generate, step_of

PROMPT = [5, 9, 17, 3, 8, 21, 2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2")


@dataclass
class Group:
    head: Executor
    node: subprocess.Popen[bytes]
    stop_fd: int  # to write to
    left: list[int]  # signals that this process got
    log: Path

    def remote_ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.node.pid).children(recursive=True)


@contextmanager
def group_of(checkpoint: Path, log: Path, tp: int, pp: int) -> Generator[Group]:
    config = config_for(checkpoint, tensor_parallel_size=tp, pipeline_parallel_size=pp, nnodes=2, cpu_affinity="none")
    nodes = NodesConfig(0, 2, "127.0.0.1", free_port(), None, 60.0)
    stop_read, stop_write = os.pipe()
    words = [config.to_json(), json.dumps(asdict(replace(nodes, node_rank=1))), str(stop_read)]
    with log.open("wb") as file:
        node = start_python(["-m", "tests.parallel.node_of_group", *words], pass_fds=[stop_read], output=file.fileno())
    os.close(stop_read)
    left: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: left.append(number))
    try:
        head = start_executor(config, lambda *_: None, nodes=nodes, leave_pid=os.getpid())
        try:
            yield Group(head, node, stop_write, left, log)
        finally:
            head.close()
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(stop_write)
        node.kill()
        node.wait()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_nodes_answer_like_one_rank_and_end_in_order(checkpoint: Path, tmp_path: Path, tp: int, pp: int) -> None:
    """With two stages the rank that answers is on the other node. A node whose operator stops it serves on until the
    head ends all."""
    one = ThreadExecutor(config_for(checkpoint))
    expected, _ = generate(one, PROMPT, 12)
    one.close()
    descriptors = len(os.listdir("/proc/self/fd"))
    with group_of(checkpoint, tmp_path / "log", tp, pp) as group:
        group.head.ping()
        assert generate(group.head, PROMPT, 12)[0] == expected
        os.write(group.stop_fd, b"s")
        eventually(lambda: group.left, 60, "the operator's wish to stop arrives")
        assert generate(group.head, PROMPT, 12)[0] == expected
        ranks = group.remote_ranks()
        group.head.close()
        assert group.node.wait(60) == 0
        assert not any(rank.is_running() for rank in ranks)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_rank_that_is_killed_on_the_other_node_is_named_on_both(checkpoint: Path, tmp_path: Path) -> None:
    with group_of(checkpoint, tmp_path / "log", 2, 1) as group:
        generate(group.head, PROMPT, 2)
        (rank,) = group.remote_ranks()
        rank.send_signal(signal.SIGKILL)
        cause = r"rank 1 failed at step \d+: killed by signal 9 \(on node 1 "
        with pytest.raises(WorkerError, match=cause):
            for step_id in range(3, 100):
                group.head.submit(step_of(step_id, [1], 3))
                group.head.collect()
        group.head.close()
        assert group.node.wait(60) == 5
        assert "event=group_failed exit_code=5 cause='rank 1 failed at step" in group.log.read_text().replace('"', "'")
