"""vLLM's flags into ours: most have the same name, and `server/config/vllm_flags.py` knows the others."""

from __future__ import annotations

from server.config import vllm_flags
from server.config.groups.model import REASONING_PARSERS, TOOL_CALL_PARSERS
from server.config.options import OptionError, nearest
from server.config.settings import OPTIONS
from server.entrypoints.commands.migrate.translation import Translation, values_after

_SHORT = {described.short: described.name for described in OPTIONS.values() if described.short}
_DTYPES = {"half": "float16", "float": "float32"}
_CHECKPOINT_FORMS = ("awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "fp8", "bitsandbytes", "gguf")
_FORMATS = {  # options that name a format, which is found out where it is not named
    "tool_call_parser": "there is no such format here; without the flag it is found in the chat template. Known: "
    + ", ".join(TOOL_CALL_PARSERS[1:])
    + ".",
    "reasoning_parser": "there is no such format here; without the flag it is found in the chat template. Known: "
    + ", ".join(REASONING_PARSERS[1:])
    + ".",
}
_VARIABLES = {"VLLM_API_KEY": "OARLOCK_API_KEY"}


def translate(words: list[str], variables: dict[str, str]) -> Translation:
    """`words`: what follows `vllm serve`."""
    found = Translation()
    for name, value in variables.items():
        if name in _VARIABLES:
            found.environment[_VARIABLES[name]] = value
        elif name.startswith("VLLM_"):
            found.lost.append((f"{name}={value}", "variables of vLLM are not read; `oarlock config` lists ours."))
        else:
            found.environment[name] = value  # of CUDA, the hub and the system: they mean the same here
    words = list(words)
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            _flag(found, word, words)
        elif found.model is None:
            found.model = word
        else:
            found.lost.append((word, "it stands behind no flag, and there is a model already."))
    return found


def _flag(found: Translation, word: str, rest: list[str]) -> None:
    shown, equals, value = word.partition("=")
    name = _SHORT.get(shown) or shown.lstrip("-").replace("-", "_")
    is_off = name.startswith("no_") and name[3:] in OPTIONS and OPTIONS[name[3:]].kind is bool
    name = name[3:] if is_off else name
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
        found.notes.append((written, "the form of a quantised checkpoint is read from its files."))
    elif name in _FORMATS and given and given[0] not in (described.choices or ()):
        found.lost.append((written, _FORMATS[name]))
    else:
        found.set(written, name, [_DTYPES.get(each, each) for each in given] if name == "dtype" else given)


def _other(found: Translation, shown: str, given: list[str] | None, rest: list[str]) -> None:
    """A flag that is no option here."""
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
