"""Options of the server, each described once, in the groups that `--help` shows."""

from dataclasses import dataclass

from oarlock.server.config.json_options import KV_EVENTS, SPECULATIVE
from oarlock.server.config.options import option

# Names of formats, with aliases. server/chat defines the formats; a test compares both lists.
TOOL_CALL_PARSERS = (
    "auto",
    "openai",
    "functiongemma",
    "gemma4",
    "pythonic",
    "llama4_pythonic",
    "hermes",
    "generic",
    "llama3",
    "llama3_json",
    "llama4_json",
    "mistral",
    "mistral_named",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k2",
    "granite",
    "phi4_mini",
    "phi4_mini_json",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "glm45",
    "glm47",
    "minimax_m2",
    "minimax_m3",
    "minimax",
    "apriel",
    "hunyuan_a13b",
    "nemotron_json",
    "lfm2",
    "cohere",
    "cohere_command",
    "command_r",
    "gigachat3",
    "apertus",
    "functionary_v3_1",
)
REASONING_PARSERS = (
    "auto",
    "none",
    "deepseek_r1",
    "qwen3",
    "glm45",
    "mistral",
    "seed_oss",
    "cohere",
    "minimax_m3",
    "granite",
    "gemma4",
    "openai_gptoss",
)
FITTING = -1  # a value of max_model_len, as `auto` in vLLM
MASTER_PORT = 29550
RAY = "ray"


@dataclass(frozen=True)
class ModelSettings:
    """The served model, its source, and its dtype."""

    GROUP = "Model"

    model: str | None = option(
        None,
        is_path=True,
        positional=True,
        example="Qwen/Qwen2.5-0.5B-Instruct",
        unset="the demo model",
        help="directory of a checkpoint, GGUF file, hub id, or a name that `oarlock models` lists; "
        "without one, the demo model of this repository",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        example="my-model alias",
        help="names that requests may use; the first is reported (default: MODEL as given)",
    )
    revision: str | None = option(None, example="v1.0", help="branch, tag or commit of a hub id (default: main)")
    tokenizer: str | None = option(
        None,
        is_path=True,
        example="Qwen/Qwen2.5-0.5B-Instruct",
        help="directory or hub id whose tokenizer and chat template are used (default: those of the model)",
    )
    chat_template: str | None = option(
        None,
        is_path=True,
        example="template.jinja",
        help="file with a chat template in Jinja (default: that of the tokenizer)",
    )
    chat_template_content_format: str = option(
        "auto",
        example="openai",
        choices=("auto", "string", "openai"),
        help="what the chat template reads as a message's content: string, one text; openai, a list of parts; auto: "
        "one text, unless the template writes parts alone",
    )
    tool_call_parser: str = option(
        "auto",
        example="qwen3_coder",
        choices=TOOL_CALL_PARSERS,
        help="format of the model's tool calls; auto: found out from the chat template",
    )
    reasoning_parser: str = option(
        "auto",
        example="deepseek_r1",
        choices=REASONING_PARSERS,
        help="marks around the model's thoughts; auto: found out from the chat template; none: thoughts are content",
    )
    download_dir: str | None = option(
        None,
        is_path=True,
        example="/data/models",
        help="where models of the hub are kept, as huggingface_hub lays them out (default: its cache, HF_HOME)",
    )
    offline: bool = option(False, help="serve hub ids from the cache, without the network")
    dtype: str = option(
        "auto",
        example="bfloat16",
        choices=("auto", "bfloat16", "float16", "float32"),
        aliases={"half": "float16", "float": "float32"},
        help="type of weights and activations; auto: the checkpoint's own, or float32 where a CPU would emulate it; "
        "half and float are float16 and float32",
    )
    quantization: str = option(
        "none",
        short="-q",
        example="int8",
        choices=("none", "int8", "int4"),
        help="round weights as they are read: int8, half of bfloat16's memory, small errors; int4, 0.28",
    )
    dequantize: bool = option(
        False,
        help="write quantised weights out in --dtype at load: exact where their products would round inputs, in the "
        "memory of an unquantised model",
    )
    load_format: str = option(
        "auto",
        example="dummy",
        choices=("auto", "safetensors", "dummy"),
        help="how weights are read; dummy: seeded random weights of the model's shape, for load tests",
    )
    check_weights: bool = option(True, help="refuse a checkpoint that holds NaN or infinity, by the tensor's name")
    runner: str = option(
        "auto",
        example="pooling",
        choices=("auto", "generate", "pooling"),
        help="generate texts, or embeddings and scores (pooling); auto: as the checkpoint's files say",
    )
    classifier_from_token: tuple[str, ...] = option(
        (),
        example="no yes",
        help="score texts by the odds of the last of these two answers; rerankers of the Qwen3 family do so "
        "(default: as config.json or modules.json says)",
    )
    generation_config: str = option(
        "auto",
        is_path=True,
        example="vllm",
        help="default sampling; auto: the model's generation_config.json; vllm: neutral; or a folder with such a file",
    )
    seed: int = option(0, example="1", limits=(0, 2**31 - 1), help="seed of dummy weights; requests have their own")
    max_model_len: int | None = option(
        None,
        example="4096",
        limits=(2, 2**24),
        is_count=True,
        aliases={"auto": FITTING},
        special=(FITTING,),
        help="longest prompt plus answer in tokens; 16k is 16,000, 16K 16,384; auto or -1: as many of the default as "
        "the KV memory holds (default: what the model was trained for)",
    )


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
        help="Unix socket to listen on in place of --host and --port; its folder decides who may connect",
    )
    ssl_certfile: str | None = option(
        None,
        is_path=True,
        example="/etc/letsencrypt/live/llm.example.org/fullchain.pem",
        help="serve HTTPS with this certificate and its chain, in PEM; renewed files are taken over within seconds",
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
        help="path below which a proxy shows this server; requests are answered with it and without",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        example="https://chat.example.org",
        help="origins whose web pages may use this server from a browser (CORS); * for any",
    )
    api_key: tuple[str, ...] = option(
        (),
        example="KEY",
        secret=True,
        help="keys that clients must send as a bearer token; better in OARLOCK_API_KEY than on the command line",
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
        help="key of the /admin routes and of /v1/requests, and of nothing else; without one /admin is closed; better "
        "in OARLOCK_ADMIN_API_KEY",
    )
    open_metrics: bool = option(
        False,
        help="answer /metrics and /v1/state without a key beyond loopback, too: for routers that have none; without "
        "any keys also /v1/requests",
    )
    web_page: bool = option(True, help="serve a web page at /: chat, the live state, and the model's card")
    allowed_hosts: tuple[str, ...] = option(
        (),
        example="llm.example.org *.lan",
        help="more names that the Host header may have where no key is required; such as the public name of a proxy; "
        "*.example.org for all below it, * for any",
    )
    max_body_size: int = option(
        16 * 2**20, example="32MiB", is_bytes=True, limits=(1024, 2**30), help="larger request bodies are refused (413)"
    )
    body_memory: int = option(
        128 * 2**20,
        example="512MiB",
        is_bytes=True,
        limits=(2**20, 2**40),
        help="memory of all requests, from the first byte of a body to the last event of its response; requests "
        "beyond it are refused (503) with Retry-After, but a single one never is",
    )
    response_store: int = option(
        64 * 2**20,
        example="0",
        is_bytes=True,
        limits=(0, 2**36),
        help="memory for the responses of /v1/responses that previous_response_id goes on from; if it is full, the API "
        "key that holds the most loses its oldest response; 0: none is kept",
    )
    batch_dir: str | None = option(
        None,
        is_path=True,
        example="/var/lib/oarlock/batches",
        help="directory for /v1/files and /v1/batches, served only with it; batches go on after a restart",
    )
    batch_dir_size: int = option(
        16 * 2**30,
        example="64GiB",
        is_bytes=True,
        limits=(2**20, 2**50),
        help="what the files of --batch-dir may hold together; more is refused (413), and a batch ends as failed; of "
        "several API keys each may hold as much as it leaves free",
    )
    strict_parameters: bool = option(
        False,
        help="refuse request parameters that are unknown or have no effect (400), not report them in a header",
    )
    strict_max_tokens: bool = option(
        False, help="refuse a token limit that does not fit the context (400) instead of lowering it"
    )
    always_stream_usage: bool = option(False, help="end every stream with a chunk of usage, even when not requested")
    ignore_model_case: bool = option(False, help="accept the served names in upper or lower case")
    request_timeout: float | None = option(
        None,
        unset="none",
        example="600",
        limits=(0.001, 86_400),
        help="seconds that any request may take, waiting included; requests may ask for less (default: no limit)",
    )
    drain_timeout: float = option(
        30.0, example="60", limits=(0, 3600), help="seconds that running requests get to finish after SIGTERM or Ctrl-C"
    )
    metrics_prefix: str = option(
        "vllm:",
        example="llm:",
        help="what names of metrics begin with that routers and dashboards read; with another they do not find them",
    )


@dataclass(frozen=True)
class DeviceSettings:
    """The ranks, and the devices and kernels that they compute with."""

    GROUP = "Devices"

    tensor_parallel_size: int = option(
        1, example="2", short="-tp", limits=(1, 64), help="number of ranks that share every layer"
    )
    pipeline_parallel_size: int = option(
        1,
        example="2",
        short="-pp",
        limits=(1, 64),
        help="number of stages, each with its part of the layers and --tensor-parallel-size ranks",
    )
    enable_expert_parallel: bool = option(
        False,
        help="of a mixture of experts each rank holds whole experts; else every rank holds a part of each",
    )
    data_parallel_size: int = option(
        1,
        example="2",
        short="-dp",
        limits=(1, 64),
        help="number of replicas on this host, each with an engine, ranks, weights and KV memory (docs/replicas.md)",
    )
    device: str = option("auto", example="cpu", choices=("auto", "cpu", "cuda"), help="where the ranks run")
    num_threads: int | None = option(
        None,
        example="4",
        limits=(1, 1024),
        help="CPU threads of one rank (default: one for each core that --cpu-affinity gives it)",
    )
    cpu_affinity: str = option(
        "auto",
        example="0-7|8-15",
        help="CPUs that a rank's threads stay on; auto: physical cores of one NUMA node, without hyper-threads and "
        "efficiency cores; none; or a list for each rank",
    )
    attention_backend: str = option(
        "auto",
        example="reference",
        choices=("auto", "cpp", "torch", "triton", "reference"),
        help="how attention is computed; triton: on CUDA devices; reference: plain torch, slow, for comparison",
    )
    enforce_eager: bool = option(
        False,
        help="launch every operation of every step, where a CUDA device would run decode steps as graphs: slower, and "
        "takes less of its memory",
    )
    batch_invariant: bool = option(
        False,
        help="serve only if answers do not depend on other requests, which the start tests; on CUDA by other "
        "kernels (docs/determinism.md)",
    )
    step_timeout: float | None = option(
        None,
        example="30",
        limits=(1, 3600),
        help="seconds after which a step counts as a hung rank and the server exits; without it 120, or four times the "
        "largest step where that is measured to take longer",
    )


@dataclass(frozen=True)
class NodeSettings:
    """One model on several hosts: their number, the number of this host, and how the hosts find each other."""

    GROUP = "Several hosts"

    distributed_executor_backend: str = option(
        "mp",
        example="ray",
        choices=("mp", RAY),
        help="who starts the parts of a model: mp: this command, on each host; ray: Ray, on nodes of its cluster, of "
        "which this host is one",
    )
    nnodes: int = option(
        1,
        example="2",
        limits=(1, 64),
        help="number of hosts that the ranks are dealt to; the same command runs on each, but for Ray (default: as "
        "torchrun or LeaderWorkerSet says; on Ray one for each stage; else 1)",
    )
    node_rank: int | None = option(
        None,
        example="1",
        limits=(0, 63),
        help="number of this host; 0, the head node, serves HTTP (default: as torchrun or LeaderWorkerSet says)",
    )
    master_addr: str | None = option(
        None, example="10.0.0.1", help="name or address of the head node (default: as torchrun or LeaderWorkerSet says)"
    )
    master_port: int = option(
        MASTER_PORT,
        example="29600",
        limits=(1, 65535),
        help="port of the store in which the hosts meet: the head node keeps it, or torchrun",
    )
    node_interface: str | None = option(
        None,
        example="eth1",
        help="network interface of this host, or its address, for all that goes between hosts (default: the one that "
        "leads to the head node)",
    )
    node_timeout: float = option(
        300.0, example="600", limits=(1, 86_400), help="seconds that the hosts wait for each other at the start"
    )


@dataclass(frozen=True)
class SchedulingSettings:
    """The limits of a step, and the memory of the KV cache."""

    GROUP = "Scheduling and memory"

    max_num_seqs: int = option(64, example="32", limits=(1, 4096), help="sequences that run at the same time")
    max_num_batched_tokens: int | None = option(
        None,
        example="4096",
        limits=(16, 2**20),
        is_count=True,
        help="tokens of one step, prompts included; without it 2048, or fewer where such a step is measured to take "
        "more than 3 seconds",
    )
    max_step_ms: float | None = option(
        None,
        example="60",
        limits=(1, 600_000),
        help="milliseconds of a step while answers are under way: prompts are computed in chunks that fit (default: "
        "2.5 times a step without prompts, as measured)",
    )
    async_scheduling: bool | None = option(
        None,
        help="schedule each step while the one before runs (default: where the engine has a core besides the ranks')",
    )
    max_waiting_requests: int = option(
        512, example="1024", limits=(1, 2**20), help="requests that may wait; beyond: 429 with Retry-After"
    )
    block_size: int = option(32, example="16", limits=(1, 1024), help="tokens in one KV block")
    kv_cache_memory: int | None = option(
        None, example="2GiB", is_bytes=True, limits=(2**16, 2**50), help="KV memory of each rank (default: measured)"
    )
    kv_cache_dtype: str = option(
        "auto",
        example="int8",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
        help="round keys and values as they are stored: int8 or fp8 (e4m3), about half of bfloat16's memory",
    )
    kv_offload_memory: int | None = option(
        None,
        unset="none",
        example="8GiB",
        is_bytes=True,
        limits=(2**16, 2**50),
        help="host memory of each rank for KV blocks that its pool evicts (default: none, or 1GiB with "
        "--kv-offload-path)",
    )
    kv_offload_path: str | None = option(
        None,
        is_path=True,
        example="/var/cache/oarlock/kv",
        help="directory for files of KV blocks that the pool evicts: they outlive a restart, and replicas on this host "
        "may share them. They hold what users' prompts were computed to (docs/replicas.md)",
    )
    kv_offload_disk: int | None = option(
        None,
        example="200GiB",
        is_bytes=True,
        limits=(2**20, 2**60),
        help="what all files in --kv-offload-path may take; those not used for the longest time are removed (default: "
        "half of what is free)",
    )
    gpu_memory_utilization: float = option(
        0.9, example="0.8", limits=(0.05, 0.99), help="share of a GPU's memory to use"
    )
    enable_prefix_caching: bool = option(True, help="keep KV blocks of shared prompt beginnings")
    speculative_config: str | None = option(
        None,
        example=SPECULATIVE.example,
        is_json=True,
        help="draft tokens by looking up the last ones in the request's own text; several are checked in one step; "
        "keys: method (ngram), num_speculative_tokens, prompt_lookup_max, prompt_lookup_min (default: no drafts)",
    )
    kv_events_config: str | None = option(
        None,
        example=KV_EVENTS.example,
        is_json=True,
        help="publish what enters and leaves the prefix cache over ZMQ, as vLLM does; keys: enable_kv_cache_events, "
        "publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic (default: nothing)",
    )


@dataclass(frozen=True)
class LogSettings:
    """Logs, traces and recordings."""

    GROUP = "Logs"

    log_level: str = option(
        "info", example="debug", choices=("debug", "info", "warning", "error"), help="least severe shown"
    )
    log_format: str = option(
        "text",
        example="json",
        choices=("text", "json"),
        help="one event a line, as key=value for people or as a JSON object for programs, of all processes",
    )
    enable_log_requests: bool = option(
        False, help="one line per request that was generated: id, tokens, times, the label of its key; never its text"
    )
    access_log: bool = option(
        False,
        help="one line per HTTP answer: client, method, path, status, bytes, seconds, the label of the key; without "
        "probes and metrics that succeed",
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
        help="write every step to this new file, for `oarlock replay`; it holds all prompts and answers as token ids",
    )
    record_limit: int | None = option(
        2**30,
        example="8GiB",
        is_bytes=True,
        limits=(2**16, 2**50),
        help="bytes after which recording stops, while serving goes on; none: no limit",
    )
