"""Translates Ollama's commands and variables."""

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

_HOST, _PORT = "127.0.0.1", 11434
COMMANDS = ("serve", "start", "run")
_HUB = re.compile(r"(?:hf\.co|huggingface\.co)/([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
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


def translate(words: list[str], variables: dict[str, str]) -> Translation:
    """Translate `words`, which follow `ollama` and begin with one of `COMMANDS`."""
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
    hub = _HUB.fullmatch(name)
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
    translate,
    host=_HOST,
    port=_PORT,
    address_note="Ollama listens on port 11434 unless told otherwise; clients of its own API need one of OpenAI's.",
    port_in_image=_PORT,
)
