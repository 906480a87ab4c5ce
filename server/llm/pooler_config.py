"""Pooling configuration: whether a checkpoint makes texts, vectors or scores, and how it pools hidden states.

It is read from the checkpoint's files: `modules.json`, the folders named there and `config_sentence_transformers.json`,
as sentence-transformers writes them, and `config.json`. Unsupported settings are refused at the start, by name.

Dense modules after the pooling (a linear layer and an activation) are computed here, in float64, for each vector
separately and in a fixed summation order, so that the result does not depend on the batch. A layer has at most a few
million weights, so this is cheap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import check_file, is_there
from oarlock.base.json_files import read_json as read_any_json
from oarlock.server.hub.model_path import read_json
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.workers.model_files.checkpoint import read_header
from oarlock.workers.preflight import is_encoder_model

_WEIGHTS = "model.safetensors"
_MAX_WEIGHTS_BYTES = 64 << 20  # as float64 four times as much; the largest known module has 32 MB
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # dtype in the file -> numpy's
_READ = {"in_features", "out_features", "bias", "activation_function"}  # keys of config.json that are used
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "module_input_name": (None, "sentence_embedding"),
    "module_output_name": (None, "sentence_embedding"),
    "use_residual": (None, False),
}
# Last part of a name in torch.nn.modules; each has a function in `_functions`.
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Configuration of one Dense module, from its folder."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str  # one of ACTIVATIONS

    @staticmethod
    def load(folder: Path, in_features: int) -> DenseConfig:
        """Return the module's configuration. `in_features`: size of the vectors that it receives.

        Raises `StartupError` if the module is incomplete or unsupported.
        """
        file = folder / "config.json"
        if not is_there(file):
            raise StartupError(f"{file}, which modules.json lists, is missing.", "Fetch the whole checkpoint.")
        config = read_json(file)
        taken, made = config.get("in_features"), config.get("out_features")
        if type(taken) is not int or type(made) is not int or made < 1:
            raise StartupError(f"{file} has no in_features and out_features.", "Fetch that file again.")
        if taken != in_features:
            raise StartupError(
                f"{file} expects vectors of {taken} values, but the previous module returns {in_features}.",
                "Fetch the whole checkpoint again: its files do not belong together.",
            )
        name = str(config.get("activation_function", ""))
        activation = name.rpartition(".")[2]
        if not name.startswith("torch.nn.") or activation not in ACTIVATIONS:
            raise StartupError(
                f"{file} has the activation {name[:80]!r}, which is not supported.",
                f"Supported are, from torch.nn: {', '.join(ACTIVATIONS)}.",
            )
        for key in config.keys() - _READ:
            if config[key] not in _HARMLESS.get(key, ()):
                raise StartupError(
                    f"{file} has {key} {str(config[key])[:80]!r}, which is not supported.",
                    "Serve a checkpoint without this value.",
                )
        return DenseConfig(folder, taken, made, config.get("bias", True) is not False, activation)


class DenseLayers:
    """Weights of a checkpoint's Dense modules, in order."""

    def __init__(self, configs: Sequence[DenseConfig]) -> None:
        """Read the weights. Raises `StartupError` if a file is unusable."""
        functions = _functions()
        self._layers = [(*_read(config), functions[config.activation]) for config in configs]

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Transform vectors: float32 [n, in_features] -> float64 [n, out_features]."""
        return np.stack([self._one(vector) for vector in vectors.astype(np.float64)])

    def _one(self, vector: np.ndarray) -> np.ndarray:
        for weight, bias, activation in self._layers:
            # Not `@`: a library's summation order may depend on its number of threads, which is set for the ranks.
            vector = np.einsum("oi,i->o", weight, vector)
            vector = activation(vector if bias is None else vector + bias)
        return vector


def _read(config: DenseConfig) -> tuple[np.ndarray, np.ndarray | None]:
    """Return weight [out, in] and bias [out] as float64. Raises `StartupError` if they contradict the configuration."""
    file = config.folder / _WEIGHTS
    if not is_there(file):
        fix = "Weights in pickles (pytorch_model.bin) are not supported: convert them to safetensors."
        raise StartupError(f"{file} is missing.", fix)
    entries = read_header(file)
    if check_file(file) > _MAX_WEIGHTS_BYTES:
        raise StartupError(
            f"{file} has {check_file(file)} bytes; at most {_MAX_WEIGHTS_BYTES} are read for a Dense module.",
            "Fetch that folder of the checkpoint again.",
        )
    content = file.read_bytes()
    wanted = {"linear.weight": (config.out_features, config.in_features)}
    if config.bias:
        wanted["linear.bias"] = (config.out_features,)
    if entries.keys() != wanted.keys():
        raise StartupError(
            f"{file} contains {', '.join(sorted(entries)) or 'nothing'}, not {' and '.join(wanted)}.",
            "Fetch that folder of the checkpoint again.",
        )
    data, found = len(content) - max(entry.end for entry in entries.values()), []
    for name, shape in wanted.items():
        entry = entries[name]
        if entry.shape != shape or entry.dtype not in _DTYPES:
            raise StartupError(
                f"{name} in {file} is {entry.dtype} {list(entry.shape)}, not of a float type and {list(shape)}.",
                "Fetch that folder of the checkpoint again.",
            )
        values = np.frombuffer(content[data + entry.begin : data + entry.end], _DTYPES[entry.dtype])
        if entry.dtype == "BF16":  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(values).all():
            raise StartupError(
                f"{name} in {file} contains NaN or infinity.", "Fetch that folder of the checkpoint again."
            )
        found.append(values.astype(np.float64).reshape(shape))
    return found[0], found[1] if config.bias else None


def _functions() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return activation functions by name, each for float64 [n]."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 0.5 * (1 + np.tanh(0.5 * x))

    def gelu(x: np.ndarray) -> np.ndarray:
        return x * 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x]))

    return {
        "Identity": lambda x: x,
        "Tanh": np.tanh,
        "ReLU": lambda x: np.maximum(x, 0.0),
        "GELU": gelu,
        "Sigmoid": sigmoid,
        "SiLU": lambda x: x * sigmoid(x),
    }


GENERATE, POOLING = "generate", "pooling"  # values of --runner; otherwise it is decided here
LABELS = "labels"  # pooling kind of a classification head, see engine.types
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # suffixes of architecture names
_KINDS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}  # names of the Pooling module -> engine.types
_OLD_KINDS = {  # older keys of the Pooling module; a single key must be true
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ORDER = re.compile("Transformer (Pooling( Dense)*( Normalize)?|LogitScore)")
_FETCH = "Fetch that file of the checkpoint again."
_LONGEST_PATH = 255
_MOST_DIMENSIONS = 2**31 - 1
_SIZES = ("hidden_size", "d_model", "dim", "n_embd")  # keys of config.json for the hidden size
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


class Task(StrEnum):
    """Tasks that a model can be served for."""

    GENERATE = "generate"
    EMBED = "embed"  # one vector per text
    SCORE = "score"  # one score per pair of texts


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """Pooling configuration of a model: its task, and the computation of vectors or scores from a text."""

    task: Task = Task.GENERATE
    source: str = "config.json"  # the file that determined it
    kind: str = "last"  # pooling kind, see engine.types
    normalize: bool = True  # scale vectors to length 1
    # lengths that a vector may be truncated to; empty: any; None: no truncation
    dimensions: tuple[int, ...] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> prefix of a text
    default_prompt: str | None = None  # name of the prompt that is used if a request names none
    lower_case: bool = False  # convert texts to lower case before tokenization
    max_len: int | None = None  # limit in tokens of a text, if the files set one below the context length
    label_tokens: tuple[str | int, ...] = ()  # scores: the token of the wrong label (optional), then of the right label
    sigmoid: bool = True  # scores of a classification head: whether to apply the sigmoid
    dense: tuple[DenseConfig, ...] = ()  # modules that transform a text's vector after pooling
    layers: DenseLayers | None = None  # the loaded weights of `dense`

    @property
    def generates(self) -> bool:
        return self.task is Task.GENERATE

    def size(self, hidden_size: int) -> int:
        """Return the length of a text's vector."""
        return self.dense[-1].out_features if self.dense else hidden_size

    def loaded(self, tokenizer: Tokenizer) -> PoolerConfig:
        """Return a copy with the token ids of the labels and the weights of the Dense modules.

        Raises `StartupError`, for example if a label has several tokens, or if the tokenizer does not define how two
        texts are joined.
        """
        if self.kind == LABELS and tokenizer.pair_marks() is None:
            raise StartupError(
                "The tokenizer does not define the tokens between two texts, which this model reads together.",
                "Put the checkpoint's own tokenizer.json next to its weights.",
            )
        ids = []
        for label in self.label_tokens:
            found = [label] if isinstance(label, int) else tokenizer.encode(label, add_special_tokens=False)
            if len(found) != 1:
                raise StartupError(
                    f"The label {label!r:.80} has {len(found)} tokens; scores are the odds of single tokens.",
                    "Give labels of one token each, for example: --classifier-from-token no yes",
                )
            ids += found
        return replace(self, label_tokens=tuple(ids), layers=DenseLayers(self.dense) if self.dense else None)

    @staticmethod
    def load(model: str | Path, runner: str = "auto", label_tokens: tuple[str, ...] = ()) -> PoolerConfig:
        """Return the configuration of a checkpoint. `runner`, `label_tokens`: values of the options.

        Raises `StartupError` if the checkpoint is unsupported.
        """
        folder = Path(model)
        config = read_json(folder / "config.json")
        names = config.get("architectures")
        architecture = str(names[0]) if isinstance(names, list) and names else ""
        can_generate = architecture.endswith(_GENERATORS)
        if runner == GENERATE:
            if can_generate or not architecture:
                return PoolerConfig()
            raise StartupError(
                f"--runner {GENERATE} needs a model that generates text, but the checkpoint is a {architecture}.",
                "Leave --runner out: the model is then served for embeddings or scores.",
            )
        label_tokens = label_tokens or _own_label_tokens(folder / "config.json", config)
        if label_tokens:
            _check_label_tokens(label_tokens)
            return PoolerConfig(Task.SCORE, "--classifier-from-token", "logits", label_tokens=label_tokens)
        if is_there(folder / "modules.json"):
            return replace(_of_modules(folder, config), dimensions=_dimensions(folder / "config.json", config))
        if architecture.endswith("ForSequenceClassification"):
            return _of_classifier(folder / "config.json", architecture, config)
        if runner == POOLING or (architecture and not can_generate):
            kind = "last" if can_generate else "mean"
            dimensions = _dimensions(folder / "config.json", config)
            return PoolerConfig(Task.EMBED, "config.json", kind, dimensions=dimensions)
        return PoolerConfig()


def _of_classifier(file: Path, architecture: str, config: Mapping[str, Any]) -> PoolerConfig:
    """Return the configuration of a cross-encoder: the score of two texts is the single output of its head.

    Raises `StartupError` if the head is unsupported.
    """
    if not is_encoder_model(file.parent):
        raise StartupError(
            f"The checkpoint is a {architecture}: classification heads are supported only for encoders.",
            "Serve an encoder, or a reranker that is prompted in words, such as one of the Qwen3 family.",
        )
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise StartupError(
            f"The checkpoint is a {architecture} with {str(count)[:20]} labels, but a score needs exactly one.",
            "Serve a reranker, whose head has one label, or an embedding model.",
        )
    own = config.get("sentence_transformers")
    name = (own.get("activation_fn") if isinstance(own, dict) else None) or config.get(
        "sbert_ce_default_activation_function"
    )
    function = str(name or "Sigmoid").rsplit(".", 1)[-1]
    if function not in ("Sigmoid", "Identity"):
        raise StartupError(
            f"{file} has {function[:64]} as the final function of scores, which is not supported.",
            "Remove it from config.json: the score is then the sigmoid of the head's output.",
        )
    return PoolerConfig(Task.SCORE, "config.json", LABELS, sigmoid=function == "Sigmoid")


def _of_modules(folder: Path, config: dict[str, Any]) -> PoolerConfig:
    """Return the configuration from `modules.json`. Raises `StartupError` for an unsupported module or order."""
    found = PoolerConfig(source="modules.json", normalize=False, **_prompts(folder))
    steps = []
    for module in _modules(folder / "modules.json"):
        name, path = module["type"].rsplit(".", 1)[-1], module["path"]
        own = read_json(folder / path / "config.json")
        steps.append(name)
        if name == "Transformer" and path == "":
            found = _with_transformer(found, folder)
        elif name == "Pooling":
            if not is_there(folder / path / "config.json"):
                cause = f"{folder / path / 'config.json'} is missing, which defines how vectors are computed."
                raise StartupError(cause, "Fetch the whole checkpoint, with the folders that modules.json lists.")
            kind = _kind(folder / path / "config.json", own)
            if own.get("include_prompt") is False and any(found.prompts.values()):
                raise _not_followed("include_prompt: false in its Pooling module, which excludes prompts from vectors")
            found = replace(found, task=Task.EMBED, kind=kind)
        elif name == "Dense":
            size = found.dense[-1].out_features if found.dense else _hidden_size(config)
            if size is None:
                raise _not_followed(f"a module Dense ({path}), and config.json has no hidden_size")
            found = replace(found, dense=(*found.dense, DenseConfig.load(folder / path, size)))
        elif name == "Normalize":
            found = replace(found, normalize=True)
        elif name == "LogitScore":
            wrong = own.get("false_token_id")
            label_tokens = (own.get("true_token_id"),) if wrong is None else (wrong, own.get("true_token_id"))
            _check_label_tokens(label_tokens)
            found = replace(found, task=Task.SCORE, kind="logits", label_tokens=label_tokens)
        else:
            raise _not_followed(f"a module {name or 'without a type'} ({path or 'at its root'})")
    if not _ORDER.fullmatch(" ".join(steps)):
        raise _not_followed(f"the modules {', '.join(steps) or 'none'}")
    return found


def _not_followed(what: str) -> StartupError:
    return StartupError(
        f"The checkpoint's modules.json has {what}, which is not supported.",
        "Supported are Transformer, then Pooling (cls, mean or last token), optionally Dense and "
        f"Normalize, or LogitScore; or start with --runner {GENERATE}, if the model generates text.",
    )


def _modules(file: Path) -> list[dict[str, str]]:
    """Return `type` and `path` of each module; the path is a folder next to the file, or empty.

    Raises `StartupError` if an entry is invalid.
    """
    value = read_any_json(file)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise StartupError(f"{file} is not a list of modules.", _FETCH)
    found = [{"type": one.get("type", ""), "path": one.get("path", "")} for one in value]
    for module in found:
        path = module["path"]
        if not all(isinstance(text, str) for text in module.values()):
            raise StartupError(f"{file} has a module whose type or path is not a string: {shown(module)}.", _FETCH)
        if not path.isprintable() or len(path) > _LONGEST_PATH or ".." in path or Path(path).is_absolute():
            raise StartupError(f"{file} has a module in {shown(path)}, outside of the checkpoint.", _FETCH)
    return found


def _kind(file: Path, config: Mapping[str, Any]) -> str:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_KINDS.items() if config.get(key)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _KINDS:
        named = " and ".join(mode if isinstance(mode, str) else shown(mode) for mode in modes)
        raise _not_followed(f"pooling by {named[:80]} ({file})")
    return _KINDS[modes[0]]


def _with_transformer(found: PoolerConfig, folder: Path) -> PoolerConfig:
    file = next((folder / name for name in _TRANSFORMER_FILES if is_there(folder / name)), None)
    config = {} if file is None else read_json(file)
    length = config.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise StartupError(f"'max_seq_length' in {file} is {str(length)[:64]!r}, which is not a length.", "Correct it.")
    return replace(found, max_len=length, lower_case=bool(config.get("do_lower_case")))


def _prompts(folder: Path) -> dict[str, Any]:
    file = folder / "config_sentence_transformers.json"
    config = read_json(file)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise StartupError(f"'prompts' in {file} is not an object of strings.", "Correct that line.")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise StartupError(f"'default_prompt_name' in {file} is {str(default)[:64]!r}, not in prompts.", "Correct it.")
    return {"prompts": prompts, "default_prompt": default}


def _hidden_size(config: dict[str, Any]) -> int | None:
    inner = config.get("text_config")
    described = config | inner if isinstance(inner, dict) else config
    return next((described[name] for name in _SIZES if type(described.get(name)) is int), None)


def _dimensions(file: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the lengths that a vector may be truncated to, as vLLM reads `config.json`. Raises `StartupError`."""
    sizes = config.get("matryoshka_dimensions")
    if not sizes:
        return () if config.get("is_matryoshka") is True else None
    if not isinstance(sizes, list) or not all(type(size) is int and 0 < size <= _MOST_DIMENSIONS for size in sizes):
        raise StartupError(
            f"'matryoshka_dimensions' in {file} is {shown(sizes)}, not a list of lengths of vectors.", "Correct it."
        )
    return tuple(sorted(sizes))


def _own_label_tokens(file: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `classifier_from_token` of `config.json`. Raises `StartupError` if it is not a list."""
    label_tokens = config.get("classifier_from_token") or []
    if not isinstance(label_tokens, list):
        raise StartupError(
            f"'classifier_from_token' in {file} is {shown(label_tokens)}, not a list of strings.", "Correct it."
        )
    return tuple(label_tokens)


def _check_label_tokens(label_tokens: tuple[Any, ...]) -> None:
    if len(label_tokens) > 2 or not all(isinstance(one, str | int) and one != "" for one in label_tokens):
        raise StartupError(
            f"Scores are the odds of two labels of one token each, not of {str(list(label_tokens))[:80]}.",
            "Give the wrong label, then the right one, for example: --classifier-from-token no yes",
        )
