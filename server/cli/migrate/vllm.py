"""Translation of vLLM's flags: most have the same name, and `server/config/vllm_flags.py` knows the others."""

import json
import re
from typing import Any

from oarlock.server.cli.migrate.translation import (
    KnownServer,
    Theirs,
    Translation,
    holds,
    lost,
    read_variables,
    same,
    values_after,
)
from oarlock.server.config import vllm_flags
from oarlock.server.config.option_groups import REASONING_PARSERS, TOOL_CALL_PARSERS
from oarlock.server.config.options import OptionError, nearest, parse_count
from oarlock.server.config.settings import OPTIONS

_SHORT = {described.short: described.name for described in OPTIONS.values() if described.short}
_CHECKPOINT_FORMS = ("awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "fp8", "bitsandbytes", "gguf")
_READ = "the form of a quantised checkpoint is read from its files; --quantization rounds one that is not."
_FORMATS = {  # options that name a format, which is detected if it is not named
    "tool_call_parser": "there is no such format here; without the flag it is found in the chat template. Known: "
    + ", ".join(TOOL_CALL_PARSERS[1:])
    + ".",
    "reasoning_parser": "there is no such format here; without the flag it is found in the chat template. Known: "
    + ", ".join(REASONING_PARSERS[1:])
    + ".",
}
_VARIABLES: dict[str, Theirs] = {
    **holds("there is one engine.", "VLLM_USE_V1"),
    **holds("ranks are processes of their own.", "VLLM_WORKER_MULTIPROC_METHOD"),
    **holds("attention has kernels of its own: --attention-backend.", "VLLM_ATTENTION_BACKEND"),
    **holds("nothing is sent to anybody.", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"),
    **same("log_level", "VLLM_LOGGING_LEVEL",
           values={name.upper(): name for name in ("debug", "info", "warning", "error")}),
    **lost("a context longer than the model was trained for is refused.", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    **lost("models come from the hub of Hugging Face, or from a directory.", "VLLM_USE_MODELSCOPE"),
}  # fmt: skip
# vLLM's name -> ours.
_RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}


def translate(words: list[str], variables: dict[str, str]) -> Translation:
    """Translate `words`, which follow `vllm serve`."""
    found = Translation()
    variables = dict(variables)
    if (key := variables.pop("VLLM_API_KEY", None)) is not None:
        found.environment["OARLOCK_API_KEY"] = key
    read_variables(found, variables, _VARIABLES, "VLLM_")
    words = _joined(words)
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            _flag(found, word, words)
        elif found.model is None:
            found.model = word
        else:
            found.lost.append((word, "it stands behind no flag, and there is a model already."))
    return found


def _joined(words: list[str]) -> list[str]:
    """Write `--name.key VALUE`, from which vLLM makes a JSON object, as `--name JSON`."""
    words, kept, objects = list(words), [], {}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        if not flag.startswith("--") or not dot:
            kept.append(word)
            continue
        value = value if equals or not words else words.pop(0)
        inner: dict[str, Any] = objects.setdefault(name, {})
        *parents, last = path.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        try:
            inner[last] = json.loads(value)
        except ValueError:
            inner[last] = value
    return kept + [text for name, made in objects.items() for text in (name, json.dumps(made))]


def _flag(found: Translation, word: str, rest: list[str]) -> None:
    shown, equals, value = word.partition("=")
    name = _SHORT.get(shown) or shown.lstrip("-").replace("-", "_")
    is_off = name.startswith("no_") and name[3:] in OPTIONS and OPTIONS[name[3:]].kind is bool
    name = _RENAMED.get(name, name[3:] if is_off else name)
    described = OPTIONS.get(name)
    if described is None:
        _other(found, shown, [value] if equals else None, rest)
        return
    if described.kind is bool:
        given = ["false"] if is_off else [value] if equals else []
    else:
        given = [value] if equals else values_after(rest, None if described.many else 1)
    written = " ".join([shown, *given])
    if name == "model":
        found.model = given[0] if given else found.model
    elif name == "quantization" and given and given[0] in _CHECKPOINT_FORMS:
        found.notes.append((written, _READ))
    elif name in _FORMATS and given and given[0] not in (described.choices or ()):
        found.lost.append((written, _FORMATS[name]))
    elif shown.lstrip("-").replace("-", "_") in _RENAMED and re.fullmatch(r"[\d.]+[kmgtKMGT]", "".join(given)):
        found.set(written, name, [str(parse_count(given[0]))])
    else:
        found.set(written, name, given)


def _other(found: Translation, shown: str, given: list[str] | None, rest: list[str]) -> None:
    """Translate a flag that is not an option of Oarlock."""
    plain = shown.lstrip("-").replace("_", "-")
    known = vllm_flags.FLAGS.get(plain) or vllm_flags.FLAGS.get(plain.removeprefix("no-"))
    if known is None:
        given = values_after(rest) if given is None else given
        near = nearest(shown, [described.flag for described in OPTIONS.values()])
        hint = f" Is {near} what it asks for?" if near else ""
        found.lost.append((" ".join([shown, *given]), f"there is no such flag.{hint}"))
        return
    if given is None:
        is_value = rest and (not known.is_switch or rest[0].lower() in ("true", "false", "yes", "no", "on", "off"))
        given = values_after(rest, 1) if is_value else []
    written = " ".join([shown, *given])
    try:
        _, notes = vllm_flags.take_out([shown, *given])
    except OptionError:
        found.lost.append((written, known.holds))
    else:
        found.notes.append((written, known.holds) if notes else (written, "nothing has to be set."))


VLLM = KnownServer(
    translate,
    host="0.0.0.0",
    port=8000,
    address_note="vLLM listens on every address unless told otherwise; --host 127.0.0.1 is this machine alone.",
    port_in_image=8000,
)
