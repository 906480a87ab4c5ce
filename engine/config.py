"""Configuration of the engine, and of the workers, to which it is passed on. Frozen after the start."""

import json
from dataclasses import asdict, dataclass, replace

from oarlock.workers.config import NodesConfig, WorkerConfig


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Drafting by lookup of the last tokens (n-grams) in a sequence's own prompt and response."""

    num_speculative_tokens: int  # most drafts of one sequence in a step
    prompt_lookup_max: int  # most tokens that are looked up
    prompt_lookup_min: int  # least tokens that are looked up


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Publication of prefix-cache events: addresses, and the number of batches that are kept."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None  # None: no batch is repeated
    buffer_steps: int = 10_000  # batches that can be repeated
    hwm: int = 100_000  # batches that wait for one subscriber; further batches are dropped for it
    max_queue_size: int = 100_000  # batches that wait to be encoded; further batches are dropped
    topic: str = ""
    has_key_in_salts: bool = False  # the part of a salt before its first `|` names an API key and is not published

    @property
    def is_bound(self) -> bool:
        """Whether the endpoint is bound, by vLLM's rule: if it has a wildcard or a file. Others are connected to."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")

    @staticmethod
    def of_rank(endpoint: str, rank: int) -> str:
        """Return the address of replica `rank`: the rank is added to the port, or appended to the file's name."""
        before, _, last = endpoint.rpartition(":")
        if not rank or last in ("0", "*"):
            return endpoint
        return f"{before}:{int(last) + rank}" if endpoint.startswith("tcp://") else f"{endpoint}_dp{rank}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of scheduling. Sizes that all ranks must agree on are in `worker`."""

    worker: WorkerConfig
    nodes: NodesConfig | None = None  # None: all ranks are on this host
    tokenizer_path: str | None = None  # directory of the tokenizer for grammars; None: the model's
    writes_text: bool = True  # False: all requests want vectors, and no grammars are compiled
    enable_prefix_caching: bool = True
    max_waiting_requests: int = 512  # if more would wait, QueueFullError
    max_waiting_tokens: int = 1_000_000  # prompt tokens in the queue; if more would wait, QueueFullError
    # time limit of a step that contains decodes; None: a few times the time of a decode-only step
    max_step_s: float | None = None
    heartbeat_interval_s: float = 2.0  # interval at which an idle engine checks that every rank responds
    pipeline_depth: int | None = None  # most steps in flight; 2: each is scheduled while the previous runs.
    # None: the fastest depth with these ranks on this machine
    speculative: SpeculativeConfig | None = None  # None: no drafts
    kv_events: KvEventsConfig | None = None  # None: nothing is published
    reports_blocks: bool = False  # whether changes of the prefix cache are reported to the frontend
    record_path: str | None = None  # new file for every step and its output; None: nothing is recorded
    # recording stops at this size, serving continues; None: when the disk is full
    record_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        drafts = 0 if self.speculative is None else self.speculative.num_speculative_tokens
        assert drafts <= self.worker.num_speculative_tokens, "steps have no room for so many drafts"

    @property
    def num_micro_batches(self) -> int:
        """Most steps of different sequences in flight: one per pipeline stage. 1: a step holds all sequences."""
        return 1 if self.pipeline_depth == 1 else self.worker.pipeline_parallel_size

    @property
    def num_replicas(self) -> int:
        return self.worker.data_parallel_size

    def of_replica(self, number: int, host_free_bytes: int) -> "EngineConfig":
        """Return the configuration of replica `number`, if there are several. Each records into a separate file.

        `host_free_bytes`: free memory of the host before any replica was started.
        """
        worker = self.worker.with_(data_parallel_rank=number, host_free_bytes=host_free_bytes)
        path = None if self.record_path is None else f"{self.record_path}.{number}"
        return replace(self, worker=worker, record_path=path, reports_blocks=self.enable_prefix_caching)

    def to_json(self) -> str:
        """Serialize the configuration for the engine's socket."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "EngineConfig":
        fields = json.loads(text)
        worker, drafts, nodes = WorkerConfig(**fields.pop("worker")), fields.pop("speculative"), fields.pop("nodes")
        kv_events = fields.pop("kv_events")
        return EngineConfig(
            worker,
            kv_events=None if kv_events is None else KvEventsConfig(**kv_events),
            nodes=None if nodes is None else NodesConfig(**nodes),
            speculative=None if drafts is None else SpeculativeConfig(**drafts),
            **fields,
        )
