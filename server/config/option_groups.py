"""Options of the server, each described once, in the groups that `--help` shows. Those of the model are in
`model_options.py`.
"""

from dataclasses import dataclass

from oarlock.server.config.json_options import KV_EVENTS, SPECULATIVE
from oarlock.server.config.options import option

MASTER_PORT = 29550
RAY = "ray"


@dataclass(frozen=True)
class HttpSettings:
    """The address that the server listens on, the clients it admits, and the limits of their requests."""

    GROUP = "HTTP"

    host: str = option("127.0.0.1", example="0.0.0.0", help="address to listen on; beyond loopback, set an --api-key")
    port: int = option(8000, example="8080", limits=(0, 65535), help="port to listen on; 0: any free one")
    uds: str | None = option(
        None,
        is_path=True,
        example="/run/oarlock/http.sock",
        help="Unix socket to listen on instead of --host and --port; the permissions of its folder control access",
    )
    ssl_certfile: str | None = option(
        None,
        is_path=True,
        example="/etc/letsencrypt/live/llm.example.org/fullchain.pem",
        help="serve HTTPS with this certificate chain in PEM; renewed files are reloaded within seconds",
    )
    ssl_keyfile: str | None = option(
        None,
        is_path=True,
        example="/etc/letsencrypt/live/llm.example.org/privkey.pem",
        help="the certificate's private key, in PEM and without a passphrase",
    )
    root_path: str | None = option(
        None,
        example="/llm",
        help="path prefix under which a proxy publishes this server; requests are accepted with and without it",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        example="https://chat.example.org",
        help="origins of web pages that may use this server from a browser (CORS); * for any",
    )
    api_key: tuple[str, ...] = option(
        (),
        example="KEY",
        secret=True,
        help="keys, one of which clients must send as a bearer token; prefer OARLOCK_API_KEY to the command line",
    )
    api_key_file: str | None = option(
        None,
        is_path=True,
        example="keys.txt",
        help="file of more keys, one per line, with an optional label before each; the request log shows the label",
    )
    admin_api_key: str | None = option(
        None,
        example="KEY",
        secret=True,
        help="key of the /admin routes and of /v1/requests only; without it /admin is closed; prefer "
        "OARLOCK_ADMIN_API_KEY to the command line",
    )
    open_metrics: bool = option(
        False,
        help="serve /metrics and /v1/state without a key also beyond loopback, for routers that have no "
        "key; if no keys are set, also /v1/requests",
    )
    web_page: bool = option(True, help="serve a web page at / with a chat, the live state and the model card")
    allowed_hosts: tuple[str, ...] = option(
        (),
        example="llm.example.org *.lan",
        help="additional names for the Host header if no key is required, such as the public name of a "
        "proxy; *.example.org for all subdomains, * for any",
    )
    max_body_size: int = option(
        16 * 2**20,
        example="32MiB",
        is_bytes=True,
        limits=(1024, 2**30),
        help="size limit of a request body; larger bodies are refused (413)",
    )
    body_memory: int = option(
        128 * 2**20,
        example="512MiB",
        is_bytes=True,
        limits=(2**20, 2**40),
        help="memory for all requests, from the first byte of the body to the last event of the response; "
        "requests beyond it are refused (503) with Retry-After, but a single one never is",
    )
    response_store: int = option(
        64 * 2**20,
        example="0",
        is_bytes=True,
        limits=(0, 2**36),
        help="memory for the responses of /v1/responses that previous_response_id can continue; if it is "
        "full, the API key that uses the most loses its oldest response; 0: none is stored",
    )
    batch_dir: str | None = option(
        None,
        is_path=True,
        example="/var/lib/oarlock/batches",
        help="directory for /v1/files and /v1/batches, which are served only with it; batches continue after a restart",
    )
    batch_dir_size: int = option(
        16 * 2**30,
        example="64GiB",
        is_bytes=True,
        limits=(2**20, 2**50),
        help="size limit of all files of --batch-dir; uploads beyond it are refused (413), and a batch "
        "that needs more fails; if there are several API keys, each may use as much as it leaves free",
    )
    strict_parameters: bool = option(
        False,
        help="refuse requests with unknown or ineffective parameters (400); otherwise a header lists them",
    )
    strict_max_tokens: bool = option(
        False, help="refuse a token limit that exceeds the context (400), instead of lowering it"
    )
    always_stream_usage: bool = option(False, help="end every stream with a usage chunk, even if not requested")
    ignore_model_case: bool = option(False, help="ignore the case of model names")
    request_timeout: float | None = option(
        None,
        unset="none",
        example="600",
        limits=(0.001, 86_400),
        help="time limit of any request in seconds, including the queue; requests may set a shorter one "
        "(default: no limit)",
    )
    drain_timeout: float = option(
        30.0, example="60", limits=(0, 3600), help="seconds for running requests to finish after SIGTERM or Ctrl-C"
    )
    metrics_prefix: str = option(
        "vllm:",
        example="llm:",
        help="prefix of the metric names that routers and dashboards read; they do not find others",
    )


@dataclass(frozen=True)
class DeviceSettings:
    """The ranks, and the devices and kernels that they compute with."""

    GROUP = "Devices"

    tensor_parallel_size: int = option(
        1, example="2", short="-tp", limits=(1, 64), help="number of ranks that share each layer"
    )
    pipeline_parallel_size: int = option(
        1,
        example="2",
        short="-pp",
        limits=(1, 64),
        help="number of pipeline stages; each has some of the layers and --tensor-parallel-size ranks",
    )
    enable_expert_parallel: bool = option(
        False,
        help="each rank of a MoE model holds whole experts; otherwise a part of each",
    )
    data_parallel_size: int = option(
        1,
        example="2",
        short="-dp",
        limits=(1, 64),
        help="number of replicas on this host, each with an engine, ranks, weights and KV memory (docs/replicas.md)",
    )
    device: str = option("auto", example="cpu", choices=("auto", "cpu", "cuda"), help="device of the ranks")
    num_threads: int | None = option(
        None,
        example="4",
        limits=(1, 1024),
        help="CPU threads of one rank (default: one per core that --cpu-affinity assigns)",
    )
    cpu_affinity: str = option(
        "auto",
        example="0-7|8-15",
        help="CPUs of a rank's threads; auto: physical cores of one NUMA node, without hyper-threads and "
        "efficiency cores; none; or a list for each rank",
    )
    attention_backend: str = option(
        "auto",
        example="reference",
        choices=("auto", "cpp", "torch", "triton", "reference"),
        help="attention backend; triton: on CUDA devices; reference: plain torch, slow, for comparison",
    )
    enforce_eager: bool = option(
        False,
        help="do not run decode steps as CUDA graphs: slower, and takes less GPU memory",
    )
    batch_invariant: bool = option(
        False,
        help="serve only if a response does not depend on other requests, which is tested at start; on "
        "CUDA with other kernels (docs/determinism.md)",
    )
    step_timeout: float | None = option(
        None,
        example="30",
        limits=(1, 3600),
        help="seconds after which a step counts as hung and the server exits (default: 120, or four times "
        "the largest step if that is measured to be longer)",
    )


@dataclass(frozen=True)
class NodeSettings:
    """One model on several hosts: their number, the number of this host, and how the hosts find each other."""

    GROUP = "Several hosts"

    distributed_executor_backend: str = option(
        "mp",
        example="ray",
        choices=("mp", RAY),
        help="which program starts the ranks of several hosts: mp: this command, on each host; ray: Ray, "
        "on nodes of its cluster, one of which is this host",
    )
    nnodes: int = option(
        1,
        example="2",
        limits=(1, 64),
        help="number of hosts for the ranks; the same command runs on each, except with Ray (default: as "
        "set by torchrun or LeaderWorkerSet; with Ray one per stage; otherwise 1)",
    )
    node_rank: int | None = option(
        None,
        example="1",
        limits=(0, 63),
        help="number of this host; 0, the head node, serves HTTP (default: as set by torchrun or LeaderWorkerSet)",
    )
    master_addr: str | None = option(
        None,
        example="10.0.0.1",
        help="name or address of the head node (default: as set by torchrun or LeaderWorkerSet)",
    )
    master_port: int = option(
        MASTER_PORT,
        example="29600",
        limits=(1, 65535),
        help="port of the store through which the hosts connect, run by the head node or by torchrun",
    )
    node_interface: str | None = option(
        None,
        example="eth1",
        help="network interface of this host, or its address, for the traffic between hosts (default: the "
        "route to the head node)",
    )
    node_timeout: float = option(
        300.0, example="600", limits=(1, 86_400), help="seconds that hosts wait for each other at start"
    )


@dataclass(frozen=True)
class SchedulingSettings:
    """The limits of a step, and the memory of the KV cache."""

    GROUP = "Scheduling and memory"

    max_num_seqs: int = option(
        64,
        example="32",
        limits=(1, 4096),
        help="maximum number of running sequences; lowered at start if the states of recurrent layers need more memory "
        "than there is",
    )
    max_num_batched_tokens: int | None = option(
        None,
        example="4096",
        limits=(16, 2**20),
        is_count=True,
        help="token limit of one step, prompts included (default: 2048, or fewer if such a step takes more than "
        "3 seconds)",
    )
    max_step_ms: float | None = option(
        None,
        example="60",
        limits=(1, 600_000),
        help="time limit in milliseconds of a step that decodes: prompts are computed in chunks that fit "
        "(default: 2.5 times a step without prompts, as measured)",
    )
    async_scheduling: bool | None = option(
        None,
        help="schedule each step while the previous one runs (default: if the engine has a core besides "
        "those of the ranks)",
    )
    max_waiting_requests: int = option(
        512,
        example="1024",
        limits=(1, 2**20),
        help="maximum number of waiting requests; more are refused (429) with Retry-After",
    )
    block_size: int = option(32, example="16", limits=(1, 1024), help="tokens in one KV block")
    kv_cache_memory: int | None = option(
        None,
        example="2GiB",
        is_bytes=True,
        limits=(2**16, 2**50),
        help="memory of each rank for keys, values and the states of recurrent layers (default: measured)",
    )
    kv_cache_dtype: str = option(
        "auto",
        example="int8",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
        help="quantize keys and values: int8 or fp8 (e4m3) take about half of bfloat16's memory",
    )
    kv_offload_memory: int | None = option(
        None,
        unset="none",
        example="8GiB",
        is_bytes=True,
        limits=(2**16, 2**50),
        help="host memory of each rank for KV blocks that its pool evicts; layers with windows then keep all blocks "
        "(default: none, or 1GiB with --kv-offload-path)",
    )
    kv_offload_path: str | None = option(
        None,
        is_path=True,
        example="/var/cache/oarlock/kv",
        help="directory for files of evicted KV blocks: they survive a restart, and replicas on this host "
        "may share them. They contain the keys and values of users' prompts (docs/replicas.md)",
    )
    kv_offload_disk: int | None = option(
        None,
        example="200GiB",
        is_bytes=True,
        limits=(2**20, 2**60),
        help="size limit of the files in --kv-offload-path; the least recently used are removed (default: "
        "half of the free space)",
    )
    gpu_memory_utilization: float = option(
        0.9, example="0.8", limits=(0.05, 0.99), help="fraction of GPU memory to use"
    )
    enable_prefix_caching: bool = option(True, help="reuse the KV blocks, and the states, of shared prompt prefixes")
    speculative_config: str | None = option(
        None,
        example=SPECULATIVE.example,
        is_json=True,
        help="draft tokens by looking up the last tokens in the request's own text; one step checks "
        "several; not with recurrent layers; keys: method (ngram), num_speculative_tokens, prompt_lookup_max, "
        "prompt_lookup_min (default: no drafts)",
    )
    kv_events_config: str | None = option(
        None,
        example=KV_EVENTS.example,
        is_json=True,
        help="publish the changes of the prefix cache over ZMQ, as vLLM does; keys: "
        "enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm, "
        "max_queue_size, topic (default: nothing)",
    )


@dataclass(frozen=True)
class LogSettings:
    """Logs, traces and recordings."""

    GROUP = "Logs"

    log_level: str = option(
        "info", example="debug", choices=("debug", "info", "warning", "error"), help="least severe level that is logged"
    )
    log_format: str = option(
        "text",
        example="json",
        choices=("text", "json"),
        help="format of the log of all processes: one key=value line or one JSON object per event",
    )
    enable_log_requests: bool = option(
        False, help="log one line per generated response: id, tokens, times, the label of its API key; never its text"
    )
    access_log: bool = option(
        False,
        help="log one line per HTTP response: client, method, path, status, bytes, seconds, the label of "
        "the API key; successful probes and metrics are left out",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        example="http://localhost:4318/v1/traces",
        help="send a trace of each request to this OpenTelemetry collector, over HTTP (needs the extra otel)",
    )
    record: str | None = option(
        None,
        is_path=True,
        example="steps.rec",
        help="record every step in this new file, for `oarlock replay`; it contains all prompts and "
        "completions as token ids",
    )
    record_limit: int | None = option(
        2**30,
        example="8GiB",
        is_bytes=True,
        limits=(2**16, 2**50),
        help="size after which recording stops, while serving continues; none: no limit",
    )
