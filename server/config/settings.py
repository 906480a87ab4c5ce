"""Every option of the server as one dataclass: the operator's settings, and the engine's configuration made from them.

The options themselves are in `model_options.py` and `option_groups.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oarlock.engine.config import EngineConfig, KvEventsConfig
from oarlock.server.config.adapter_options import AdapterSettings, check_adapters
from oarlock.server.config.json_options import parse_kv_events_config, parse_speculative_config
from oarlock.server.config.model_options import FIT_TO_MEMORY, ModelSettings
from oarlock.server.config.option_checks import (
    check_allowed_hosts,
    check_allowed_origins,
    check_kv_offload,
    check_listening,
    check_metrics_prefix,
    check_root_path,
    check_step_size,
    check_traces_endpoint,
    is_loopback,
    unknown_name,
)
from oarlock.server.config.option_groups import (
    DeviceSettings,
    HttpSettings,
    LogSettings,
    NodeSettings,
    SchedulingSettings,
)
from oarlock.server.config.options import Option, OptionError, describe
from oarlock.workers.config import NodesConfig, WorkerConfig

# Used if the options are not given: the largest step and the shortest timeout that measuring a step may result in.
MAX_NUM_BATCHED_TOKENS = 2048
STEP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Settings(
    LogSettings, AdapterSettings, SchedulingSettings, NodeSettings, DeviceSettings, HttpSettings, ModelSettings
):
    """The operator's settings, checked. `model` is a name, which is resolved to a directory later.

    The fields of the last base class come first.
    """

    @property
    def has_api_keys(self) -> bool:
        return bool(self.api_key or self.api_key_file)

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return self.uds is not None or is_loopback(self.host)

    @property
    def opens_metrics(self) -> bool:
        """True if `/metrics` and `/v1/state` need no key."""
        return self.is_local or self.open_metrics

    @property
    def opens_requests(self) -> bool:
        """True if `/v1/requests` needs no key: if the two above need none, and no keys separate the clients."""
        return self.opens_metrics and not self.has_api_keys and self.admin_api_key is None

    def published_kv_events(self) -> KvEventsConfig | None:
        """Return the configuration of published KV events, or None if nothing is published. Raises `OptionError`."""
        if self.kv_events_config is None:
            return None
        config = parse_kv_events_config(
            self.kv_events_config, has_api_keys=self.has_api_keys, num_replicas=self.data_parallel_size
        )
        if config is not None and not self.enable_prefix_caching:
            raise OptionError(
                "--kv-events-config publishes events of the prefix cache, but --no-enable-prefix-caching turns it off.",
                "Leave one of the two out.",
            )
        return config

    def engine_config(
        self, model_path: str, nodes: NodesConfig | None = None, tokenizer_path: str | None = None
    ) -> EngineConfig:
        """Return the engine's configuration for the resolved directories of the model and of a separate tokenizer.

        `nodes`: how the other hosts are found, if there are any.
        """
        text = self.speculative_config
        drafts = None if text is None else parse_speculative_config(text)
        worker = WorkerConfig(
            model_path=model_path,
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            dequantize=self.dequantize,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            nnodes=self.nnodes,
            data_parallel_size=self.data_parallel_size,
            model_impl=self.model_impl,
            trust_remote_code=self.trust_remote_code,
            load_format=self.load_format,
            check_weights=self.check_weights,
            seed=self.seed,
            max_model_len=None if self.max_model_len == FIT_TO_MEMORY else self.max_model_len,
            fit_model_len=self.max_model_len == FIT_TO_MEMORY,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(MAX_NUM_BATCHED_TOKENS, self.max_num_seqs),
            num_speculative_tokens=0 if drafts is None else drafts.num_speculative_tokens,
            lower_step_size=self.max_num_batched_tokens is None,
            block_size=self.block_size,
            kv_cache_bytes=self.kv_cache_memory,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_offload_bytes=self.kv_offload_memory,
            kv_offload_path=self.kv_offload_path,
            kv_offload_disk_bytes=self.kv_offload_disk,
            **self.worker_fields(),
            gpu_memory_utilization=self.gpu_memory_utilization,
            num_threads=self.num_threads,
            cpu_affinity=self.cpu_affinity,
            attention_backend=self.attention_backend,
            enforce_eager=self.enforce_eager,
            batch_invariant=self.batch_invariant,
            step_timeout_s=self.step_timeout or STEP_TIMEOUT_S,
            raise_step_timeout=self.step_timeout is None,
            log_level=self.log_level.upper(),
            log_format=self.log_format,
        )
        return EngineConfig(
            worker=worker,
            nodes=nodes,
            tokenizer_path=tokenizer_path,
            enable_prefix_caching=self.enable_prefix_caching,
            max_waiting_requests=self.max_waiting_requests,
            max_step_s=None if self.max_step_ms is None else self.max_step_ms / 1000,
            pipeline_depth=None if self.async_scheduling is None else 1 + self.async_scheduling,
            speculative=drafts,
            kv_events=self.published_kv_events(),
            record_path=self.record,
            record_limit_bytes=self.record_limit,
        )


OPTIONS: dict[str, Option] = describe(Settings)
# Options of the HTTP server and of several hosts, which the offline interface does not take.
SERVER_ONLY = frozenset(
    {name for name, described in OPTIONS.items() if described.group in (HttpSettings.GROUP, NodeSettings.GROUP)}
    | {"served_model_name", "enable_log_requests", "access_log", "otlp_traces_endpoint"}
)


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Return settings from typed values. Each value is checked, then all together. Raises `OptionError`."""
    checked = dict(values)
    for name, value in values.items():
        if name not in OPTIONS:
            raise unknown_name("option", name, OPTIONS)
        described = OPTIONS[name]
        checked[name] = described.check(json.dumps(value) if described.is_json and isinstance(value, dict) else value)
    settings = Settings(**checked)
    check_allowed_hosts(settings.allowed_hosts)
    check_allowed_origins(settings.allowed_origins)
    check_root_path(settings.root_path)
    check_listening(settings.uds, settings.ssl_certfile, settings.ssl_keyfile)
    check_metrics_prefix(settings.metrics_prefix)
    check_step_size(settings.max_num_batched_tokens, settings.max_num_seqs)
    check_kv_offload(settings)
    check_adapters(settings)
    check_traces_endpoint(settings.otlp_traces_endpoint)
    if settings.speculative_config is not None:
        parse_speculative_config(settings.speculative_config)
    settings.published_kv_events()
    return settings


def as_markdown() -> str:
    """Return the table of options for the documentation."""
    lines = ["| flag | type | default | meaning |", "|---|---|---|---|"]
    for described in OPTIONS.values():
        flags = f"`{described.flag}`" + (f", `{described.short}`" if described.short else "")
        kind = described.type_name.replace("|", " \\| ")
        lines.append(f"| {flags} | {kind} | {described.default_text} | {described.help} |")
    return "\n".join(lines) + "\n"
