"""The code that computes a model: a described family, or transformers' class of the same name. Torch-free.

A description is preferred unless `--model-impl transformers` is given. A description that refuses a setting is not
replaced by transformers' code, because the operator would not notice that the model is served in another way.
"""

from pathlib import Path
from typing import Any, NamedTuple

from oarlock.base.errors import StartupError, shown
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import gguf_file
from oarlock.workers.models.encoders.registry import is_encoder
from oarlock.workers.models.hf_config import declared_dtype
from oarlock.workers.models.hf_fields import others_like, read_config
from oarlock.workers.models.registry import architectures, describe, has_page, read_spec
from oarlock.workers.transformers_backend.class_description import CANNOT_DIVIDE, ClassDescription
from oarlock.workers.transformers_backend.class_facts import class_description
from oarlock.workers.transformers_backend.served_class import spec_of
from oarlock.workers.transformers_backend.tested import check_release, tested_classes

FLAG = "--model-impl"
_OTHER_CODE = f"Or try {FLAG} transformers, which uses transformers' own class if it can be served."
_LIST = "`oarlock models --supported` lists all architectures."


class ChosenCode(NamedTuple):
    """The specification of a model, and the description of its class if transformers computes it."""

    spec: DecoderSpec
    served_class: str | None  # encoded `ClassDescription`; None: a described family


def chosen_code(config: WorkerConfig) -> ChosenCode:
    """Return the specification of the model of `config` by the code that `model_impl` chooses.

    Raise `StartupError` if it cannot be served. A `served_class` that is resolved already is decoded, so a rank starts
    no process.
    """
    hf_config = read_config(Path(config.model_path))
    name = architecture_of(hf_config)
    if config.model_impl != "transformers" and (has_page(name) or name is None):
        return ChosenCode(_described(hf_config, config), None)
    if config.model_impl == "oarlock":
        return ChosenCode(_only_described(hf_config), None)
    description = _resolved(config) or _looked_at(config, hf_config, name)
    return ChosenCode(spec_of(description, _dtype(hf_config)), description.encoded())


def resolved_spec(config: WorkerConfig) -> DecoderSpec:
    """Return the specification of the model of a resolved configuration, for its context length."""
    if config.served_class is None:
        return read_spec(config.model_path, config.max_model_len, tied=config.tie_word_embeddings)
    spec = spec_of(ClassDescription.decoded(config.served_class), _dtype(read_config(Path(config.model_path))))
    return spec.for_length(config.max_model_len or spec.default_length)


def class_by_name(config: WorkerConfig) -> tuple[str, bool] | None:
    """Return the class without a description that would compute the model, and whether it is code of the checkpoint.

    None: a described family. Reads only `config.json`. Raises `StartupError` for a class that is refused by its name.
    """
    hf_config = read_config(Path(config.model_path))
    name = architecture_of(hf_config)
    if name is None or config.model_impl == "oarlock" or (config.model_impl == "auto" and has_page(name)):
        return None
    is_own_code = bool(hf_config.get("auto_map")) and config.trust_remote_code
    if not is_own_code:
        _check_tested(name, hf_config, config)
    return name, is_own_code


def architecture_of(hf_config: dict[str, Any]) -> str | None:
    """Return the name of the class that a parsed `config.json` names first; None if it names none."""
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name else None


def _resolved(config: WorkerConfig) -> ClassDescription | None:
    """Return the description that preflight found for these ranks; None if it has not."""
    if config.served_class is None:
        return None
    description = ClassDescription.decoded(config.served_class)
    return description if description.ranks == config.tensor_parallel_size else None


def _described(hf_config: dict[str, Any], config: WorkerConfig) -> DecoderSpec:
    """Return the specification from the family's page. A refusal of a setting says that another code may serve it."""
    name = architecture_of(hf_config)
    try:
        return describe(hf_config)
    except StartupError as error:
        tested = tested_classes().get(name or "")
        may_help = config.model_impl == "auto" and tested is not None and tested.refused is None
        if not may_help or is_encoder(hf_config) or gguf_file(Path(config.model_path)) is not None:
            raise
        raise StartupError(error.cause, f"{error.fix} {_OTHER_CODE}", error.exit_code) from None


def _only_described(hf_config: dict[str, Any]) -> DecoderSpec:
    """Return the specification from the family's page. The refusal of a class without one names the flag."""
    try:
        return describe(hf_config)
    except StartupError as error:
        raise StartupError(
            error.cause, f"{FLAG} oarlock serves described families only: leave it out. {error.fix}", error.exit_code
        ) from None


def _looked_at(config: WorkerConfig, hf_config: dict[str, Any], name: str | None) -> ClassDescription:
    """Return the description of the class `name`, which transformers' code computes, if it can be served."""
    directory = Path(config.model_path)
    if name is None:
        raise StartupError("config.json: it names no architecture.", _LIST)
    if gguf_file(directory) is not None:
        raise StartupError(
            f"{directory} is a GGUF model, and transformers' code is served with safetensors files only.",
            f"Leave {FLAG} out, or use the model's safetensors checkpoint.",
        )
    is_own_code = bool(hf_config.get("auto_map")) and config.trust_remote_code
    if not is_own_code:
        _check_tested(name, hf_config, config)
    check_release()
    description = class_description(directory, config.tensor_parallel_size, trusts_code=config.trust_remote_code)
    if description.is_remote and not is_own_code:
        raise AssertionError("a look without trust runs no code of the checkpoint")
    if not description.is_remote and is_own_code:  # its auto_map names no class of this kind
        _check_tested(name, hf_config, config)
    if description.refusal is None:
        return description
    if description.refusal.startswith(CANNOT_DIVIDE.partition("{")[0]):
        raise StartupError(
            f"tensor_parallel_size {config.tensor_parallel_size} does not fit this model, which transformers' code "
            f"computes: {description.refusal}.",
            "Use --tensor-parallel-size 1.",
        )
    raise _not_served(name, description.refusal, config)


def _check_tested(name: str, hf_config: dict[str, Any], config: WorkerConfig) -> None:
    """Raise `StartupError` unless the class was right in the tests with this number of ranks."""
    tested, size = tested_classes().get(name), config.tensor_parallel_size
    if tested is None:
        if config.model_impl != "transformers":
            describe(hf_config)  # raises the error with the names of similar classes
        code = ", and its own code (auto_map) runs only with --trust-remote-code" if hf_config.get("auto_map") else ""
        raise StartupError(
            f"config.json: {shown(name)} is not among the classes that were tested with transformers' code{code}.",
            f"Leave {FLAG} out, or use another model. {_LIST}" if name in architectures() else _LIST,
        )
    if tested.refused is not None:
        raise _not_served(name, tested.refused, config)
    if size > 1 and tested.ranks < 2:
        raise StartupError(
            f"tensor_parallel_size {size} does not fit this model: transformers' code for {name} is right on one rank "
            "only.",
            "Use --tensor-parallel-size 1.",
        )


def _not_served(name: str, reason: str, config: WorkerConfig) -> StartupError:
    """Return the error for a class that transformers' code does not compute right here."""
    if name in architectures():
        fix = f"Leave {FLAG} out: it is a described architecture."
    else:
        fix = others_like(name, architectures())
    unknown = "" if config.model_impl == "transformers" else f"architecture {shown(name)} is not supported. "
    return StartupError(f"config.json: {unknown}transformers' code for {name} cannot be served: {reason}.", fix)


def _dtype(hf_config: dict[str, Any]) -> str | None:
    """Return the declared dtype of the weights. Multimodal models may declare it in `text_config` only."""
    text = hf_config.get("text_config")
    return declared_dtype(hf_config) or (declared_dtype(text) if isinstance(text, dict) else None)
