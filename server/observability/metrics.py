"""Text exposition for Prometheus: the engine's metrics under vLLM's names if it has them, and the HTTP layer's own.

Label values come from closed sets; names of LoRA adapters from at most `MAX_ADAPTER_LABELS` for each replica.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from oarlock.engine.stats import TOKEN_BOUNDS, EngineStats, Histogram
from oarlock.engine.types import EngineInfo

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
_LABELS = ["model_name", "engine"]
_PROCESS = ProcessCollector(registry=None)  # type: ignore[arg-type] # process_*: of the process that serves HTTP
_COMPLETE = ("stop", "length")
_PREFIX = "vllm:"
BATCH_STATUSES = (
    "validating", "in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired", "failed",
)  # fmt: skip
_GAUGES = {
    "vllm:num_requests_running": ("num_requests_running", "Requests in the running batch."),
    "vllm:num_requests_waiting": ("num_requests_waiting", "Requests waiting to run."),
    "vllm:kv_cache_usage_perc": ("kv_cache_usage", "Fraction of KV blocks in use, 0 to 1."),
    "vllm:gpu_cache_usage_perc": ("kv_cache_usage", "Former name of vllm:kv_cache_usage_perc."),
    "oarlock:num_waiting_tokens": ("num_waiting_tokens", "Prompt tokens of waiting requests."),
    "oarlock:kv_blocks_total": ("num_blocks_total", "KV blocks that can be allocated."),
    "oarlock:kv_blocks_free": ("num_blocks_free", "KV blocks without cached content."),
    "oarlock:kv_blocks_cached": ("num_blocks_cached", "KV blocks cached for prefix hits."),
    "oarlock:kv_blocks_held": ("num_blocks_held", "KV blocks of running requests."),
    "oarlock:state_slots_total": ("num_state_slots_total", "Slots of recurrent state that can be allocated."),
    "oarlock:state_slots_held": ("num_state_slots_held", "Slots of recurrent state of running requests."),
    "oarlock:state_checkpoints": ("num_state_checkpoints", "Recurrent states kept for prefix hits."),
    "oarlock:num_requests_loading": ("num_requests_loading", "Waiting requests whose KV blocks are being loaded."),
    "oarlock:kv_offload_host_blocks": ("kv_offload_host_blocks", "KV blocks stored in host memory."),
    "oarlock:kv_offload_host_blocks_limit": ("kv_offload_host_blocks_total", "Capacity of host memory in KV blocks."),
    "oarlock:kv_offload_disk_blocks": ("kv_offload_disk_blocks", "Files of KV blocks, of all users of the directory."),
    "oarlock:kv_offload_disk_bytes": ("kv_offload_disk_bytes", "Bytes of these files."),
    "oarlock:kv_offload_disk_bytes_limit": ("kv_offload_disk_bytes_total", "Limit of the bytes of these files."),
    "oarlock:adapters": ("num_adapters", "Names of LoRA adapters."),
    "oarlock:adapters_in_host_memory": ("num_adapters_loaded", "LoRA adapters in host memory."),
    "oarlock:adapters_in_slots": ("num_adapters_in_slots", "LoRA adapters in slots of device memory."),
    "oarlock:num_requests_waiting_for_adapter": (
        "num_requests_waiting_for_adapter",
        "Waiting requests whose LoRA adapter is not loaded or has no slot.",
    ),
}
_COUNTERS = {
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "vllm:gpu_prefix_cache_queries": ("prefix_cache_queries", "Former name of vllm:prefix_cache_queries."),
    "vllm:gpu_prefix_cache_hits": ("prefix_cache_hits", "Former name of vllm:prefix_cache_hits."),
    "oarlock:kv_offload_saved_blocks": ("kv_offload_saved_blocks", "KV blocks copied to host memory."),
    "oarlock:kv_offload_loaded_blocks": ("kv_offload_loaded_blocks", "KV blocks copied back into the pool."),
    "oarlock:kv_offload_hit_tokens": ("kv_offload_hit_tokens", "Tokens of these blocks, which were not recomputed."),
    "oarlock:kv_offload_written_blocks": ("kv_offload_written_blocks", "KV blocks written to files."),
    "oarlock:kv_offload_read_blocks": ("kv_offload_read_blocks", "KV blocks read from files."),
    "oarlock:kv_offload_failed_blocks": ("kv_offload_failed_blocks", "KV blocks whose reading or writing failed."),
    "oarlock:kv_offload_dropped_blocks": ("kv_offload_dropped_blocks", "KV blocks evicted too fast to be stored."),
    "vllm:num_preemptions": ("num_preemptions", "Requests preempted and recomputed."),
    "vllm:spec_decode_num_drafts": ("num_drafts", "Number of times that tokens were drafted."),
    "vllm:spec_decode_num_draft_tokens": ("num_draft_tokens", "Tokens drafted."),
    "vllm:spec_decode_num_accepted_tokens": ("num_accepted_draft_tokens", "Drafted tokens that were accepted."),
    "oarlock:engine_prompt_tokens": ("prompt_tokens", "Prompt tokens sent to the engine, per choice."),
    "oarlock:engine_generation_tokens": ("generation_tokens", "Tokens sampled, including those past a stop string."),
    "oarlock:requests_accepted": ("num_accepted", "Engine requests admitted."),
    "oarlock:requests_rejected": ("num_rejected", "Engine requests refused at admission."),
    "oarlock:refused_steps": ("num_refused_steps", "Steps that the ranks refused for lack of memory."),
    "oarlock:kv_event_batches": ("num_kv_event_batches", "Batches of KV events published."),
    "oarlock:kv_event_batches_dropped": (
        "num_kv_event_batches_dropped",
        "Batches of KV events that no subscriber received.",
    ),
    "oarlock:kv_event_overflows": (
        "num_kv_event_overflows",
        "Number of times that a subscriber fell behind and missed batches.",
    ),
    "oarlock:adapter_loads": ("num_adapter_loads", "LoRA adapters read into host memory."),
    "oarlock:adapter_load_failures": ("num_adapter_failures", "LoRA adapters that could not be read."),
    "oarlock:adapter_puts": ("num_adapter_puts", "LoRA adapters copied from host memory to a slot."),
    "oarlock:adapter_evictions": ("num_adapter_evictions", "LoRA adapters that left host memory for others."),
    "oarlock:nonfinite_logits": (
        "num_nonfinite",
        "Requests ended because the model's logits or vectors were not finite.",
    ),
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("time_to_first_token_s", "Time to first token."),
    "vllm:inter_token_latency_seconds": ("inter_token_latency_s", "Time between tokens."),
    "vllm:time_per_output_token_seconds": (
        "inter_token_latency_s",
        "Former name of vllm:inter_token_latency_seconds.",
    ),
    "vllm:request_time_per_output_token_seconds": ("time_per_output_token_s", "Mean time per token of a request."),
    "vllm:e2e_request_latency_seconds": ("e2e_latency_s", "Total time of a request."),
    "vllm:request_queue_time_seconds": ("queue_time_s", "Time spent waiting."),
    "vllm:request_prefill_time_seconds": ("prefill_time_s", "Time spent on the prompt."),
    "vllm:request_decode_time_seconds": ("decode_time_s", "Time spent on the completion."),
    "vllm:request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens per request."),
    "vllm:request_generation_tokens": ("request_generation_tokens", "Completion tokens per request."),
    "vllm:iteration_tokens_total": ("iteration_tokens", "Tokens of one step."),
    "oarlock:step_seconds": ("step_time_s", "Time of one step."),
    "oarlock:adapter_wait_seconds": ("adapter_wait_s", "Time that requests with a LoRA adapter waited for it."),
}


_BY_KEY = {
    "oarlock:key_requests": "Requests whose response began, by API key.",
    "oarlock:key_prompt_tokens": "Prompt tokens by API key, as usage reports them.",
    "oarlock:key_generation_tokens": "Completion tokens by API key, as usage reports them.",
}


# Counts of `EngineStats.by_adapter`, in its order.
_BY_ADAPTER = {
    "oarlock:adapter_requests": "Engine requests that have ended, by LoRA adapter.",
    "oarlock:adapter_prompt_tokens": "Prompt tokens of these requests.",
    "oarlock:adapter_generation_tokens": "Tokens generated for these requests.",
}


class FinishedChoice(Protocol):
    """One choice of a generation that has ended."""

    num_tokens: int  # generated tokens

    @property
    def started(self) -> bool: ...

    @property
    def finish_reason(self) -> str | None: ...


class FinishedGeneration(Protocol):
    """Figures of a generation that has ended, as the counters read them."""

    @property
    def per_prompt(self) -> int:
        """Number of choices of each prompt, which are adjacent in `choices`."""
        ...

    @property
    def choices(self) -> Sequence[FinishedChoice]: ...

    def replica_of(self, choice: Any) -> int: ...

    def tokens_by_replica(self) -> Mapping[int, tuple[int, int]]: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def key_label(self) -> str | None: ...


class Certificate(Protocol):
    """TLS certificate of the HTTPS server."""

    @property
    def expires(self) -> float:
        """Expiry date as Unix time in seconds."""
        ...


class BatchFigures(Protocol):
    """Figures of the batches in `--batch-dir`."""

    @property
    def ended_requests(self) -> Mapping[str, int]:
        """Number of requests that have ended since the start, by outcome."""
        ...

    def by_status(self) -> Mapping[str, int]: ...


class ReplicaCounters:
    """Counters of one replica's responses. Tokens are counted exactly as usage reports them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(("stop", "length", "timeout", "abort", "error"), 0)
        self.most_generated = Histogram(TOKEN_BOUNDS)  # tokens of each prompt's longest completion


class HttpCounters:
    """Counters of the HTTP layer: responses by route and status, and tokens by replica and key."""

    def __init__(self) -> None:
        self.routes: frozenset[str] = frozenset()
        self.responses: dict[tuple[str, str, int], int] = {}
        self.replicas: defaultdict[int, ReplicaCounters] = defaultdict(ReplicaCounters)
        self.ignored_parameters = 0
        self.refused_unread = 0
        self.by_key: dict[str, list[int]] = {}  # label -> responses begun, prompt tokens, completion tokens
        self.certificate: Certificate | None = None
        self.batches: BatchFigures | None = None

    def count(self, method: str, path: str, status: int) -> None:
        """Count one response. Methods and paths outside the closed sets count as `other`."""
        route = path if path in self.routes else "other"
        key = (method if method in _METHODS else "other", route, status)
        self.responses[key] = self.responses.get(key, 0) + 1

    @property
    def prompt_tokens(self) -> int:
        return sum(replica.prompt_tokens for replica in self.replicas.values())

    @property
    def generation_tokens(self) -> int:
        return sum(replica.generation_tokens for replica in self.replicas.values())

    @property
    def finished(self) -> dict[str, int]:
        """Number of choices by finish reason, over all replicas."""
        every = [self.replicas[0].finished, *(replica.finished for number, replica in self.replicas.items() if number)]
        return {reason: sum(finished[reason] for finished in every) for reason in every[0]}

    def finish(self, generation: FinishedGeneration) -> None:
        """Count a generation that has ended in any way. Choices that were refused before they began do not count."""
        started = [choice for choice in generation.choices if choice.started]
        if started:
            for number, (prompt, answer) in generation.tokens_by_replica().items():
                self.replicas[number].prompt_tokens += prompt
                self.replicas[number].generation_tokens += answer
            if generation.key_label is not None:
                numbers = (1, generation.prompt_tokens, generation.completion_tokens)
                before = self.by_key.get(generation.key_label, [0, 0, 0])
                self.by_key[generation.key_label] = [old + new for old, new in zip(before, numbers, strict=True)]
        for choice in started:
            self.replicas[generation.replica_of(choice)].finished[choice.finish_reason or "abort"] += 1
        for first in range(0, len(generation.choices), generation.per_prompt):
            answers = generation.choices[first : first + generation.per_prompt]
            most = max(choice.num_tokens for choice in answers)
            if most and all(choice.finish_reason in _COMPLETE for choice in answers):  # vectors have none
                self.replicas[generation.replica_of(answers[0])].most_generated.observe(most)


class _Snapshot(Collector):
    """Metrics of one scrape. Metrics that belong to no replica have the label of the first."""

    def __init__(
        self,
        stats: Sequence[EngineStats],
        info: EngineInfo | None,
        http: HttpCounters,
        model: str,
        prefix: str,
    ) -> None:
        """Take the data of one scrape. `stats`: of each replica."""
        self._prefix = prefix
        self._stats, self._info, self._http = stats, info, http
        self._replicas = [http.replicas[number] for number in range(len(stats))]
        self._labels = [[model, str(number)] for number in range(len(stats))]
        self._values = self._labels[0]

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            if family.name.startswith(_PREFIX):
                family.name = self._renamed(family.name)
                family.samples = [one._replace(name=self._renamed(one.name)) for one in family.samples]
            yield family

    def _renamed(self, name: str) -> str:
        return self._prefix + name.removeprefix(_PREFIX)

    def _families(self) -> Iterator[Metric]:
        for name, (attribute, text) in _GAUGES.items():
            yield self._gauge(name, text, *(getattr(stats, attribute) for stats in self._stats))
        for name, (attribute, text) in _COUNTERS.items():
            yield self._counter(name, text, *(getattr(stats, attribute) for stats in self._stats))
        for name, (attribute, text) in _HISTOGRAMS.items():
            yield self._histogram(name, text, *(getattr(stats, attribute) for stats in self._stats))
        prompt, answer = [
            [getattr(replica, name) for replica in self._replicas] for name in ("prompt_tokens", "generation_tokens")
        ]
        yield self._counter("vllm:prompt_tokens", "Prompt tokens, as usage reports them.", *prompt)
        yield self._counter("vllm:generation_tokens", "Completion tokens, as usage reports them.", *answer)
        most = [replica.most_generated for replica in self._replicas]
        yield self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest completion.", *most
        )
        finished = CounterMetricFamily(
            "vllm:request_success", "Choices ended, by reason.", labels=[*_LABELS, "finished_reason"]
        )
        for labels, replica in zip(self._labels, self._replicas, strict=True):
            for reason, number in replica.finished.items():
                finished.add_metric([*labels, reason], number)
        yield finished
        ignored = "Request parameters that are unknown or have no effect."
        yield self._counter("oarlock:ignored_parameters", ignored, self._http.ignored_parameters)
        unread = "Requests refused by a full queue before their bodies were read."
        yield self._counter("oarlock:requests_refused_unread", unread, self._http.refused_unread)
        yield from self._of_keys()
        yield from self._of_adapters()
        up = [self._info is not None and stats.state == "ready" for stats in self._stats]
        yield self._gauge(
            "oarlock:engine_up", "1 while the engine of this replica serves, otherwise 0.", *map(float, up)
        )
        if self._info is not None:
            yield self._cache_config(self._info)
            if self._info.max_loras:
                yield self._lora_requests(self._info)
        answers = CounterMetricFamily(
            "oarlock:http_responses", "HTTP responses.", labels=["model_name", "method", "route", "status"]
        )
        for (method, route, status), number in sorted(self._http.responses.items()):
            answers.add_metric([self._values[0], method, route, str(status)], number)
        yield answers
        if self._http.certificate is not None:
            until = "Unix time at which the certificate expires, if HTTPS is served."
            yield self._gauge("oarlock:certificate_expiry_timestamp_seconds", until, self._http.certificate.expires)
        if self._http.batches is not None:
            yield from self._of_batches(self._http.batches)

    def _cache_config(self, info: EngineInfo) -> Metric:
        labels = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "cache_dtype": info.kv_cache_dtype,
            "bytes_per_token_per_rank": info.kv_bytes_per_token_per_rank,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache.", labels=[*_LABELS, *labels]
        )
        for own in self._labels:
            family.add_metric([*own, *map(str, labels.values())], 1)
        return family

    def _of_keys(self) -> Iterator[Metric]:
        """Yield the tokens by the label of the API key. There is a label for each configured key."""
        for position, (name, text) in enumerate(_BY_KEY.items()):
            family = CounterMetricFamily(name, text, labels=[*_LABELS, "key"])
            for label, numbers in sorted(self._http.by_key.items()):
                family.add_metric([*self._values, label], numbers[position])
            yield family

    def _of_adapters(self) -> Iterator[Metric]:
        """Yield the ended requests and their tokens by the name of the adapter."""
        for position, (name, text) in enumerate(_BY_ADAPTER.items()):
            family = CounterMetricFamily(name, text, labels=[*_LABELS, "adapter"])
            for labels, stats in zip(self._labels, self._stats, strict=True):
                for adapter, counts in sorted(stats.by_adapter.items()):
                    family.add_metric([*labels, adapter], counts[position])
            yield family
        slots = 0 if self._info is None else self._info.max_loras
        text = "Slots for LoRA adapters in device memory: adapters in one step."
        yield self._gauge("oarlock:adapter_slots", text, *[slots] * len(self._stats))

    def _lora_requests(self, info: EngineInfo) -> Metric:
        """Return the adapters of all replicas as gateways read them: names in labels, and the time as the value."""
        labels = {
            "max_lora": str(info.max_loras),
            "running_lora_adapters": _joined(stats.running_adapters for stats in self._stats),
            "waiting_lora_adapters": _joined(stats.waiting_adapters for stats in self._stats),
        }
        text = "Names of LoRA adapters of running and of waiting requests. The value is the Unix time."
        family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=[*_LABELS, *labels])
        family.add_metric([*self._values, *labels.values()], time.time())
        return family

    def _of_batches(self, batches: BatchFigures) -> Iterator[Metric]:
        by_status = batches.by_status()
        gauge = GaugeMetricFamily("oarlock:batches", "Batches that are stored.", labels=[*_LABELS, "status"])
        for status in BATCH_STATUSES:
            gauge.add_metric([*self._values, status], by_status.get(status, 0))
        yield gauge
        ended = CounterMetricFamily(
            "oarlock:batch_requests", "Ended requests of batches.", labels=[*_LABELS, "outcome"]
        )
        for outcome, number in batches.ended_requests.items():
            ended.add_metric([*self._values, outcome], number)
        yield ended

    def _gauge(self, name: str, text: str, *values: float) -> GaugeMetricFamily:
        """Return a gauge with a value for each replica, or with a single value under the label of the first."""
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        for labels, value in zip(self._labels, values, strict=False):
            family.add_metric(labels, value)
        return family

    def _counter(self, name: str, text: str, *values: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for labels, value in zip(self._labels, values, strict=False):
            family.add_metric(labels, value)
        return family

    def _histogram(self, name: str, text: str, *values: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        for labels, data in zip(self._labels, values, strict=True):
            bounds = [*(str(float(bound)) for bound in data.bounds), "+Inf"]
            family.add_metric(labels, list(zip(bounds, itertools.accumulate(data.counts), strict=True)), data.sum)
        return family


def _joined(names: Iterable[Sequence[str]]) -> str:
    """Return the names of all replicas, each once, joined by commas."""
    return ",".join(dict.fromkeys(itertools.chain.from_iterable(names)))


def exposition(
    stats: Sequence[EngineStats],
    info: EngineInfo | None,
    http: HttpCounters,
    model: str,
    prefix: str = _PREFIX,
) -> bytes:
    """Return the body of `/metrics`. `stats`: of each replica; until one has started, its values are zero. `prefix`
    replaces `vllm:`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(stats, info, http, model, prefix))
    registry.register(_PROCESS)
    return generate_latest(registry)
