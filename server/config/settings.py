"""Every option of the server, described once: the operator's settings, and the engine's configuration made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig, WorkerConfig
from server.config.option_checks import check_allowed_hosts, check_step_size, unknown_name
from server.config.options import Option, describe, option

# Where the options are not given: the largest step and the shortest timeout that measuring a step may result in.
MAX_NUM_BATCHED_TOKENS = 2048
STEP_TIMEOUT_S = 120.0

_MODEL, _HTTP, _PARALLEL, _SCHEDULE, _LOG = "Model", "HTTP", "Devices", "Scheduling and memory", "Logs"


@dataclass(frozen=True)
class Settings:
    """The operator's settings, checked. `model` is a name, which is resolved to a directory later."""

    model: str | None = option(
        None,
        positional=True,
        group=_MODEL,
        example="Qwen/Qwen2.5-0.5B-Instruct",
        help="directory in the Hugging Face layout, or a hub id; without one, the demo model of this repository",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        group=_MODEL,
        example="my-model alias",
        help="names that requests may use; the first is reported (default: MODEL as given)",
    )
    revision: str | None = option(
        None, group=_MODEL, example="v1.0", help="branch, tag or commit of a hub id (default: main)"
    )
    download_dir: str | None = option(
        None,
        group=_MODEL,
        example="/data/models",
        help="where models of the hub are kept, as huggingface_hub lays them out (default: its cache, HF_HOME)",
    )
    offline: bool = option(False, group=_MODEL, example="", help="serve hub ids from the cache, without the network")
    dtype: str = option(
        "auto",
        group=_MODEL,
        example="bfloat16",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="type of weights and activations; auto: the checkpoint's own, or float32 where a CPU would emulate it",
    )
    quantization: str = option(
        "none",
        short="-q",
        group=_MODEL,
        example="int8",
        choices=("none", "int8", "int4"),
        help="round weights as they are read: int8, half of bfloat16's memory, small errors; int4, 0.28 (CPU only)",
    )
    load_format: str = option(
        "auto",
        group=_MODEL,
        example="dummy",
        choices=("auto", "safetensors", "dummy"),
        help="dummy: seeded random weights of the model's shape, for load tests",
    )
    check_weights: bool = option(
        True, group=_MODEL, example="", help="refuse a checkpoint that holds NaN or infinity, by the tensor's name"
    )
    generation_config: str = option(
        "auto",
        group=_MODEL,
        example="vllm",
        help="default sampling; auto: the model's generation_config.json; vllm: neutral; or a folder with such a file",
    )
    seed: int = option(
        0,
        group=_MODEL,
        example="1",
        minimum=0,
        maximum=2**31 - 1,
        help="seed of dummy weights; requests have their own",
    )
    max_model_len: int | None = option(
        None,
        group=_MODEL,
        example="4096",
        minimum=2,
        maximum=2**24,
        help="longest prompt plus answer in tokens (default: what the model was trained for)",
    )
    host: str = option(
        "127.0.0.1",
        group=_HTTP,
        example="0.0.0.0",
        help="address to listen on; beyond loopback, set an --api-key",
    )
    port: int = option(8000, group=_HTTP, example="8080", minimum=0, maximum=65535, help="0: any free port")
    api_key: tuple[str, ...] = option(
        (),
        group=_HTTP,
        example="KEY",
        secret=True,
        help="keys that clients must send as a bearer token; better in OARLOCK_API_KEY than on the command line",
    )
    api_key_file: str | None = option(
        None,
        group=_HTTP,
        example="keys.txt",
        help="file of more keys, one per line, with an optional label before each; the request log shows the label",
    )
    admin_api_key: str | None = option(
        None,
        group=_HTTP,
        example="KEY",
        secret=True,
        help="key of the /admin routes, and only of them; without one they are closed; better in OARLOCK_ADMIN_API_KEY",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        group=_HTTP,
        example="llm.example.org *.lan",
        help="more names that the Host header may have where no key is required, such as the public name of a proxy; "
        "*.example.org for all below it, * for any",
    )
    max_body_size: int = option(
        16 * 2**20,
        group=_HTTP,
        example="32MiB",
        is_bytes=True,
        minimum=1024,
        maximum=2**30,
        help="larger request bodies are refused (413)",
    )
    strict_parameters: bool = option(
        False,
        group=_HTTP,
        example="",
        help="refuse unknown request parameters (400) instead of reporting them in X-Ignored-Parameters",
    )
    strict_max_tokens: bool = option(
        False,
        group=_HTTP,
        example="",
        help="refuse a token limit that does not fit the context (400) instead of lowering it",
    )
    always_stream_usage: bool = option(
        False, group=_HTTP, example="", help="end every stream with a chunk of usage, even when not requested"
    )
    ignore_model_case: bool = option(
        False, group=_HTTP, example="", help="accept the served names in upper or lower case"
    )
    request_timeout: float | None = option(
        None,
        group=_HTTP,
        example="600",
        minimum=0.001,
        maximum=86_400,
        help="seconds that any request may take, waiting included; requests may ask for less (default: no limit)",
    )
    drain_timeout: float = option(
        30.0,
        group=_HTTP,
        example="60",
        minimum=0,
        maximum=3600,
        help="seconds that running requests get to finish after SIGTERM or Ctrl-C",
    )
    tensor_parallel_size: int = option(
        1,
        group=_PARALLEL,
        example="2",
        short="-tp",
        minimum=1,
        maximum=64,
        help="number of ranks that share every layer",
    )
    device: str = option(
        "auto", group=_PARALLEL, example="cpu", choices=("auto", "cpu", "cuda"), help="where the ranks run"
    )
    num_threads: int | None = option(
        None,
        group=_PARALLEL,
        example="4",
        minimum=1,
        maximum=1024,
        help="CPU threads of one rank (default: one for each core that --cpu-affinity gives it)",
    )
    cpu_affinity: str = option(
        "auto",
        group=_PARALLEL,
        example="0-7|8-15",
        help="CPUs that a rank's threads stay on; auto: physical cores of one NUMA node, without hyper-threads and "
        "efficiency cores; none; or a list for each rank",
    )
    attention_backend: str = option(
        "auto",
        group=_PARALLEL,
        example="reference",
        choices=("auto", "cpp", "torch", "triton", "reference"),
        help="triton: on CUDA devices; reference: plain torch, slow, for comparison",
    )
    step_timeout: float | None = option(
        None,
        group=_PARALLEL,
        example="30",
        minimum=1,
        maximum=3600,
        help="seconds after which a step counts as a hung rank and the server exits; without it 120, or four times the "
        "largest step where that is measured to take longer",
    )
    max_num_seqs: int = option(
        64, group=_SCHEDULE, example="32", minimum=1, maximum=4096, help="sequences that run at the same time"
    )
    max_num_batched_tokens: int | None = option(
        None,
        group=_SCHEDULE,
        example="4096",
        minimum=16,
        maximum=2**20,
        help="tokens of one step, prompts included; without it 2048, or fewer where such a step is measured to take "
        "more than 3 seconds",
    )
    max_step_ms: float | None = option(
        None,
        group=_SCHEDULE,
        example="60",
        minimum=1,
        maximum=600_000,
        help="milliseconds of a step while answers are under way: prompts are computed in chunks that fit (default: "
        "2.5 times a step without prompts, as measured)",
    )
    max_waiting_requests: int = option(
        512, group=_SCHEDULE, example="1024", minimum=1, maximum=2**20, help="beyond: 429 with Retry-After"
    )
    block_size: int = option(32, group=_SCHEDULE, example="16", minimum=1, maximum=1024, help="tokens in one KV block")
    kv_cache_memory: int | None = option(
        None,
        group=_SCHEDULE,
        example="2GiB",
        is_bytes=True,
        minimum=2**16,
        maximum=2**50,
        help="KV memory of each rank (default: measured)",
    )
    kv_cache_dtype: str = option(
        "auto",
        group=_SCHEDULE,
        example="int8",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
        help="round keys and values as they are stored: int8 or fp8 (e4m3), about half of bfloat16's memory (CPU only)",
    )
    gpu_memory_utilization: float = option(
        0.9, group=_SCHEDULE, example="0.8", minimum=0.05, maximum=0.99, help="share of a GPU's memory to use"
    )
    enable_prefix_caching: bool = option(
        True, group=_SCHEDULE, example="", help="keep KV blocks of shared prompt beginnings"
    )
    log_level: str = option(
        "info",
        group=_LOG,
        example="debug",
        choices=("debug", "info", "warning", "error"),
        help="least severe shown",
    )
    enable_log_requests: bool = option(
        False, group=_LOG, example="", help="one line per request: id, tokens, times; never its text"
    )
    record: str | None = option(
        None,
        group=_LOG,
        example="steps.rec",
        help="write every step to this new file, for `oarlock replay`; it holds all prompts and answers as token ids",
    )
    record_limit: int | None = option(
        2**30,
        group=_LOG,
        example="8GiB",
        is_bytes=True,
        minimum=2**16,
        maximum=2**50,
        help="bytes after which recording stops, while serving goes on; none: no limit",
    )

    @property
    def has_api_keys(self) -> bool:
        return bool(self.api_key or self.api_key_file)

    def engine_config(self, model_path: str) -> EngineConfig:
        """The configuration of the engine, for the resolved directory of the model."""
        worker = WorkerConfig(
            model_path=model_path,
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            tensor_parallel_size=self.tensor_parallel_size,
            load_format=self.load_format,
            check_weights=self.check_weights,
            seed=self.seed,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(MAX_NUM_BATCHED_TOKENS, self.max_num_seqs),
            lower_step_size=self.max_num_batched_tokens is None,
            block_size=self.block_size,
            kv_cache_bytes=self.kv_cache_memory,
            kv_cache_dtype=self.kv_cache_dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            num_threads=self.num_threads,
            cpu_affinity=self.cpu_affinity,
            attention_backend=self.attention_backend,
            step_timeout_s=self.step_timeout or STEP_TIMEOUT_S,
            raise_step_timeout=self.step_timeout is None,
            log_level=self.log_level.upper(),
        )
        return EngineConfig(
            worker=worker,
            enable_prefix_caching=self.enable_prefix_caching,
            max_waiting_requests=self.max_waiting_requests,
            max_step_s=None if self.max_step_ms is None else self.max_step_ms / 1000,
            record_path=self.record,
            record_limit_bytes=self.record_limit,
        )


OPTIONS: dict[str, Option] = describe(Settings)
# Options of the HTTP server, which the offline interface does not take.
SERVER_ONLY = frozenset(
    {
        "allowed_hosts",
        "host",
        "port",
        "api_key",
        "api_key_file",
        "admin_api_key",
        "served_model_name",
        "max_body_size",
        "strict_parameters",
        "strict_max_tokens",
        "always_stream_usage",
        "ignore_model_case",
        "request_timeout",
        "drain_timeout",
    }
)


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from typed values, each checked and all checked together. Raises `OptionError`."""
    for name, value in values.items():
        if name not in OPTIONS:
            raise unknown_name("option", name, OPTIONS)
        OPTIONS[name].check(value)
    settings = Settings(**values)
    check_allowed_hosts(settings.allowed_hosts)
    check_step_size(settings.max_num_batched_tokens, settings.max_num_seqs)
    return settings


def as_markdown() -> str:
    """The table of the documentation."""
    lines = ["| flag | environment and TOML | type | default | what it does |", "|---|---|---|---|---|"]
    for described in OPTIONS.values():
        flags = f"`{described.flag}`" + (f", `{described.short}`" if described.short else "")
        kind = described.type_name.replace("|", " \\| ")
        names = f"`{described.env}`, `{described.name}`"
        lines.append(f"| {flags} | {names} | {kind} | {described.default_text} | {described.help} |")
    return "\n".join(lines) + "\n"
