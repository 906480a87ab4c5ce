"""PEFT's settings of an adapter (adapter_config.json): every field is known or refused by name. Torch-free."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import is_there, read_table
from oarlock.workers.adapter_digest import SETTINGS_FILE
from oarlock.workers.lora.module_patterns import ModulePatterns, ends, module_pattern
from oarlock.workers.model_files.timed_pattern import PatternTime, TimedPattern

_MOST_BYTES = 16 << 20
_MOST_RANK = 1 << 20
LARGEST_ALPHA = 3.4e38  # scales are applied in float32
_LIMIT_S = 5.0  # seconds to match all patterns with all modules
_RETRAIN = "Train the adapter without it, or merge it into the model with PEFT and serve that."
# Fields that do not change an adapter's results: its origin, its training and initialisation, and layouts of the model
# that it was trained on.
_HARMLESS = frozenset((
    "auto_mapping", "base_model_class", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "merge_weights",
    "parent_library", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type", "velora_config",
))  # fmt: skip
_READ = frozenset((
    "alpha_pattern", "bias", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "target_parameters", "use_rslora",
))  # fmt: skip
# Fields of methods that compute more than B (A x), with the reasons for messages. They may be there, but off.
_REFUSED = {
    "alora_invocation_tokens": "it is an activated LoRA, which begins in the middle of a prompt",
    "arrow_config": "it mixes other adapters by the input",
    "enable_lora": "it adapts some parts of a fused layer only, in a way that PEFT no longer has",
    "kasa_config": "it truncates the model's own weights",
    "layer_replication": "it serves layers of the model several times",
    "lora_bias": "it has biases",
    "modules_to_save": "it replaces whole modules of the model",
    "monteclora_config": "it samples its weights",
    "trainable_token_indices": "it replaces rows of the embedding",
    "use_bdlora": "its matrices are block-diagonal",
    "use_dora": "it is a DoRA, which scales the model's own weights",
    "use_qalora": "it is a QALoRA, which reads sums of inputs",
}
_INITIALISATIONS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")  # the model's weights stay as they are
# Initialisations that subtract the first B A from the model's weights. PEFT can save the difference to the original
# model instead, and then records an ordinary initialisation.
_OF_OTHER_BASE = re.compile(r"pissa(_niter_\d+)?|corda|olora|lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The rank and the scale of each module. Modules have the names that they have in transformers."""

    path: Path
    rank: int
    alpha: float
    ranks: tuple[int, ...]  # the values of `rank_pattern`
    alphas: tuple[float, ...]  # the values of `alpha_pattern`
    is_rank_stabilised: bool  # the scale is alpha / sqrt(rank), not alpha / rank
    base_model: str | None  # name of the model that the adapter was trained on
    target_parameters: frozenset[str]
    ties_head: bool  # the head may be adapted with the embedding, though no field targets it
    has_inputs_first: bool  # matrices of the adapted modules are [inputs, outputs] in transformers
    _rank_patterns: ModulePatterns = field(repr=False)
    _alpha_patterns: ModulePatterns = field(repr=False)
    _targets: "_Targets" = field(repr=False)

    @staticmethod
    def read(directory: Path) -> "AdapterConfig":
        """Read adapter_config.json. Raise `StartupError` naming the field at fault."""
        path = directory / SETTINGS_FILE
        if not is_there(path):
            raise StartupError(
                f"{directory} has no {SETTINGS_FILE}, so it is no adapter.",
                "Name a directory that PEFT's save_pretrained wrote, or one with a GGUF adapter.",
            )
        fields = _Fields(path, read_table(path, _MOST_BYTES))
        fields.check_names()
        left = PatternTime(_LIMIT_S)
        ranks = fields.table("rank_pattern", lambda key, value: fields.rank(key, value))
        alphas = fields.table("alpha_pattern", lambda key, value: fields.finite(key, value))
        parameters = fields.raw.get("target_parameters") or []
        base = fields.raw.get("base_model_name_or_path")
        return AdapterConfig(
            path=path,
            rank=fields.rank("r", fields.raw.get("r", 8)),
            alpha=fields.finite("lora_alpha", fields.raw.get("lora_alpha", 8)),
            ranks=tuple(ranks.values()),
            alphas=tuple(alphas.values()),
            is_rank_stabilised=fields.flag("use_rslora"),
            base_model=base if isinstance(base, str) else None,
            target_parameters=frozenset(fields.names("target_parameters", parameters)),
            has_inputs_first=fields.flag("fan_in_fan_out"),
            ties_head=fields.flag("ensure_weight_tying"),
            _rank_patterns=ModulePatterns(ranks, f"{path}: rank_pattern", left),
            _alpha_patterns=ModulePatterns(alphas, f"{path}: alpha_pattern", left),
            _targets=_Targets(fields, left),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of the pair of `module`."""
        index = self._rank_patterns.first(module)
        return self.rank if index is None else self.ranks[index]

    def alpha_of(self, module: str) -> float:
        """Return the numerator of the scale of `module`."""
        index = self._alpha_patterns.first(module)
        return self.alpha if index is None else self.alphas[index]

    def scale_of(self, module: str) -> float:
        """Return the factor of B (A x) for `module`."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def key_of(self, module: str) -> str | None:
        """Return the name by which settings know the linear layer or embedding `module`: its own, or its parameter's.

        None: the adapter does not update it.
        """
        if self._targets.has(module):
            return module
        return self.key_of_parameter(module, "weight")

    def key_of_parameter(self, module: str, parameter: str) -> str | None:
        """Return the name of a parameter of `module`, such as a stack of experts' matrices; None as in `key_of`."""
        name = f"{module}.{parameter}"
        return None if self.target_parameters.isdisjoint(ends(name)) else name

    def not_targeted(self, weights: Path, tensor: str) -> StartupError:
        """Return the error for a tensor of the file `weights` whose module the adapter does not update."""
        return StartupError(
            f"{weights}: tensor {shown(tensor)} belongs to a module that {self.path.name} does not target.",
            f"Use the {self.path.name} that belongs to these weights.",
        )


def rank_too_high(adapter: str, rank: int, max_rank: int) -> StartupError:
    """Return the error for an adapter whose rank is above the slots' `max_rank`. `adapter`: its name or directory."""
    return StartupError(
        f"adapter {adapter} has rank {rank}, above --max-lora-rank {max_rank}.", f"Start with --max-lora-rank {rank}."
    )


def _is_on(value: Any) -> bool:
    """Return whether a value is more than an absent one: null, false, or empty."""
    return value is not None and value is not False and value not in ("", [], {})


class _Fields:
    """The table of a file, and checks of its values."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path, self.raw = path, raw

    def check_names(self) -> None:
        """Raise `StartupError` for a field, or a value, that means more than B (A x)."""
        raw = self.raw
        kind, bias, how = raw.get("peft_type", "LORA"), raw.get("bias", "none"), raw.get("init_lora_weights", True)
        if kind != "LORA":
            raise StartupError(f"{self.path}: peft_type {shown(kind)} is not supported.", "Use a LoRA adapter.")
        for name, what in _REFUSED.items():
            if _is_on(raw.get(name)):
                raise StartupError(f"{self.path}: {name} is not supported: {what}.", _RETRAIN)
        if bias != "none":
            raise StartupError(f"{self.path}: bias {shown(bias)} is not supported; biases are not adapted.", _RETRAIN)
        initialised = str(how).lower()
        if initialised == "loftq":
            raise StartupError(
                f"{self.path}: init_lora_weights 'loftq' is not supported: the adapter belongs to quantized weights.",
                "Merge it into those weights with PEFT and serve that.",
            )
        if _OF_OTHER_BASE.fullmatch(initialised):
            raise StartupError(
                f"{self.path}: init_lora_weights {shown(how)} is not supported: the adapter belongs to weights that "
                "its initialisation changed.",
                "Save it with save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it an "
                "adapter of the original model.",
            )
        if initialised not in _INITIALISATIONS and how is not None:
            raise StartupError(
                f"{self.path}: init_lora_weights {shown(how)} is not known here.",
                "Set it to true if the initialisation did not change the model's own weights.",
            )
        known = _HARMLESS | _READ | _REFUSED.keys()
        for name, value in raw.items():
            if name not in known and _is_on(value):
                raise StartupError(
                    f"{self.path}: the field {shown(name)} is not known here, with the value {shown(value)}.",
                    "Remove it if the adapter computes the same without it.",
                )

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 < value <= _MOST_RANK:
            raise self.wrong(name, value, "a positive integer")
        return value

    def finite(self, name: str, value: Any) -> float:
        if type(value) in (int, float) and abs(value) <= LARGEST_ALPHA:
            return float(value)
        raise self.wrong(name, value, "a number in float32")

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def table(self, name: str, check: Any) -> Mapping[str, Any]:
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return {key: check(f"{name} of {shown(key)}", one) for key, one in value.items()}

    def names(self, name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise self.wrong(name, value, "a list of names")
        return tuple(value)

    def wrong(self, name: str, value: Any, what: str) -> StartupError:
        return StartupError(f"{self.path}: {name} must be {what}, not {shown(value)}.", "Write the file again.")


class _Targets:
    """The modules that `target_modules`, `exclude_modules`, `layers_to_transform` and `layers_pattern` choose."""

    def __init__(self, fields: _Fields, left: PatternTime) -> None:
        self._wanted = _choice(fields, "target_modules", left)
        if fields.raw.get("target_modules") is None and fields.raw.get("target_parameters") is not None:
            self._wanted = frozenset()
        self._excluded = _choice(fields, "exclude_modules", left)
        layers = fields.raw.get("layers_to_transform")
        layers = [layers] if type(layers) is int else layers or []
        if not isinstance(layers, list) or not all(type(one) is int for one in layers):
            raise fields.wrong("layers_to_transform", layers, "a list of layers")
        self._layers = frozenset(layers)
        patterns = fields.raw.get("layers_pattern") or []
        patterns = fields.names("layers_pattern", [patterns] if isinstance(patterns, str) else patterns)
        where = f"{fields.path}: layers_pattern"
        for pattern in patterns:
            module_pattern(pattern, where, left)
        # The first number after the name of a list of modules is the layer's; without a pattern any name counts.
        self._numbers = [
            module_pattern(rf".*?\.(?:{pattern})\.(\d+)\.", where, left) for pattern in patterns or (r"[^.]*",)
        ]

    def has(self, module: str) -> bool:
        if self._excluded is not None and _is_in(self._excluded, module):
            return False
        if self._wanted is None:
            return True
        if not _is_in(self._wanted, module):
            return False
        if not self._layers or isinstance(self._wanted, TimedPattern) or module in self._wanted:
            return True
        found = next((match for number in self._numbers if (match := number.match(module))), None)
        return found is not None and str(found[1]).isdecimal() and int(found[1]) in self._layers


def _choice(fields: _Fields, name: str, left: PatternTime) -> frozenset[str] | TimedPattern | None:
    """Return names of modules, or a pattern of whole names; None: the field is not set, or names all of them."""
    value = fields.raw.get(name)
    if value is None or (isinstance(value, str) and value.lower() == "all-linear"):
        return None
    if isinstance(value, str):
        return module_pattern(value, f"{fields.path}: {name}", left)
    return frozenset(fields.names(name, value))


def _is_in(choice: frozenset[str] | TimedPattern, module: str) -> bool:
    if isinstance(choice, TimedPattern):
        return choice.fullmatch(module) is not None
    return not choice.isdisjoint(ends(module))
