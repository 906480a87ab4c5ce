"""The engine's own limits, and the workers' configuration that it passes on. Frozen after the start."""

import json
from dataclasses import asdict, dataclass

from workers.config import WorkerConfig

__all__ = ["EngineConfig", "WorkerConfig"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of scheduling. The sizes that ranks must agree on live in `worker`."""

    worker: WorkerConfig
    enable_prefix_caching: bool = True
    max_waiting_requests: int = 512  # beyond: QueueFullError
    max_waiting_tokens: int = 1_000_000  # prompt tokens in the queue; beyond: QueueFullError
    max_step_s: float | None = None  # of a step in which answers go on; None: a few times one without prompts
    heartbeat_interval_s: float = 2.0  # how often an idle engine checks that every rank answers
    pipeline_depth: int | None = None  # steps in flight at most; 2: each is scheduled while the one before runs.
    # None: what is fastest with these ranks on this machine
    inline_single_rank: bool = True  # with one rank, run it inside the engine process
    record_path: str | None = None  # a new file that gets every step and answer; None: nothing is recorded
    record_limit_bytes: int | None = None  # recording stops there, serving goes on; None: when the disk is full

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "EngineConfig":
        fields = json.loads(text)
        return EngineConfig(worker=WorkerConfig(**fields.pop("worker")), **fields)
