"""Translation of Text Generation Inference's command lines, whose variables have the names of its flags."""

from oarlock.server.cli.migrate.translation import (
    KnownServer,
    Theirs,
    Translation,
    holds,
    lost,
    read_flags,
    read_variables,
    same,
)

_READ = "the form of a quantised checkpoint is read from its files; --quantization rounds one that is not."
_OTHER_ROUNDING = (
    "both take {} bits a weight, but round in other ways, so answers differ; a quantised checkpoint is served as it is."
)
_QUANTIZE = {
    **dict.fromkeys(("awq", "gptq", "fp8", "compressed-tensors"), Theirs(holds=_READ)),
    **dict.fromkeys(("bitsandbytes", "eetq"), Theirs("quantization", _OTHER_ROUNDING.format(8))),
    **dict.fromkeys(("bitsandbytes-nf4", "bitsandbytes-fp4"), Theirs("quantization", _OTHER_ROUNDING.format(4))),
    **dict.fromkeys(("marlin", "exl2"), Theirs(holds="checkpoints of this form are not read.", is_lost=True)),
}
_BITS = {"bitsandbytes": "int8", "eetq": "int8", "bitsandbytes-nf4": "int4", "bitsandbytes-fp4": "int4"}

TABLE: dict[str, Theirs] = {
    **same("model", "--model-id"),
    **same("revision", "--revision"),
    **same("served_model_name", "--served-model-name"),
    **same("tensor_parallel_size", "--num-shard"),
    **same("dtype", "--dtype"),
    **same("kv_cache_dtype", "--kv-cache-dtype", values={"fp8_e4m3fn": "fp8_e4m3"}),
    **same("max_model_len", "--max-total-tokens"),
    **same("max_num_batched_tokens", "--max-batch-prefill-tokens"),
    **same("max_num_seqs", "--max-batch-size"),
    **same("max_waiting_requests", "--max-concurrent-requests"),
    **same("gpu_memory_utilization", "--cuda-memory-fraction", values={"1.0": "0.99", "1": "0.99"}),
    **same("host", "--hostname"),
    **same("port", "-p", "--port"),
    **same("api_key", "--api-key"),
    **same("download_dir", "--huggingface-hub-cache", "--weights-cache-override"),
    **same("max_body_size", "--payload-limit"),
    **same("allowed_origins", "--cors-allow-origin", is_list=True),
    **same("log_format", "--json-output", switch=True, values={"": "json"}),
    **holds("as many ranks as --tensor-parallel-size says.", "--sharded"),
    **holds("a prompt may take what the context leaves for it.", "--max-input-tokens", "--max-input-length"),
    **holds("the start measures how many tokens there is memory for.", "--max-batch-total-tokens"),
    **holds(
        "prompts are computed beside running answers, in chunks.",
        "--waiting-served-ratio", "--max-waiting-tokens",
    ),
    **holds(
        "code of a checkpoint is never run, and no model that is served needs any.",
        "--trust-remote-code", switch=True,
    ),
    **holds("GET /metrics is on the port of the server.", "--prometheus-port"),
    **holds("graphs are captured for the sizes that there is memory for.", "--cuda-graphs"),
    **holds("texts are tokenized in a pool of threads.", "--validation-workers"),
    **holds("nothing is sent to anybody.", "--usage-stats"),
    **holds("requests may ask for prompt_logprobs.", "--enable-prefill-logprobs", switch=True),
    **holds("requests may ask for 20 alternatives of a token.", "--max-top-n-tokens"),
    **holds("shared memory and pipes have no names.", "--shard-uds-path"),
    **lost("requests may ask for 64 stop strings at most, and no flag changes it.", "--max-stop-sequences"),
    **lost("requests may ask for grammars, and no flag forbids it.", "--disable-grammar-support", switch=True),
    **lost("kernels are chosen by --attention-backend.", "--disable-custom-kernels", switch=True),
    **lost("traces go over HTTP, not gRPC: --otlp-traces-endpoint.", "--otlp-endpoint"),
    **lost("OTEL_SERVICE_NAME names the service of traces.", "--otlp-service-name"),
    **lost("adapters are not served; merge them into the checkpoint.", "--lora-adapters"),
    **lost("--speculative-config has what there is of speculation.", "--speculate"),
    **lost("positions are scaled as the model defines them.", "--rope-scaling", "--rope-factor"),
    **lost("requests may ask for 128 choices at most, and no flag changes it.", "--max-best-of"),
    **lost("a request has as many inputs as its route allows, and no flag changes it.", "--max-client-batch-size"),
    **lost("--chat-template FILE and --tokenizer take the place of the model's.", "--tokenizer-config-path"),
    **lost("answers carry no watermark.", "--watermark-gamma", "--watermark-delta"),
    **lost("no tunnel is opened.", "--ngrok-authtoken", "--ngrok-edge"),
    **lost("no tunnel is opened.", "--ngrok", switch=True),
}  # fmt: skip
_VARIABLES = {flag[2:].upper().replace("-", "_"): theirs for flag, theirs in TABLE.items() if flag.startswith("--")}
_MEANT_FOR_TORCH = ("MASTER_ADDR", "MASTER_PORT")


def translate(words: list[str], variables: dict[str, str]) -> Translation:
    """Translate `words`, which follow `text-generation-launcher`."""
    found = Translation()
    method = variables.pop("QUANTIZE", None)
    for name in _MEANT_FOR_TORCH:
        variables.pop(name, None)
    read_variables(found, variables, _VARIABLES, "")
    rest: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag == "--quantize":
            method = value if equals or not words else words.pop(0)
        else:
            rest.append(word)
    for word in read_flags(found, rest, TABLE):
        found.lost.append((word, "it stands behind no flag."))
    if method is not None:
        _quantize(found, method)
    return found


def _quantize(found: Translation, method: str) -> None:
    written, theirs = f"--quantize {method}", _QUANTIZE.get(method)
    if theirs is None:
        found.lost.append((written, "there is no such form of weights."))
    elif theirs.option:
        found.set(written, theirs.option, [_BITS[method]])
        found.notes.append((written, theirs.holds))
    else:
        (found.lost if theirs.is_lost else found.notes).append((written, theirs.holds))


TGI = KnownServer(
    translate,
    host="0.0.0.0",
    port=3000,
    address_note="TGI listens on every address unless told otherwise; --host 127.0.0.1 is this machine alone.",
    port_in_image=80,
)
