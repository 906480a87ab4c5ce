"""Counters, gauges and histograms of the engine as plain data, which is sent to the server.

The server names and formats them for Prometheus. Does not know a clock.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from typing import TypedDict

from oarlock.engine.types import FinishReason

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_SECONDS += (20.0, 40.0, 80.0)
_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
_SHORT_SECONDS += (0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


@dataclass(slots=True)
class Histogram:
    """Counts per bucket: `counts[i]` counts values <= `bounds[i]`, the last entry all larger values. Not cumulative."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.bounds = tuple(self.bounds)
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, seen `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.count += times


MAX_ADAPTER_LABELS = 64  # names of LoRA adapters with counts of their own; all later names share one
OTHER_ADAPTERS = "other adapters"
AWAITS_LOAD, AWAITS_SLOT = "load", "slot"  # memory of the ranks that a request waits for, as its history names it


@dataclass(slots=True)
class EngineStats:
    """Statistics of one engine since its start. Gauges are set when a snapshot is taken, counters only grow."""

    state: str = "ready"  # ready | dead
    uptime_s: float = 0.0
    step_id: int = 0  # the last step that was begun
    # gauges
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_cache_usage: float = 0.0  # 0..1, share of blocks that running requests hold
    num_blocks_total: int = 0  # excludes the null block
    num_blocks_free: int = 0  # blocks without content
    num_blocks_cached: int = 0  # held by no request, kept for prefix hits, evicted when needed
    num_blocks_held: int = 0
    # Gauges of models with recurrent layers: slots that each hold the state of one sequence after some of its tokens.
    num_state_slots_total: int = 0  # excludes the null slot
    num_state_slots_held: int = 0  # two for each running request
    num_state_checkpoints: int = 0  # states kept for prefix hits, evicted when needed
    # Gauges of the tiers below the pool. Blocks that are also in the pool are counted.
    num_requests_loading: int = 0  # waiting requests that wait for files to be read
    kv_offload_host_blocks: int = 0
    kv_offload_host_blocks_total: int = 0  # blocks that fit into host memory
    kv_offload_disk_blocks: int = 0  # files, of all models and processes that share the directory
    kv_offload_disk_bytes: int = 0
    kv_offload_disk_bytes_total: int = 0  # bytes that files may take
    # Gauges of LoRA adapters.
    num_adapters: int = 0  # names
    num_adapters_loaded: int = 0  # adapters in host memory
    num_adapters_in_slots: int = 0
    num_requests_waiting_for_adapter: int = 0  # waiting requests whose adapter is not loaded or has no slot
    # Names of adapters of running requests, and of requests that wait for their adapter; at most `MAX_ADAPTER_LABELS`.
    running_adapters: list[str] = field(default_factory=list)
    waiting_adapters: list[str] = field(default_factory=list)
    # counters
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    prompt_tokens: int = 0
    generation_tokens: int = 0
    kv_offload_saved_blocks: int = 0  # pool -> host memory
    kv_offload_loaded_blocks: int = 0  # host memory -> pool
    kv_offload_hit_tokens: int = 0  # tokens of the loaded blocks
    kv_offload_written_blocks: int = 0  # host memory -> files
    kv_offload_read_blocks: int = 0  # files -> host memory
    kv_offload_failed_blocks: int = 0  # failed writes and reads: files missing or damaged, no room, no response
    kv_offload_dropped_blocks: int = 0  # evicted without being saved or written, for lack of slots or time
    num_preemptions: int = 0
    # steps refused by the ranks for lack of memory; steps submitted after a refused step are not counted
    num_refused_steps: int = 0
    num_drafts: int = 0  # rows of steps that had drafted tokens after their newest token
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0  # drafted tokens for which the model sampled the same
    num_accepted: int = 0
    num_rejected: int = 0  # refused: request at fault (400) or queue full (429)
    num_errors: int = 0  # requests that failed through the engine's fault
    num_nonfinite: int = 0  # errors in which the model's logits were not finite
    num_kv_event_batches: int = 0  # batches that were published
    num_kv_event_batches_dropped: int = 0  # batches not encoded, since too many were waiting
    num_kv_event_overflows: int = 0  # times that a subscriber fell too far behind, and missed batches until it read
    num_adapter_loads: int = 0  # disk -> host memory
    num_adapter_failures: int = 0
    num_adapter_puts: int = 0  # host memory -> slot
    num_adapter_evictions: int = 0  # adapters that left host memory for others
    # Name of an adapter -> its requests that have ended, their prompt tokens and generated tokens; at most
    # `MAX_ADAPTER_LABELS` names, and `OTHER_ADAPTERS`.
    by_adapter: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    # histograms
    queue_time_s: Histogram = field(default_factory=partial(Histogram, _LONG_SECONDS))
    adapter_wait_s: Histogram = field(
        default_factory=partial(Histogram, _LONG_SECONDS)
    )  # only requests with an adapter
    time_to_first_token_s: Histogram = field(default_factory=partial(Histogram, _SECONDS))
    prefill_time_s: Histogram = field(default_factory=partial(Histogram, _LONG_SECONDS))
    decode_time_s: Histogram = field(default_factory=partial(Histogram, _LONG_SECONDS))
    e2e_latency_s: Histogram = field(default_factory=partial(Histogram, _LONG_SECONDS))
    inter_token_latency_s: Histogram = field(default_factory=partial(Histogram, _SHORT_SECONDS))
    time_per_output_token_s: Histogram = field(
        default_factory=partial(Histogram, _SHORT_SECONDS)
    )  # mean of one request after its first token
    step_time_s: Histogram = field(default_factory=partial(Histogram, _SHORT_SECONDS))
    iteration_tokens: Histogram = field(default_factory=partial(Histogram, _ITERATION_TOKENS))
    request_prompt_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    request_generation_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))


# -- the live state of one engine, in the format in which it is sent


class KvState(TypedDict):
    """Live state of the pools of KV blocks: totals of all memory groups."""

    block_size: int  # tokens
    total: int  # blocks, without the null block
    held: int
    cached: int
    free: int
    cells_of: int  # blocks in one cell of the map, which shows the first of them
    map: str  # runs of cells in the order of groups and blocks: `h12c40f2000` - held, cached, free


class RankTimes(TypedDict):
    """Time that one rank works on a step."""

    rank: int
    last_ms: float
    median_ms: float


class StepTimesState(TypedDict):
    """Times of the last 512 steps, from the moment at which a step could begin to its output."""

    count: int  # steps since the start
    last_ms: float
    median_ms: float
    p99_ms: float
    ranks: list[RankTimes]


class TokenRates(TypedDict):
    """Tokens per second over about ten seconds: computed prompt tokens, without cached tokens, and sampled tokens."""

    prompt: float
    generation: float


class AdapterUse(TypedDict):
    """Name of a LoRA adapter, the memory that contains the adapter, and its requests."""

    name: str
    state: str  # on_disk | loading | ready: in host memory
    slot: int  # 0: in none
    running: int
    waiting: int


class AdaptersState(TypedDict):
    """LoRA adapters of one engine."""

    slots: int  # adapters that one step can compute with
    in_slots: int
    host_limit: int  # adapters that fit into host memory
    in_host_memory: int
    names: int
    waiting: int  # requests that wait for their adapter to be loaded, or for a slot
    shown: list[AdapterUse]  # adapters in slots, then others with requests, then all others; at most MAX_ADAPTER_LABELS


class OpenRequest(TypedDict):
    """Choice of a request that waits or runs."""

    request_id: int
    state: str  # waiting | running
    adapter: str | None
    age_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class EngineState(TypedDict):
    """Live state of one engine."""

    running: int
    waiting: int
    kv: KvState
    step: StepTimesState
    tokens_per_second: TokenRates
    adapters: AdaptersState | None  # None: no LoRA adapters are served
    slowest: list[OpenRequest]  # the oldest open requests, at most 20


# -- the history of one request, in the format in which it is sent. Times are in seconds of `time.monotonic`


class Chunk(TypedDict):
    """Part of a prompt that one step computed."""

    at_s: float
    step: int
    tokens: int
    beside: int  # sequences that decoded in the same step


class DecodeSteps(TypedDict):
    """The engine's steps that followed the first token."""

    steps: int
    mean_sequences: float
    prompt_tokens: int  # prompt tokens of other requests computed in these steps
    seconds: float
    by_sequences: dict[str, int]  # steps by their number of sequences: `1`, `2-3`, `4-7`, ...


class Preemption(TypedDict):
    """Preemption of a request: it gave up its blocks, and its tokens were computed again later."""

    at_s: float
    back_s: float | None  # None: it does not run again yet
    is_short: bool  # there were too few blocks; otherwise it yielded, or another client had less than its share


class AdapterWait(TypedDict):
    """Time in which a request waited for its LoRA adapter."""

    awaited: str  # load: until the adapter is in host memory | slot: until a slot is free
    at_s: float
    end_s: float | None  # None: it still waits


class AdapterHistory(TypedDict):
    """Waits of a request for its LoRA adapter."""

    name: str
    load_s: float  # seconds of all waits that have ended
    slot_s: float
    waits: list[AdapterWait]  # the first ones


class StallState(TypedDict):
    """Pause in which no request got a token."""

    kind: str  # step | pause | memory
    begun_s: float
    seconds: float
    num_sequences: int
    num_prompt_tokens: int


class RequestHistory(TypedDict):
    """History of one request in the engine."""

    request_id: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrival_s: float
    num_running: int  # other running requests when it arrived
    num_waiting: int
    queue_position: int | None  # requests ahead of it now; None: it does not wait
    ahead: list[int]  # ids of the first few requests that waited when it arrived, or of running requests if none waited
    without_row: int  # steps, while it waited, in which the head of the queue found no free row
    without_blocks: int  # steps, while it waited, in which the head of the queue found too few KV blocks
    adapter: AdapterHistory | None
    first_scheduled_s: float | None
    num_chunks: int
    computed_tokens: int  # tokens of the prompt, and tokens generated before a preemption
    chunks: list[Chunk]  # the first ones
    first_token_s: float | None
    decode: DecodeSteps | None
    num_preemptions: int
    preemptions: list[Preemption]  # the first ones
    stalls: list[StallState]  # the last ones
    end_s: float | None
    reason: str | None
