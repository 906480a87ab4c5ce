"""Patterns of module names: published ones match as `re` does, and one that would never end is refused by name."""

import re
import time

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.quantization.formats.module_pattern import LIMIT_S, MOST_CHARACTERS, ModulePattern
from oarlock.workers.quantization.formats.weight_format import QuantizationSettings
from oarlock.workers.quantization.registry import STORED

MODULES = [f"model.layers.{layer}.{part}" for layer in range(64) for part in (
    "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.gate", "mlp.experts.7.up_proj"
)] + ["lm_head", "model.embed_tokens"]  # fmt: skip
PUBLISHED = [
    r".*lm_head",
    r".*\.mlp\.gate$",
    r"^(?!.*self_attn).*",
    r"model\.layers\.([0-9]|1[0-9])\.self_attn.*",
    r".*\.(?:gate|up|down)_proj$",
    r"model\.layers\.[0-9]+\.mlp\.experts\.\d+\..*",
]
SLOW = r"(\w|\w\w|.)*(\w|\w\w|.)*[0-9]$"  # exponential in the length of a name


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_patterns_match_as_re_does(text):
    pattern = ModulePattern(text, "targets")
    assert [pattern.matches(module) for module in MODULES] == [bool(re.match(text, module)) for module in MODULES]


def test_a_pattern_that_takes_too_long_is_refused_by_name():
    pattern = ModulePattern(SLOW, "quantization_config.dynamic")
    begun = time.process_time()
    with pytest.raises(StartupError, match=r"quantization_config\.dynamic") as caught:
        for module in MODULES:
            pattern.matches(module)
    assert SLOW in caught.value.cause.replace("\\\\", "\\")
    assert time.process_time() - begun < 20 * LIMIT_S, "and not after each name again"


@pytest.mark.parametrize(("text", "problem"), [("(", "expression"), ("a" * (MOST_CHARACTERS + 1), "characters")])
def test_invalid_patterns_are_refused(text, problem):
    with pytest.raises(StartupError, match=problem):
        ModulePattern(text, "targets")


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_both_formats_give_up_such_a_pattern(method):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    settings = {
        "gptq": {"bits": 4, "group_size": 64, "dynamic": {f"-:{SLOW}": {}}},
        "compressed-tensors": {
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": weights, "targets": [f"re:{SLOW}"]}},
        },
    }[method]
    scheme = STORED[method](QuantizationSettings(settings, "quantization_config"))
    with pytest.raises(StartupError, match="takes more than 1 s"):
        for module in MODULES:
            scheme.format_of(module)
