"""Translates command lines of llama-server."""

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
from oarlock.server.config.options import parse_count

_SAMPLING = "defaults of sampling are the checkpoint's (generation_config.json); requests set their own."
_CACHE_TYPES = {"f16": "", "bf16": "", "f32": "", "q8_0": "int8"}
_LAYERS = "all layers are on the GPU, where there is one, or all on the CPU: --device."
_NOT_FETCHED = "GGUF files are not fetched: download the file, and give its path as MODEL."

TABLE: dict[str, Theirs] = {
    **same("model", "-m", "--model"),
    **same("served_model_name", "-a", "--alias", is_list=True),
    **same("host", "--host"),
    **same("port", "--port"),
    **same("api_key", "--api-key", is_list=True),
    **same("api_key_file", "--api-key-file"),
    **same("ssl_keyfile", "--ssl-key-file"),
    **same("ssl_certfile", "--ssl-cert-file"),
    **same("allowed_origins", "--cors-origins", is_list=True),
    **same("root_path", "--api-prefix"),
    **same("max_model_len", "-c", "--ctx-size", values={"0": ""}),
    **same("max_num_seqs", "-np", "--parallel", values={"-1": ""}),
    **same("max_num_batched_tokens", "-b", "--batch-size"),
    **same("num_threads", "-t", "--threads", values={"-1": ""}),
    **same("kv_cache_dtype", "-ctk", "--cache-type-k", values=_CACHE_TYPES),
    **same("seed", "-s", "--seed", values={"-1": ""}),
    **same("chat_template", "--chat-template-file"),
    **same("request_timeout", "-to", "--timeout"),
    **same("offline", "--offline", switch=True),
    **same("runner", "--embedding", "--embeddings", switch=True, values={"": "pooling"}),
    **same("web_page", "--no-webui", "--no-ui", switch=True, values={"": "false"}),
    **same("enable_prefix_caching", "--no-cache-prompt", switch=True, values={"": "false"}),
    **same("check_weights", "--check-tensors", switch=True),
    **same("log_level", "-v", "--verbose", "--log-verbose", switch=True, values={"": "debug"}),
    **same("log_format", "--log-jsonl", switch=True, values={"": "json"}),
    **same(
        "log_level", "-lv", "--verbosity", "--log-verbosity",
        values={"0": "error", "1": "error", "2": "warning", "3": "info", "4": "debug", "5": "debug"},
    ),
    **holds("rerankers are known by their files.", "--rerank", "--reranking", switch=True),
    **holds("there is a page at / unless --no-web-page is given.", "--webui", "--ui", switch=True),
    **holds("the cache of values has the type of the keys.", "-ctv", "--cache-type-v"),
    **holds("one number limits a step: --max-num-batched-tokens.", "-ub", "--ubatch-size"),
    **holds("prompts use the threads of answers.", "-tb", "--threads-batch"),
    **holds("one process reads and writes HTTP.", "--threads-http"),
    **holds("attention never writes out its scores.", "-fa", "--flash-attn"),
    **holds("requests join and leave the batch at every step.", "-cb", "--cont-batching", switch=True),
    **holds("one pool of KV blocks is shared by all requests.", "-kvu", "--kv-unified", switch=True),
    **holds("the checkpoint's chat template is always used.", "--jinja", switch=True),
    **holds("GET /metrics is always there.", "--metrics", switch=True),
    **holds("GET /v1/state has what runs now.", "--slots", switch=True),
    **holds("GET /v1/state has what runs now, and --admin-api-key closes it.", "--no-slots", switch=True),
    **holds("weights are copied into memory of each rank.", "--mlock", "--no-mmap", "--mmap", switch=True),
    **holds("weights are copied into memory of each rank.", "-lm", "--load-mode"),
    **holds("ranks keep to the CPUs that --cpu-affinity names.", "--numa"),
    **holds("prompt beginnings are cached for all requests.", "--cache-reuse", "-cram", "--cache-ram"),
    **holds("prompt beginnings are cached for all requests.", "--cache-prompt", switch=True),
    **holds("thoughts are found by the chat template's markers.", "--reasoning-format"),
    **holds("answers end where the context does.", "--no-context-shift", switch=True),
    **holds("the start measures the steps.", "--warmup", "--no-warmup", switch=True),
    **holds("the log has no colours.", "--log-colors"),
    **holds("every line of the log has its time.", "--log-timestamps", "--log-prefix", switch=True),
    **holds("models take text only.", "--no-mmproj", switch=True),
    **holds("the memory of the KV cache is measured.", "-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx"),
    **holds("requests set their own limit of tokens.", "-n", "--predict", "--n-predict"),
    **lost("a model is divided by --tensor-parallel-size, into equal parts.",
           "-sm", "--split-mode", "-ts", "--tensor-split"),
    **lost("a model lies on one kind of device: --device.", "-dev", "--device", "-mg", "--main-gpu"),
    **lost("all weights are on one device.", "-ot", "--override-tensor", "-ncmoe", "--n-cpu-moe"),
    **lost("all weights are on one device.", "-cmoe", "--cpu-moe", switch=True),
    **lost("templates are files: --chat-template FILE.", "--chat-template"),
    **lost("requests carry chat_template_kwargs.", "--chat-template-kwargs", "--reasoning-budget", "-rea",
           "--reasoning", "--reasoning-effort"),
    **lost(
        _SAMPLING,
        "--temp", "--temperature", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--repeat-last-n",
        "--presence-penalty", "--frequency-penalty", "--samplers", "-l", "--logit-bias",
    ),
    **lost("requests carry grammars and schemas.", "--grammar", "--grammar-file", "-j", "--json-schema"),
    **lost(
        "--speculative-config has what there is of speculation.",
        "-md", "--model-draft", "--draft", "--draft-max", "--draft-min", "-ngld", "--gpu-layers-draft", "--spec-type",
    ),
    **lost("adapters are not served; merge them into the checkpoint.", "--lora", "--lora-scaled", "--control-vector"),
    **lost("models take text only.", "-mm", "--mmproj", "--mmproj-url"),
    **lost(
        "positions are scaled as the model defines them.",
        "--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx",
    ),
    **lost("the metadata of the file is used as it is.", "--override-kv"),
    **lost("vectors are made as the model's files say.", "--pooling", "--embd-normalize"),
    **lost("the log goes to standard error.", "--log-file"),
    **lost("one server serves one model.", "--models-dir", "--models-preset", "--models-max"),
    **lost("prompts are kept in memory: --kv-offload-path keeps them in files.", "--slot-save-path"),
    **lost("static files are another server's.", "--path"),
    **lost(_NOT_FETCHED, "-mu", "--model-url", "-dr", "--docker-repo"),
}  # fmt: skip
_HUB = ("-hf", "-hfr", "--hf-repo")
_FILE = ("-hff", "--hf-file")
_TOKEN = ("-hft", "--hf-token")
_LAYER_FLAGS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_VARIABLES: dict[str, Theirs] = {
    f"LLAMA_ARG_{name}": TABLE[flag]
    for name, flag in {
        "MODEL": "-m", "ALIAS": "-a", "HOST": "--host", "PORT": "--port", "CTX_SIZE": "-c", "N_PARALLEL": "-np",
        "BATCH": "-b", "UBATCH": "-ub", "THREADS": "-t", "CACHE_TYPE_K": "-ctk", "CACHE_TYPE_V": "-ctv",
        "FLASH_ATTN": "-fa", "ENDPOINT_METRICS": "--metrics", "CONT_BATCHING": "-cb", "JINJA": "--jinja",
    }.items()
} | {"LLAMA_API_KEY": TABLE["--api-key"]}  # fmt: skip


def translate(words: list[str], variables: dict[str, str]) -> Translation:
    """Translate `words`, which follow `llama-server`."""
    found = Translation()
    layers = variables.pop("LLAMA_ARG_N_GPU_LAYERS", None)
    repository = variables.pop("LLAMA_ARG_HF_REPO", None)
    file = variables.pop("LLAMA_ARG_HF_FILE", None)
    read_variables(found, variables, _VARIABLES, "LLAMA_")
    rest: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in (*_HUB, *_FILE, *_TOKEN, *_LAYER_FLAGS):
            rest.append(word)
            continue
        value = value if equals or not words else words.pop(0)
        if flag in _HUB:
            repository = value
        elif flag in _FILE:
            file = value
        elif flag in _TOKEN:
            found.environment["HF_TOKEN"] = value
        else:
            layers = value
    for word in read_flags(found, rest, TABLE):
        found.lost.append((word, "it stands behind no flag."))
    _hub(found, repository, file)
    _layers(found, layers)
    _socket(found)
    _context(found)
    return found


def _hub(found: Translation, repository: str | None, file: str | None) -> None:
    if repository is None:
        return
    name, _, form = repository.partition(":")
    written = f"-hf {repository}" + (f" -hff {file}" if file else "")
    which = file or (f"the file of {form}" if form else "a file")
    found.model = name
    found.lost.append((written, f"GGUF files are not fetched: download {which}, and give its path for {name}."))


def _layers(found: Translation, layers: str | None) -> None:
    if layers == "0":
        found.set("-ngl 0", "device", ["cpu"])
    elif layers is not None:
        found.notes.append((f"-ngl {layers}", _LAYERS))


def _socket(found: Translation) -> None:
    """Listen on a Unix socket where the host ends in .sock, as llama-server does, which then uses no port."""
    host = found.value("host") or ""
    if host.endswith(".sock"):
        del found.flags["host"]
        found.set(f"--host {host}", "uds", [host])
        if found.flags.pop("port", None):
            found.notes.append(("--port", "a Unix socket has none."))
    elif "," in host:
        found.flags["host"][1] = host.split(",")[0]
        found.lost.append((f"--host {host}", "one address is listened on; 0.0.0.0 is all of them."))


def _context(found: Translation) -> None:
    """Divide the context among the slots, as llama-server does unless they share it."""
    whole, each = found.value("max_model_len"), found.value("max_num_seqs")
    is_shared = any(written in ("-kvu", "--kv-unified") for written, _ in found.notes)
    if whole is None or each is None or is_shared or "$" in whole + each:
        return
    tokens = parse_count(whole) // int(each)
    del found.flags["max_model_len"]
    if found.set(f"-c {whole} -np {each}", "max_model_len", [str(tokens)]):
        found.notes.append((f"-c {whole} -np {each}", "--max-model-len is of one request, so it is the quotient."))


LLAMA_SERVER = KnownServer(
    translate,
    host="127.0.0.1",
    port=8080,
    address_note="llama-server listens on port 8080 unless told otherwise; since October 2026 on 9931.",
    port_in_image=8080,
)
