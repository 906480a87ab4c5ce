"""Flags of vLLM that are not options here. Flags that ask for Oarlock's behaviour are accepted with a note, others
refused.

The note or the error explains Oarlock's behaviour in one sentence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oarlock.server.config.options import OptionError

_NO = ("false", "0", "no", "off")
_YES = ("true", "1", "yes", "on")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, refused unless `is_switch` or `harmless` accepts it. `holds`: one sentence about Oarlock."""

    holds: str
    is_switch: bool = False  # takes no value, and asks for Oarlock's behaviour
    is_either: bool = False  # a switch whose negation is accepted too, with the same note
    harmless: tuple[str, ...] | None = None  # values that ask for Oarlock's behaviour; empty: every value


def _switches(holds: str, *names: str) -> dict[str, Flag]:
    return {name: Flag(holds, is_switch=True) for name in names}


def _values(holds: str, *names: str, harmless: tuple[str, ...] = ()) -> dict[str, Flag]:
    return {name: Flag(holds, harmless=harmless) for name in names}


def _refused(holds: str, *names: str) -> dict[str, Flag]:
    return {name: Flag(holds) for name in names}


_STATES = "states of recurrent layers are float32, except the inputs of convolutions, which have the model's dtype."
FLAGS: dict[str, Flag] = {
    **_switches("tools are always enabled, and the model chooses unless the request does.", "enable-auto-tool-choice"),
    **_switches("reasoning is recognised by the markers in the model's chat template.", "enable-reasoning"),
    **_switches("prompts are always computed in chunks, together with running sequences.", "enable-chunked-prefill"),
    **_values("CUDA graphs support sequences of any length.", "max-seq-len-to-capture"),
    **_values("preempted sequences are recomputed, so no swap space is used.", "swap-space"),
    **_switches("requests are not logged unless --enable-log-requests is given.", "disable-log-requests"),
    **_switches("statistics are not logged; /metrics has them.", "disable-log-stats"),
    **_switches("there is no access log unless --access-log is given.", "disable-uvicorn-access-log"),
    **_switches("usage always includes cached tokens.", "enable-prompt-tokens-details"),
    **_switches("every response carries X-Request-Id.", "enable-request-id-headers"),
    **_switches("there is only one KV cache manager.", "use-v2-block-manager"),
    **_switches("of several hosts only the head node, --node-rank 0, serves HTTP.", "headless"),
    **_values("grammars are compiled by llguidance.", "guided-decoding-backend", harmless=("auto", "guidance")),
    **_values(
        "replicas run as processes on this host.",
        "data-parallel-backend",
        harmless=("mp",),
    ),
    **_refused(
        "--data-parallel-size starts all replicas on this host, behind one address.",
        "data-parallel-size-local",
        "data-parallel-rank",
        "data-parallel-start-rank",
        "data-parallel-address",
        "data-parallel-rpc-port",
        "data-parallel-hybrid-lb",
        "data-parallel-external-lb",
    ),
    **_values("one process serves HTTP.", "api-server-count", harmless=("1",)),
    **_values("weights stay on the device.", "cpu-offload-gb", harmless=("0",)),
    **_values("requests may ask for up to 20 logprobs.", "max-logprobs", harmless=("20",)),
    **_values("--runner chooses between text generation and pooling.", "task", harmless=("auto", "generate")),
    **_values("the checkpoint's files define how vectors are computed.", "convert", harmless=("auto", "none", "embed")),
    **_refused(
        "modules.json and its folders define how vectors are computed.", "pooler-config", "override-pooler-config"
    ),
    **_values("the checkpoint's own fast tokenizer is used.", "tokenizer-mode", harmless=("auto", "hf")),
    **_values("config.json is read in the format of transformers.", "config-format", harmless=("auto", "hf")),
    **_values(
        "waiting requests are ordered by priority and waiting time, so none starves.",
        "scheduling-policy",
        harmless=("priority",),
    ),
    **_values("models accept only text.", "limit-mm-per-prompt"),
    **_refused("--tokenizer names a directory, or a hub id whose newest revision is used.", "tokenizer-revision"),
    **_refused("text is always tokenized by the server.", "skip-tokenizer-init"),
    **_refused("config.json is used unchanged; edit a copy of the checkpoint.", "hf-overrides", "rope-scaling"),
    **_values("adapters have the dtype of the model.", "lora-dtype", harmless=("auto",)),
    **_switches("each rank has its part of the matrices of an adapter.", "fully-sharded-loras"),
    **_switches("steps without adapters never compute them.", "specialize-active-lora"),
    **_values("adapters that add tokens are refused.", "lora-extra-vocab-size"),
    **_refused("models accept only text, and a request names its adapter.", "default-mm-loras"),
    **_refused("models accept only text.", "enable-tower-connector-lora"),
    **_refused("biases are not adapted.", "enable-lora-bias"),
    **_refused("prompt adapters are not supported.", "enable-prompt-adapter"),
    **_refused("--speculative-config configures speculative decoding.", "speculative-model", "num-speculative-tokens"),
    **_refused("--kv-cache-memory sets the size of the KV cache.", "num-gpu-blocks-override"),
    **_refused("sliding windows are used as the model defines them.", "disable-sliding-window"),
    "disable-hybrid-kv-cache-manager": Flag(
        "layers that differ have separate memory, except with KV offload if only their windows differ.",
        is_switch=True,
        is_either=True,
    ),
    **_values(_STATES, "mamba-ssm-cache-dtype", harmless=("auto", "float32")),
    **_values(_STATES, "mamba-cache-dtype", harmless=("auto",)),
    **_values("states are kept at the ends of KV blocks (--block-size).", "mamba-block-size"),
    **_refused("torch.compile is not used.", "compilation-config"),
    **_refused("--log-level sets one level for the whole log.", "uvicorn-log-level"),
    **_switches("a renewed certificate is always reloaded.", "enable-ssl-refresh"),
    **_refused("clients are identified by their API keys; a proxy can check client certificates.", "ssl-ca-certs"),
    **_values("clients are identified by their API keys.", "ssl-cert-reqs", harmless=("0",)),
    **_refused("OpenSSL's default ciphers are used.", "ssl-ciphers"),
    **_refused("requests carry their key in a header and never in a cookie.", "allow-credentials"),
    **_values(
        "pages of --allowed-origins may use every method and header.",
        "allowed-methods",
        "allowed-headers",
        harmless=('["*"]', "*"),
    ),
    **_refused("no code is loaded by name.", "middleware", "tool-parser-plugin", "logits-processors"),
    **_refused("the response's role is assistant.", "response-role"),
}


def take_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line without these flags, and a note for each. Raises `OptionError` for a refused flag."""
    kept: list[str] = []
    notes: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            kept += [word, *words]
            break
        shown, found, value = _find(word)
        if found is None:
            kept.append(word)
            continue
        if value is None and words and _takes(found, words[0]):
            value = words.pop(0)
        notes.append(_note(shown, found, value))
    return kept, notes


def without_harmless(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments of `LLM` without the harmless ones. Raises `OptionError` for a refused one."""
    kept = {}
    for name, value in values.items():
        plain = name.replace("_", "-")
        if plain in FLAGS:
            _note(f"--{plain}", FLAGS[plain], None if value is None else str(value))
        else:
            kept[name] = value
    return kept


def _find(word: str) -> tuple[str, Flag | None, str | None]:
    """Find vLLM's flag in a word. Return (the flag as written, its entry, its value after `=`)."""
    shown, equals, value = word.partition("=")
    name = shown[2:].replace("_", "-") if shown.startswith("--") else ""
    found = FLAGS.get(name) or FLAGS.get(name.removeprefix("no-"))
    if found is not None and name not in FLAGS:  # only switches have a --no-… form
        return shown, found if found.is_switch else None, "false"
    return shown, found, value if equals else None


def _takes(flag: Flag, word: str) -> bool:
    """Return whether `word`, which follows the flag, is its value."""
    if flag.is_switch:
        return word.lower() in (*_YES, *_NO)
    return not word.startswith("-")


def _note(shown: str, flag: Flag, value: str | None) -> str:
    written = shown if value is None or shown.startswith("--no-") else f"{shown} {value}"
    if flag.is_switch and (flag.is_either or (value or "true").lower() in _YES):
        return f"{written}: {flag.holds}"
    if not flag.is_switch and flag.harmless is not None:
        if value is None:
            raise OptionError(f"{shown} of vLLM needs a value.", f"Leave it out: {flag.holds}")
        if not flag.harmless or value in flag.harmless:
            return f"{written}: {flag.holds}"
    raise OptionError(f"{written}, a flag of vLLM, is not supported.", f"Leave it out: {flag.holds}")


def what_holds(name: str) -> str | None:
    """Return the fix for a key of a file or an environment variable that is a flag of vLLM, or None."""
    found = FLAGS.get(name.removeprefix("OARLOCK_").lower().replace("_", "-"))
    return None if found is None else f"Leave it out: {found.holds}"


def as_markdown() -> str:
    """Return the table of vLLM's flags for the documentation."""
    rows: dict[str, list[str]] = {}
    for name, flag in FLAGS.items():
        values = "" if not flag.harmless else f" {' or '.join(flag.harmless)}"
        taken = "accepted with a note" if flag.is_switch or flag.harmless is not None else "refused"
        rows.setdefault(f"{taken} | {flag.holds}", []).append(f"`--{name}{values}`")
    lines = ["| flag of vLLM | support | reason |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {rest} |" for rest, names in rows.items())]) + "\n"
