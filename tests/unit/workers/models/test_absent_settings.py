"""Settings that a config.json leaves out have the defaults of transformers' config classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oarlock.base.errors import StartupError
from oarlock.workers.models.registry import describe
from tests.golden.tiny_models import LATENT, RECURRENT, tiny_config

FAMILIES = (*RECURRENT, "lfm2", "lfm2_moe", "lfm3", "gemma4_text", "gemma4_unified_text", "laguna", "mimo_v2_flash")
# Sizes that every published config has: they have no default here.
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


def written(config: Any) -> dict[str, Any]:
    """All settings of a config class, those with default values included, as JSON."""
    return json.loads(config.to_json_string(use_diff=False))


def completed(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with every setting that it leaves out."""
    (folder / "config.json").write_text(json.dumps(config))
    return {**written(AutoConfig.from_pretrained(folder)), "architectures": config["architectures"]}


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.soak) for one in LATENT)])
def test_defaults_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    config = {**written(tiny_config(family)), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}
    compared = 0
    for key in config.keys() - REQUIRED - {"architectures", "model_type"}:
        partial = {name: value for name, value in config.items() if name != key}
        try:
            wanted = describe(completed(partial, tmp_path))
        except (StartupError, StrictDataclassError, ValueError):  # without it the other settings contradict each other
            continue
        assert describe(partial) == wanted, key
        compared += 1
    assert compared > 15
