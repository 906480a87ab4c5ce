"""The flags of llama-server and of Text Generation Inference, and what each is here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Theirs:
    """One flag. Without `option` it asks for what `holds`, or, if `is_lost`, for what there is not."""

    option: str = ""  # ours, or "model"
    holds: str = ""  # a sentence
    is_switch: bool = False
    is_lost: bool = False
    values: dict[str, str] = field(
        default_factory=dict
    )  # their value -> ours; "" drops the flag, others pass as they are


def _same(option: str, *names: str, switch: bool = False, values: dict[str, str] | None = None) -> dict[str, Theirs]:
    return dict.fromkeys(names, Theirs(option, is_switch=switch, values=values or {}))


def _holds(sentence: str, *names: str, switch: bool = False) -> dict[str, Theirs]:
    return dict.fromkeys(names, Theirs(holds=sentence, is_switch=switch))


def _lost(sentence: str, *names: str, switch: bool = False) -> dict[str, Theirs]:
    return dict.fromkeys(names, Theirs(holds=sentence, is_switch=switch, is_lost=True))


_SAMPLING = "defaults of sampling are the checkpoint's (generation_config.json); requests set their own."
_CACHE_TYPES = {"f16": "", "bf16": "", "f32": "", "q8_0": "int8"}

LLAMA_SERVER: dict[str, Theirs] = {
    **_same("model", "-m", "--model", "-hf", "-hfr", "--hf-repo"),
    **_same("served_model_name", "-a", "--alias"),
    **_same("host", "--host"),
    **_same("port", "--port"),
    **_same("api_key", "--api-key"),
    **_same("api_key_file", "--api-key-file"),
    **_same("ssl_keyfile", "--ssl-key-file"),
    **_same("ssl_certfile", "--ssl-cert-file"),
    **_same("root_path", "--api-prefix"),
    **_same("max_model_len", "-c", "--ctx-size", values={"0": ""}),
    **_same("max_num_seqs", "-np", "--parallel", values={"-1": ""}),
    **_same("max_num_batched_tokens", "-b", "--batch-size"),
    **_same("num_threads", "-t", "--threads", values={"-1": ""}),
    **_same("kv_cache_dtype", "-ctk", "--cache-type-k", values=_CACHE_TYPES),
    **_same("device", "-ngl", "--gpu-layers", "--n-gpu-layers", values={"0": "cpu"}),
    **_same("seed", "-s", "--seed", values={"-1": ""}),
    **_same("chat_template", "--chat-template-file"),
    **_same("request_timeout", "-to", "--timeout"),
    **_same("offline", "--offline", switch=True),
    **_same("runner", "--embedding", "--embeddings", switch=True, values={"": "pooling"}),
    **_holds("rerankers are known by their files.", "--rerank", "--reranking", switch=True),
    **_same("web_page", "--no-webui", switch=True, values={"": "false"}),
    **_holds("the cache of values has the type of the keys.", "-ctv", "--cache-type-v"),
    **_holds("one number limits a step: --max-num-batched-tokens.", "-ub", "--ubatch-size"),
    **_holds("prompts use the threads of answers.", "-tb", "--threads-batch"),
    **_holds("attention never writes out its scores.", "-fa", "--flash-attn"),
    **_holds("requests join and leave the batch at every step.", "-cb", "--cont-batching", switch=True),
    **_holds("the checkpoint's chat template is always used.", "--jinja", switch=True),
    **_holds("GET /metrics is always there.", "--metrics", switch=True),
    **_holds("GET /v1/state has what runs now.", "--slots", switch=True),
    **_holds("weights are copied into memory of each rank.", "--mlock", "--no-mmap", switch=True),
    **_holds("ranks keep to the CPUs that --cpu-affinity names.", "--numa"),
    **_holds("prompt beginnings are cached for all requests.", "--cache-reuse", "-cram", "--cache-ram"),
    **_holds("thoughts are found by the chat template's markers.", "--reasoning-format"),
    **_lost(
        "a model is divided by --tensor-parallel-size, into equal parts.",
        "-sm", "--split-mode", "-ts", "--tensor-split",
    ),
    **_lost("a model lies on one kind of device: --device.", "-dev", "--device", "-mg", "--main-gpu"),
    **_lost("templates are files: --chat-template FILE.", "--chat-template"),
    **_lost(
        _SAMPLING,
        "--temp", "--temperature", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "-n", "--predict",
    ),
    **_lost(
        "--speculative-config has what there is of speculation.",
        "-md", "--model-draft", "--draft-max", "--draft-min",
    ),
    **_lost("adapters are not served; merge them into the checkpoint.", "--lora", "--lora-scaled", "--control-vector"),
    **_lost("models take text only.", "-mm", "--mmproj"),
    **_lost(
        "positions are scaled as the model defines them.",
        "--rope-scaling", "--rope-scale", "--rope-freq-base", "--yarn-orig-ctx",
    ),
    **_lost("the log has levels with names: --log-level.", "-lv", "--verbosity", "--log-verbosity"),
    **_lost("the log goes to standard error.", "--log-file"),
}  # fmt: skip

TGI: dict[str, Theirs] = {
    **_same("model", "--model-id"),
    **_same("revision", "--revision"),
    **_same("served_model_name", "--served-model-name"),
    **_same("tensor_parallel_size", "--num-shard"),
    **_same("dtype", "--dtype"),
    **_same("kv_cache_dtype", "--kv-cache-dtype", values={"fp8_e4m3fn": "fp8_e4m3"}),
    **_same(
        "quantization", "--quantize",
        values={**dict.fromkeys(("awq", "gptq", "marlin", "fp8", "compressed-tensors", "exl2"), ""),
                "bitsandbytes": "int8", "eetq": "int8", "bitsandbytes-nf4": "int4", "bitsandbytes-fp4": "int4"},
    ),
    **_same("max_model_len", "--max-total-tokens"),
    **_same("max_num_batched_tokens", "--max-batch-prefill-tokens"),
    **_same("max_num_seqs", "--max-batch-size"),
    **_same("max_waiting_requests", "--max-concurrent-requests"),
    **_same("gpu_memory_utilization", "--cuda-memory-fraction"),
    **_same("host", "--hostname"),
    **_same("port", "-p", "--port"),
    **_same("api_key", "--api-key"),
    **_same("download_dir", "--huggingface-hub-cache"),
    **_same("max_body_size", "--payload-limit"),
    **_same("allowed_origins", "--cors-allow-origin"),
    **_same("log_format", "--json-output", switch=True, values={"": "json"}),
    **_holds("as many ranks as --tensor-parallel-size says.", "--sharded"),
    **_holds("a prompt may take what the context leaves for it.", "--max-input-tokens", "--max-input-length"),
    **_holds("the start measures how many tokens there is memory for.", "--max-batch-total-tokens"),
    **_holds(
        "prompts are computed beside running answers, in chunks.",
        "--waiting-served-ratio", "--max-waiting-tokens",
    ),
    **_holds(
        "code of a checkpoint is never run, and no model that is served needs any.",
        "--trust-remote-code", switch=True,
    ),
    **_holds("GET /metrics is on the port of the server.", "--prometheus-port"),
    **_holds("graphs are captured for the sizes that there is memory for.", "--cuda-graphs"),
    **_lost("requests may ask for grammars, and no flag forbids it.", "--disable-grammar-support", switch=True),
    **_lost("traces go over HTTP, not gRPC: --otlp-traces-endpoint.", "--otlp-endpoint"),
    **_lost("adapters are not served; merge them into the checkpoint.", "--lora-adapters"),
    **_lost("--speculative-config has what there is of speculation.", "--speculate"),
    **_lost("positions are scaled as the model defines them.", "--rope-scaling", "--rope-factor"),
    **_lost("requests may ask for 128 choices at most, and no flag changes it.", "--max-best-of"),
}  # fmt: skip
