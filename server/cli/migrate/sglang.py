"""Translation of command lines of SGLang's server."""

from oarlock.server.cli.migrate.translation import (
    KnownServer,
    Theirs,
    Translation,
    holds,
    lost,
    put,
    read_flags,
    read_variables,
    same,
)

_READ = "the form of a quantised checkpoint is read from its files; --quantization rounds one that is not."
_TOOL_CALLS = {
    "qwen25": "hermes", "qwen": "hermes", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "glm": "glm45",
    "gpt-oss": "openai", "deepseekv32": "deepseek_v32", "minimax-m2": "minimax_m2",
}  # fmt: skip
_REASONING = {
    "deepseek-r1": "deepseek_r1", "qwen3-thinking": "qwen3", "gpt-oss": "openai_gptoss", "deepseek-v3": "deepseek_r1",
}  # fmt: skip
_EXPERT_RANKS = {"1": "", **dict.fromkeys(map(str, range(2, 65)), "true")}  # any value up to --tp
_OWN_KERNELS = "attention, sampling and graphs have kernels of their own."

TABLE: dict[str, Theirs] = {
    **same("model", "--model-path", "--model"),
    **same("tokenizer", "--tokenizer-path"),
    **same("served_model_name", "--served-model-name"),
    **same("revision", "--revision"),
    **same("host", "--host"),
    **same("port", "--port"),
    **same("api_key", "--api-key"),
    **same("admin_api_key", "--admin-api-key"),
    **same("tensor_parallel_size", "--tp", "--tp-size", "--tensor-parallel-size"),
    **same("pipeline_parallel_size", "--pp", "--pp-size", "--pipeline-parallel-size"),
    **same("data_parallel_size", "--dp", "--dp-size", "--data-parallel-size"),
    **same("nnodes", "--nnodes"),
    **same("node_rank", "--node-rank"),
    **same("dtype", "--dtype"),
    **same("kv_cache_dtype", "--kv-cache-dtype", values={"bf16": "", "bfloat16": ""}),
    **same("max_model_len", "--context-length"),
    **same("max_num_seqs", "--max-running-requests"),
    **same("max_waiting_requests", "--max-queued-requests"),
    **same("max_num_batched_tokens", "--chunked-prefill-size"),
    **same("block_size", "--page-size"),
    **same(
        "gpu_memory_utilization", "--mem-fraction-static",
        holds="theirs leaves out what a step takes, --gpu-memory-utilization counts it: raise it where memory is left.",
    ),
    **same("seed", "--random-seed"),
    **same("load_format", "--load-format"),
    **same("download_dir", "--download-dir"),
    **same("device", "--device"),
    **same("chat_template", "--chat-template"),
    **same("tool_call_parser", "--tool-call-parser", values=_TOOL_CALLS),
    **same("reasoning_parser", "--reasoning-parser", values=_REASONING),
    **same("log_level", "--log-level"),
    **same("step_timeout", "--watchdog-timeout"),
    **same("root_path", "--fastapi-root-path"),
    **same("ssl_keyfile", "--ssl-keyfile"),
    **same("ssl_certfile", "--ssl-certfile"),
    **same("enable_log_requests", "--log-requests", switch=True, values={"": "true"}),
    **same("runner", "--is-embedding", switch=True, values={"": "pooling"}),
    **same("enable_prefix_caching", "--disable-radix-cache", switch=True, values={"": "false"}),
    **same("async_scheduling", "--disable-overlap-schedule", switch=True, values={"": "false"}),
    **same("enforce_eager", "--disable-cuda-graph", switch=True, values={"": "true"}),
    **same("batch_invariant", "--enable-deterministic-inference", switch=True, values={"": "true"}),
    **same("enable_expert_parallel", "--ep", "--ep-size", "--expert-parallel-size", values=_EXPERT_RANKS),
    **same("enable_expert_parallel", "--enable-ep-moe", switch=True, values={"": "true"}),
    **holds("ranks that hold whole experts exchange sums, as all ranks do.", "--moe-a2a-backend"),
    **holds("ranks that hold whole experts exchange sums, as all ranks do.", "--enable-deepep-moe", switch=True),
    **holds(_READ, "--quantization"),
    **holds(
        "code of a checkpoint is never run, and no model that is served needs any.",
        "--trust-remote-code", switch=True,
    ),
    **holds(_OWN_KERNELS, "--attention-backend", "--prefill-attention-backend", "--decode-attention-backend",
            "--sampling-backend", "--cuda-graph-max-bs", "--mm-attention-backend", "--moe-runner-backend"),
    **holds(_OWN_KERNELS, "--enable-flashinfer-mla", "--enable-torch-compile", "--triton-attention-reduce-in-fp32",
            "--disable-custom-all-reduce", "--enable-p2p-check", "--enable-symm-mem", switch=True),
    **holds("GET /metrics is always there.", "--enable-metrics", switch=True),
    **holds("usage always includes cached tokens.", "--enable-cache-report", switch=True),
    **holds("grammars are compiled by llguidance.", "--grammar-backend"),
    **holds("prompts are computed in chunks beside running answers.", "--enable-mixed-chunk", switch=True),
    **holds("the start measures how many tokens there is memory for.", "--max-total-tokens", "--max-prefill-tokens"),
    **holds("waiting requests run by priority, share and waiting time.", "--schedule-policy",
            "--schedule-conservativeness"),
    **holds("each token is sent when it is there.", "--stream-interval"),
    **holds("the start computes a step before it is ready.", "--skip-server-warmup", "--disable-tokenizer-batch-decode",
            switch=True),
    **holds("texts are tokenized in a pool of threads.", "--tokenizer-worker-num"),
    **holds("the checkpoint's own fast tokenizer is used.", "--tokenizer-mode"),
    **holds("the log shows no text of requests.", "--log-requests-level"),
    **lost("adapters are not served; merge them into the checkpoint.", "--lora-paths", "--max-loras-per-batch",
           "--max-lora-rank", many=True),
    **lost("adapters are not served; merge them into the checkpoint.", "--enable-lora", switch=True),
    **lost("--speculative-config has what there is of speculation.", "--speculative-algorithm", "--speculative-algo",
           "--speculative-draft-model-path", "--speculative-num-steps", "--speculative-eagle-topk",
           "--speculative-num-draft-tokens"),
    **lost("attention is divided among the ranks of a model.", "--enable-dp-attention", "--enable-dp-lm-head",
           switch=True),
    **lost("--kv-offload-memory and --kv-offload-path keep blocks that the pool evicts.", "--hicache-ratio",
           "--hicache-size", "--hicache-storage-backend", "--hicache-write-policy"),
    **lost("--kv-offload-memory and --kv-offload-path keep blocks that the pool evicts.", "--enable-hierarchical-cache",
           switch=True),
    **lost("weights stay on the device.", "--cpu-offload-gb"),
    **lost("CUDA_VISIBLE_DEVICES says which devices are used.", "--base-gpu-id"),
    **lost("config.json is used as it is; edit a copy of the checkpoint.", "--json-model-override-args"),
    **lost("models take text only.", "--enable-multimodal", switch=True),
    **lost("prompts and answers are computed by the same ranks.", "--disaggregation-mode",
           "--disaggregation-transfer-backend", "--disaggregation-ib-device"),
    **lost("texts are always tokenized here.", "--skip-tokenizer-init", switch=True),
    **lost("weights are rounded by --quantization int8 or int4.", "--torchao-config"),
}  # fmt: skip
_NODES = ("--dist-init-addr", "--nccl-init-addr")


def translate(words: list[str], variables: dict[str, str]) -> Translation:
    """Translate `words`, which follow `sglang.launch_server`."""
    found = Translation()
    read_variables(found, variables, {}, "SGLANG_")
    rest: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in _NODES:
            rest.append(word)
            continue
        value = value if equals or not words else words.pop(0)
        host, _, port = value.rpartition(":")
        found.set(f"{flag} {value}", "master_addr", [host])
        put(found, f"{flag} {value}", Theirs("master_port"), [port])
    others = read_flags(found, rest, TABLE)
    if others and found.model is None:
        found.model = others.pop(0)
    for word in others:
        found.lost.append((word, "it stands behind no flag."))
    _template(found)
    return found


def _template(found: Translation) -> None:
    """Drop a template that SGLang includes under a name: ours are files."""
    given = found.value("chat_template")
    if given is not None and "/" not in given and not given.endswith((".jinja", ".jinja2", ".txt", ".json")):
        del found.flags["chat_template"]
        found.lost.append((f"--chat-template {given}", "templates are files; without one the checkpoint's is used."))


SGLANG = KnownServer(
    translate,
    host="127.0.0.1",
    port=30000,
    address_note="SGLang listens on port 30000 unless told otherwise.",
    port_in_image=30000,
)
