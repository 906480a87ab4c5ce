"""A tiny random model of any class that transformers completes text with, as a checkpoint.

Weights are scaled so that each token's logits depend on the tokens before it and on their distances: with transformers'
own initial values, attention is nearly uniform, and a wrong position would not show.
"""

import math
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_classes.settings import SETTINGS
from benchmarks.model_classes.small_sizes import small_settings
from tests.golden import tiny_models
from tests.golden.tiny_wrappers import WRAPPERS, wrapper_settings

# Multimodal classes whose text part is decided by other classes; the golden tests have more.
_OTHER_WRAPPERS = {
    "gemma3n": "Gemma3nForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "nemotron_h_omni": "NemotronH_Omni_Reasoning_V3",
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
    "minicpmv4_7": "MiniCPMV4_7ForConditionalGeneration",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
}


class ModelClass(NamedTuple):
    """A class, and the `model_type` of the config that its tiny model is built from."""

    name: str
    model_type: str


def model_classes() -> list[ModelClass]:
    """Return every class of the causal mapping and the multimodal classes, in the order of their names."""
    causal: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        before = causal.get(name)
        if before is None or _preference(model_type, name) > _preference(before, name):
            causal[name] = model_type
    wrappers = {str(given["class"]): model_type for model_type, given in WRAPPERS.items()}
    wrappers |= {name: model_type for model_type, name in _OTHER_WRAPPERS.items()}
    return [ModelClass(*pair) for pair in sorted((causal | wrappers).items())]


def _preference(model_type: str, name: str) -> tuple[bool, bool, bool]:
    """Prefer settings of the golden tests, then a text part, then the family that the class is called after."""
    is_own = name.lower().startswith(model_type.replace("_", ""))
    return _is_golden(model_type), model_type.endswith("_text"), is_own


def _is_golden(model_type: str) -> bool:
    return model_type in tiny_models._FAMILY or model_type in WRAPPERS


def tiny_config(one: ModelClass) -> PreTrainedConfig:
    """Return the settings of a tiny model of a class."""
    if one.model_type in WRAPPERS:
        like = WRAPPERS[one.model_type]["like"]
        text = {**tiny_models._SHAPE, **tiny_models._FAMILY[like]}
        _, settings = wrapper_settings(one.model_type, text)
        config = CONFIG_MAPPING[one.model_type](**settings)
    elif one.model_type in tiny_models._FAMILY:
        config = tiny_models.tiny_config(one.model_type)
    else:
        config = shrunk(CONFIG_MAPPING[one.model_type], one.model_type)
    config.architectures = [one.name]
    return config


def shrunk(kind: type[PreTrainedConfig], model_type: str) -> PreTrainedConfig:
    """Return a config of this class with small sizes, in its parts as well."""
    default = kind()
    settings = small_settings(default.to_dict())
    for name in kind.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            settings[name] = shrunk(type(part), part.model_type)
    return kind(**{**settings, **SETTINGS.get(model_type, {})})


def tiny_model(one: ModelClass, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return the model in float32 with random weights, and transformers' plain attention and experts."""
    kind = getattr(transformers, one.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind._from_config(
            text_config(kind, config), attn_implementation="eager", experts_implementation="eager"
        ).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _randomise(name, parameter)
            for name, buffer in model.named_buffers():
                if name.endswith("bias") and buffer.is_floating_point():  # others are masks
                    buffer.normal_(std=0.1)
                elif name.endswith("layer_scalar"):
                    buffer.uniform_(0.6, 1.4)
    return model.eval()


def text_config(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of `config` that the class `kind` takes."""
    expected = kind.config_class
    if expected is None or isinstance(config, expected):
        return config
    parts = (getattr(config, name, None) for name in type(config).sub_configs)
    return next(part for part in parts if isinstance(part, expected))


def _randomise(name: str, parameter: Tensor) -> None:
    kind = name.rpartition(".")[2]
    if kind.endswith("bias"):
        parameter.normal_(std=0.1)
    elif kind.endswith("sinks"):
        parameter.normal_(std=1.0)
    elif kind == "A_log":  # states that last for a few tokens, and for many
        parameter.normal_(mean=-1.5, std=1.0)
    elif parameter.dim() < 2:  # of norms, whose initial values show whether they scale by the weight or by 1 + weight
        parameter.add_(0.1 * torch.randn(parameter.shape))
    elif "conv" in name or "embed" in name or "wte" in name:
        parameter.normal_(std=0.5)
    else:
        inputs = parameter.shape[-1] if parameter.dim() == 2 else min(parameter.shape[-2:])
        parameter.normal_(std=1.0 / math.sqrt(inputs))
