"""Index of a replica's cache that a router keeps from KV events alone: the process of `kv_event_reader.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.e2e.running import READY_WITHIN_S, ROOT, RunningServer, eventually

_SCRIPT = ROOT / "tests" / "unit" / "engine" / "kv_cache" / "kv_event_reader.py"


class BlockReader:
    """Reads the KV events that one replica publishes."""

    def __init__(self, process: subprocess.Popen[str], replica: int) -> None:
        self._process = process
        self._replica = str(replica)

    def known(self, server: RunningServer) -> dict:
        """All blocks it knows, once they are as many as the pool has cached. Nothing may run meanwhile."""
        return eventually(lambda: self._compared(server), READY_WITHIN_S, "the reader has as many blocks as the pool")

    def _compared(self, server: RunningServer) -> dict | None:
        numbers = server.metrics_by_engine()[self._replica]
        assert self._process.stdin is not None and self._process.stdout is not None
        print(int(numbers["oarlock:kv_event_batches_total"]), file=self._process.stdin, flush=True)
        found = json.loads(self._process.stdout.readline())
        return found if len(found["blocks"]) == numbers["oarlock:kv_blocks_cached"] else None


@contextmanager
def reading(endpoint: str, replay_endpoint: str, topic: str, replica: int = 0) -> Iterator[BlockReader]:
    command = [sys.executable, str(_SCRIPT), endpoint, replay_endpoint, topic]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield BlockReader(process, replica)
    finally:
        process.kill()
        process.communicate()


def num_held(blocks: dict[str, dict], tokens: Sequence[int], block_size: int) -> int:
    """Number of leading blocks of a prompt among `blocks`, found by their tokens."""
    children = {(one["parent"], tuple(one["token_ids"])): int(name) for name, one in blocks.items()}
    count, parent = 0, None
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = (parent, tuple(tokens[start : start + block_size]))
        if key not in children:
            break
        parent, count = children[key], count + 1
    return count
