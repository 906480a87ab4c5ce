"""Translation of llama-server's command lines, and of Ollama's commands and variables."""

import re

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


def translate_llama_server(words: list[str], variables: dict[str, str]) -> Translation:
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
    """Listen on a Unix socket if the host ends in .sock. llama-server does the same, and then uses no port."""
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
    translate_llama_server,
    host="127.0.0.1",
    port=8080,
    address_note="llama-server listens on port 8080 unless told otherwise; since October 2026 on 9931.",
    port_in_image=8080,
)


_HOST, _PORT = "127.0.0.1", 11434
OLLAMA_COMMANDS = ("serve", "start", "run")
_HUB_MODEL = re.compile(r"(?:hf\.co|huggingface\.co)/([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_ONE_MODEL = "a server holds one model from its start to its end; another server serves another."
_ON = {"1": "debug", "2": "debug", "true": "debug", "0": "", "false": ""}

VARIABLES: dict[str, Theirs] = {
    **same("allowed_origins", "OLLAMA_ORIGINS", is_list=True),
    **same("max_num_seqs", "OLLAMA_NUM_PARALLEL", values={"0": ""}),
    **same("max_waiting_requests", "OLLAMA_MAX_QUEUE"),
    **same("max_model_len", "OLLAMA_CONTEXT_LENGTH", values={"0": ""}),
    **same("kv_cache_dtype", "OLLAMA_KV_CACHE_TYPE", values={"f16": "", "q8_0": "int8"}),
    **same("log_level", "OLLAMA_DEBUG", values=_ON),
    **holds(_ONE_MODEL, "OLLAMA_KEEP_ALIVE", "OLLAMA_MAX_LOADED_MODELS", "OLLAMA_LOAD_TIMEOUT"),
    **holds("attention never writes out its scores.", "OLLAMA_FLASH_ATTENTION"),
    **holds("prompt beginnings are cached for all users.", "OLLAMA_MULTIUSER_CACHE"),
    **holds("there is one engine.", "OLLAMA_NEW_ENGINE", "OLLAMA_NEW_ESTIMATES"),
    **holds("nothing here does that.", "OLLAMA_NOPRUNE", "OLLAMA_NOHISTORY"),
    **lost("files of Ollama's store are not read: give a GGUF file, or a hub id.", "OLLAMA_MODELS"),
    **lost("a model is divided by --tensor-parallel-size.", "OLLAMA_SCHED_SPREAD"),
    **lost("--gpu-memory-utilization leaves memory to others.", "OLLAMA_GPU_OVERHEAD", "OLLAMA_MAX_VRAM"),
    **lost("--device says where a model is computed.", "OLLAMA_LLM_LIBRARY", "OLLAMA_INTEL_GPU"),
}
_FLAGS: dict[str, Theirs] = {
    **holds(_ONE_MODEL, "--keepalive"),
    **holds("`oarlock chat` shows the times of an answer with /stats.", "--verbose", switch=True),
    **holds("a terminal wraps lines itself.", "--nowordwrap", switch=True),
    **holds("hub ids are fetched over HTTPS.", "--insecure", switch=True),
    **lost("requests carry chat_template_kwargs or reasoning_effort.", "--think"),
    **lost("requests carry chat_template_kwargs or reasoning_effort.", "--hidethinking", switch=True),
    **lost("requests carry response_format.", "--format"),
    **lost("requests for vectors carry dimensions.", "--dimensions"),
}


def translate_ollama(words: list[str], variables: dict[str, str]) -> Translation:
    """Translate `words`, which follow `ollama` and begin with a command in `OLLAMA_COMMANDS`."""
    found = Translation()
    variables = dict(variables)
    host = variables.pop("OLLAMA_HOST", None)
    read_variables(found, variables, VARIABLES, "OLLAMA_")
    if host is not None:
        _listen(found, host)
    others = read_flags(found, words[1:], _FLAGS)
    if words[0] == "run":
        if others:
            _model(found, others.pop(0))
        if others:
            found.notes.append((" ".join(others), "ask it of the server: oarlock chat, or POST /v1/chat/completions."))
        found.notes.append(("ollama run", "this line serves; in another terminal `oarlock chat` talks to it."))
    else:
        found.notes.append(("ollama serve", f"name the model behind `oarlock serve`: {_ONE_MODEL}"))
    return found


def _model(found: Translation, name: str) -> None:
    hub = _HUB_MODEL.fullmatch(name)
    if hub is None:
        found.lost.append((name, "names of Ollama's library mean nothing here: give a GGUF file, or a hub id."))
        return
    found.model = hub[1]
    which = f"the file of {hub[2]}" if hub[2] else "a file"
    found.lost.append((name, f"GGUF files are not fetched: download {which}, and give its path for {hub[1]}."))


def _listen(found: Translation, text: str) -> None:
    """Read `[http://]HOST[:PORT][/]` as Ollama does: without a host every address, without a port 11434."""
    written = f"OLLAMA_HOST={text}"
    scheme, separator, rest = text.rpartition("://")
    rest = rest.partition("/")[0]
    usual = {"http": "80", "https": "443"}.get(scheme, str(_PORT)) if separator else str(_PORT)
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*|[0-9a-fA-F:]+:[0-9a-fA-F:]*)(?::(\d+))?", rest)
    if match is None:
        found.lost.append((written, "it is no address."))
        return
    host, port = match[1].strip("[]"), match[2] or usual
    if scheme == "https":
        found.lost.append((written, "HTTPS needs --ssl-certfile and --ssl-keyfile."))
    found.set(written, "host", [host or ("0.0.0.0" if match[2] else _HOST)])
    found.set(written, "port", [port])


OLLAMA = KnownServer(
    translate_ollama,
    host=_HOST,
    port=_PORT,
    address_note="Ollama listens on port 11434 unless told otherwise; clients of its own API need one of OpenAI's.",
    port_in_image=_PORT,
)
