"""Multimodal models served as text models: the class that describes the text part, its settings, and its names.

Only the text part is served. Tensors of towers and projectors for images, audio and video are not read. The tables are
in `wrapper_table.py`. Torch-free.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_fields import Fields, others_like, unsupported, wrong
from oarlock.workers.models.hf_rope import without_sections
from oarlock.workers.models.wrapper_table import OTHER_NAMES, REFUSED, TEXT_PARTS, WRAPPERS, TextPart, Wrapper


def is_wrapper(architecture: str) -> bool:
    """Return whether `architecture` is a multimodal model that has a text part, served or not."""
    return architecture in WRAPPERS or architecture in OTHER_NAMES or architecture in REFUSED


def served_wrappers(families: Container[str]) -> dict[str, list[str]]:
    """Return the wrappers whose text part can be served, each with the classes that its text part may be.

    `families`: the classes that the registry describes.
    """
    found = {}
    for name, wrapper in WRAPPERS.items():
        first = TEXT_PARTS[wrapper.text]
        parts = [first] if first.is_own else [first, *_chosen_by_model_type().values()]
        if first.architecture in families:
            found[name] = [one for one in dict.fromkeys(part.architecture for part in parts) if one in families]
    return found


def describe_text_part(
    architecture: str, config: dict[str, Any], families: dict[str, Callable[[Fields], DecoderSpec]]
) -> DecoderSpec:
    """Return the decoder that is the text part of a wrapper, whose parsed `config.json` is `config`.

    Raise `StartupError` if the wrapper or its text part is not supported.
    """
    if architecture in REFUSED:
        raise StartupError(
            f"config.json: {architecture} cannot be served as a text model: {REFUSED[architecture]}.",
            "Serve a text model, or another multimodal model.",
        )
    architecture = OTHER_NAMES.get(architecture, architecture)
    wrapper = WRAPPERS[architecture]
    given = _given_settings(architecture, wrapper, config)
    part = _text_part(architecture, wrapper, given)
    if part.architecture not in families:
        raise StartupError(
            f"config.json: the text part of {architecture} is {part.architecture}, which is not supported.",
            others_like(part.architecture, families),
        )
    text = _settings(wrapper, part, config, given)
    spec = families[part.architecture](Fields(text))
    return replace(spec, names=_names(wrapper, part, text, spec.names), wrapper=architecture)


def _given_settings(architecture: str, wrapper: Wrapper, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the text part: `text_config`, or the whole config of an older checkpoint without it."""
    text = config.get("text_config")
    if text is None and wrapper.is_flat:
        return {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    if not isinstance(text, dict):
        raise unsupported("text_config", text, f"{architecture} has the settings of its text part there.")
    return text


def _text_part(architecture: str, wrapper: Wrapper, given: dict[str, Any]) -> TextPart:
    """Return the description of the text part, whose class may depend on its `model_type`."""
    first, kind = TEXT_PARTS[wrapper.text], given.get("model_type")
    if first.is_own and (not first.model_types or kind is None or kind in first.model_types):
        return first
    kind, known = wrapper.text if kind is None else kind, _chosen_by_model_type()
    if first.is_own:
        known = dict.fromkeys(first.model_types, first)
    if not isinstance(kind, str) or kind not in known:
        raise StartupError(
            f"config.json: the text part of {architecture} has model_type = {shown(kind)}, which is not supported.",
            f"Supported: {', '.join(known)}.",
        )
    return known[kind]


def _chosen_by_model_type() -> dict[str, TextPart]:
    return {name: part for name, part in TEXT_PARTS.items() if not part.is_own}


def _settings(wrapper: Wrapper, part: TextPart, config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the text part as the `config.json` of a text model has them.

    As in transformers, the wrapper's own settings decide the dtype and whether the head is the embedding, and settings
    that are absent have the defaults of the text part's config class.
    """
    for key in part.refused:
        if given.get(key) is not None:
            raise unsupported(key, given[key], "This architecture is served only without it.")
    text = {**part.defaults, **_under_usual_names(part, given), **part.fixed}
    if part.has_usual_heads:
        fields = Fields(text)
        width = max(1, fields.count("hidden_size") // fields.count("num_attention_heads"))
        if text.setdefault("head_dim", width) not in (None, width):
            raise unsupported("head_dim", text["head_dim"], f"Heads of this architecture have {width} elements.")
        text["head_dim"] = width
    if part.has_mrope:
        text |= {key: without_sections(text[key], key) for key in ("rope_scaling", "rope_parameters") if text.get(key)}
    tied = _tied(config, wrapper.tied_by)
    tied = wrapper.is_tied if tied is None else tied
    if wrapper.adopts_tied and tied is False:
        tied = _tied(text, part.tied_by) or False
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None:
            text = {name: value for name, value in text.items() if name not in ("dtype", "torch_dtype")}
            text[key] = config[key]
            break
    for key in () if tied else wrapper.of_head:
        if config.get(key) is not None and config[key] != text.get(key):
            raise wrong(key, f"{shown(text.get(key))}, as in text_config", config[key])
    if part.tied_by is not None:
        text[part.tied_by] = None
    return {**text, "tie_word_embeddings": tied, "architectures": [part.architecture]}


def _tied(settings: dict[str, Any], first: str | None) -> Any:
    """Return whether `settings` have one matrix as head and embedding; None if they do not set it.

    `first`: another name of the setting, which goes first; None: there is none.
    """
    own = None if first is None else settings.get(first)
    return settings.get("tie_word_embeddings") if own is None else own


def _under_usual_names(part: TextPart, given: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the other names that the config class of a text part has for some of them."""
    found = {key: value for key, value in given.items() if key not in part.aliases}
    for key in part.aliases.keys() & given.keys():
        for name in part.aliases[key]:
            if found.setdefault(name, given[key]) != given[key]:
                raise wrong(key, f"{shown(found[name])}, as {name}", given[key])
    return found


def _names(wrapper: Wrapper, part: TextPart, text: dict[str, Any], own: TensorNames) -> TensorNames:
    """Return the names of the wrapper's tensors. `own`: the names of the text part's class."""
    inside = {
        outer + theirs.removeprefix(inner): ours
        for outer, inner in wrapper.prefixes.items()
        for theirs, ours in own.prefixes.items()
        if theirs.startswith(inner)
    }
    ignored = [
        outer + entry.removeprefix(inner)
        for outer, inner in wrapper.prefixes.items()
        for entry in own.ignored
        if entry.startswith(inner)
    ]
    sizes = None
    if part.stores_inputs_first:
        fields = Fields(text)
        sizes = fields.count("hidden_size"), fields.count("moe_intermediate_size")
    return replace(
        own,
        prefixes={**inside, **wrapper.prefixes, **own.prefixes},
        ignored=(*wrapper.ignored, *ignored, *own.ignored),
        experts_inputs_first=sizes or own.experts_inputs_first,
    )
