"""The limits of a step, and the memory of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.server.config import kv_events, speculative
from oarlock.server.config.options import option

_GROUP = "Scheduling and memory"


@dataclass(frozen=True)
class SchedulingSettings:
    """Options of the group `Scheduling and memory`."""

    max_num_seqs: int = option(
        64, group=_GROUP, example="32", minimum=1, maximum=4096, help="sequences that run at the same time"
    )
    max_num_batched_tokens: int | None = option(
        None,
        group=_GROUP,
        example="4096",
        minimum=16,
        maximum=2**20,
        is_count=True,
        help="tokens of one step, prompts included; without it 2048, or fewer where such a step is measured to take "
        "more than 3 seconds",
    )
    max_step_ms: float | None = option(
        None,
        group=_GROUP,
        example="60",
        minimum=1,
        maximum=600_000,
        help="milliseconds of a step while answers are under way: prompts are computed in chunks that fit (default: "
        "2.5 times a step without prompts, as measured)",
    )
    async_scheduling: bool | None = option(
        None,
        group=_GROUP,
        example="",
        help="schedule each step while the one before runs (default: where the engine has a core besides the ranks')",
    )
    max_waiting_requests: int = option(
        512,
        group=_GROUP,
        example="1024",
        minimum=1,
        maximum=2**20,
        help="requests that may wait; beyond: 429 with Retry-After",
    )
    block_size: int = option(32, group=_GROUP, example="16", minimum=1, maximum=1024, help="tokens in one KV block")
    kv_cache_memory: int | None = option(
        None,
        group=_GROUP,
        example="2GiB",
        is_bytes=True,
        minimum=2**16,
        maximum=2**50,
        help="KV memory of each rank (default: measured)",
    )
    kv_cache_dtype: str = option(
        "auto",
        group=_GROUP,
        example="int8",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
        help="round keys and values as they are stored: int8 or fp8 (e4m3), about half of bfloat16's memory",
    )
    kv_offload_memory: int | None = option(
        None,
        unset="none",
        group=_GROUP,
        example="8GiB",
        is_bytes=True,
        minimum=2**16,
        maximum=2**50,
        help="host memory of each rank for KV blocks that its pool evicts (default: none, or 1GiB with "
        "--kv-offload-path)",
    )
    kv_offload_path: str | None = option(
        None,
        group=_GROUP,
        example="/var/cache/oarlock/kv",
        help="directory for files of KV blocks that the pool evicts: they outlive a restart, and replicas on this host "
        "may share them. They hold what users' prompts were computed to (docs/replicas.md)",
    )
    kv_offload_disk: int | None = option(
        None,
        group=_GROUP,
        example="200GiB",
        is_bytes=True,
        minimum=2**20,
        maximum=2**60,
        help="what all files in --kv-offload-path may take; those not used for the longest time are removed (default: "
        "half of what is free)",
    )
    gpu_memory_utilization: float = option(
        0.9, group=_GROUP, example="0.8", minimum=0.05, maximum=0.99, help="share of a GPU's memory to use"
    )
    enable_prefix_caching: bool = option(
        True, group=_GROUP, example="", help="keep KV blocks of shared prompt beginnings"
    )
    speculative_config: str | None = option(
        None,
        group=_GROUP,
        example=speculative.EXAMPLE,
        is_json=True,
        help="draft tokens by looking up the last ones in the request's own text; several are checked in one step; "
        "keys: method (ngram), num_speculative_tokens, prompt_lookup_max, prompt_lookup_min (default: no drafts)",
    )
    kv_events_config: str | None = option(
        None,
        group=_GROUP,
        example=kv_events.EXAMPLE,
        is_json=True,
        help="publish what enters and leaves the prefix cache over ZMQ, as vLLM does; keys: enable_kv_cache_events, "
        "publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic (default: nothing)",
    )
