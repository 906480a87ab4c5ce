"""Settings of adapters: PEFT's meaning of patterns and targets, and refusals by name."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.adapter_settings import check_adapter_settings
from oarlock.workers.config import WorkerConfig
from oarlock.workers.lora import adapter_config
from oarlock.workers.lora.adapter_config import AdapterConfig

Q, K = "model.layers.1.self_attn.q_proj", "model.layers.10.self_attn.k_proj"


def read(directory: Path, **fields: Any) -> AdapterConfig:
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **fields}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return AdapterConfig.read(directory)


@pytest.mark.parametrize(("fields", "q", "k"), [
    ({"target_modules": ["q_proj"]}, True, False),
    ({"target_modules": ["proj", "self_attn"]}, False, False),  # whole parts of a name
    ({"target_modules": ["self_attn.q_proj", K]}, True, True),
    ({"target_modules": r".*\.(q|k)_proj"}, True, True),
    ({"target_modules": r"q_proj"}, False, False),  # an expression is of the whole name
    ({"target_modules": r".*layers\.1\..*"}, True, False),
    ({"target_modules": "all-linear"}, True, True),
    ({"target_modules": "all-linear", "exclude_modules": ["k_proj"]}, True, False),
    ({"target_modules": None, "exclude_modules": r".*q_proj"}, False, True),
    ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [10]}, False, True),
    ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}, True, False),
    ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1, 10], "layers_pattern": ["h"]}, False, False),
    ({"target_modules": ["q_proj", K], "layers_to_transform": [2]}, False, True),  # a full name counts in any layer
    ({"target_modules": [], "target_parameters": ["k_proj.weight"]}, False, True),
    ({"target_modules": None, "target_parameters": ["k_proj.weight"]}, False, True),
])  # fmt: skip
def test_targets(tmp_path: Path, fields: dict[str, Any], q: bool, k: bool) -> None:
    config = read(tmp_path, **fields)
    assert [config.key_of(module) is not None for module in (Q, K)] == [q, k]


def test_the_first_pattern_that_matches_the_end_of_a_name_counts(tmp_path: Path) -> None:
    table = {
        r"layers\.\d\..*": 2,
        "q_proj": 3,
        "model.layers.10.self_attn.k_proj": 4,
        r"self_attn\.k_proj": 5,
        "proj": 6,
    }
    config = read(tmp_path, rank_pattern=table, alpha_pattern={"q_proj": 1.5})
    assert (config.rank_of(Q), config.rank_of(K), config.rank_of("model.layers.11.self_attn.k_proj")) == (2, 4, 5)
    assert config.rank_of("model.layers.11.mlp.up_proj") == 8
    assert (config.scale_of(Q), config.scale_of(K)) == (0.75, 4.0)
    parameters = read(tmp_path, target_parameters=["experts.down_proj"], rank_pattern={r".*\.down_proj": 4})
    key = parameters.key_of_parameter("model.layers.0.mlp.experts", "down_proj")
    assert key is not None and parameters.rank_of(key) == 4
    assert parameters.key_of_parameter("model.layers.0.mlp.experts", "gate_up_proj") is None


@pytest.mark.parametrize(("fields", "message"), [
    ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    ({"use_dora": True}, "use_dora is not supported: it is a DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    ({"lora_bias": True}, "lora_bias is not supported"),
    ({"bias": "lora_only"}, "bias 'lora_only'"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"use_qalora": True}, "use_qalora"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"arrow_config": {"top_k": 2}}, "arrow_config"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"kasa_config": {"beta": 1}}, "kasa_config"),
    ({"monteclora_config": {"num_samples": 2}}, "monteclora_config"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'.*path_initial_model"),
    ({"init_lora_weights": "corda"}, "init_lora_weights 'corda'"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq'"),
    ({"use_something_new": True}, "the field 'use_something_new' is not known here"),
    ({"r": 0}, "r must be a positive integer, not 0"),
    ({"r": True}, "r must be a positive integer, not True"),
    ({"r": 10**30}, "r must be a positive integer"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number in float32, not nan"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
    ({"lora_alpha": -1e39}, r"lora_alpha must be a number in float32, not -1e\+39"),
    ({"lora_alpha": "16"}, "lora_alpha must be a number"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern of 'q_proj' must be a positive integer"),
    ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must be an object"),
    ({"target_modules": [1]}, "target_modules must be a list of names"),
    ({"target_modules": "("}, r"target_modules has a pattern that is not a regular expression .*: '\('"),
    ({"target_modules": r"(?:q_proj){e<=5}"}, "a brace without numbers"),
    ({"rank_pattern": {"q)|(.*": 4}}, "rank_pattern has a pattern that is not a regular expression"),
    ({"target_modules": "a" * 100_000}, "target_modules has a pattern that has more than 20000 characters"),
    ({"layers_to_transform": ["1"]}, "layers_to_transform must be a list of layers"),
    ({"use_rslora": "yes"}, "use_rslora must be true or false"),
])  # fmt: skip
def test_refusals_name_the_field(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as error:
        read(tmp_path, **fields)
    assert len(str(error.value)) < 1000


def test_fields_of_training_are_ignored_and_others_may_be_off(tmp_path: Path) -> None:
    off = {"use_dora": False, "modules_to_save": None, "layer_replication": None, "bias": "none", "use_bdlora": None}
    of_training = {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva", "loftq_config": {}, "lora_dropout": 0.1}
    config = read(tmp_path, **off, **of_training, fan_in_fan_out=True, something_new=None, base_model_name_or_path="m")
    assert (config.rank, config.alpha, config.base_model) == (8, 16.0, "m")


def test_settings_are_refused_before_a_download_if_no_rank_fits(tmp_path: Path) -> None:
    config = WorkerConfig("", max_loras=1, max_lora_rank=16)
    read(tmp_path, r=64, rank_pattern={"q_proj": 8})  # of the modules, all may have rank 8
    check_adapter_settings(tmp_path, config)
    read(tmp_path, r=32, rank_pattern={"q_proj": 64})
    with pytest.raises(StartupError, match="has rank 64, above --max-lora-rank 16"):
        check_adapter_settings(tmp_path, config)


def test_the_time_of_a_look_up_does_not_depend_on_the_number_of_parameters(tmp_path: Path) -> None:
    names = [f"a.b{number}" for number in range(100_000)]
    config = read(tmp_path, target_modules=None, target_parameters=[*names, "k_proj.weight"])
    begun = time.process_time()
    found = [config.key_of(K) for _ in range(1000)]  # 0.01 s; 4 s if each builds a set of the names
    assert time.process_time() - begun < 0.5 and set(found) == {f"{K}.weight"}


def test_patterns_that_backtrack_or_are_too_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_config, "_LIMIT_S", 0.05)
    config = read(tmp_path, target_modules=r"(\w|\w\w|.)+[XY]")
    with pytest.raises(StartupError, match=r"target_modules has a pattern that takes more than 0\.05 s"):
        config.key_of(f"model.layers.1.self_attn.{'q' * 200}_proj")
    with pytest.raises(StartupError, match=r"patterns that take more than 0\.05 s to read: '\(a\|b\)"):
        read(tmp_path, rank_pattern={"(a|b)" * 500 + str(number): 2 for number in range(20)})
    with pytest.raises(StartupError, match="rank_pattern has more than 1000 regular expressions"):
        read(tmp_path, rank_pattern={f".*{number}": 2 for number in range(1001)})
    many = read(tmp_path, rank_pattern={f"^model\\.layers\\.{layer}\\.mlp$": layer + 1 for layer in range(2000)})
    assert [many.rank_of(f"model.layers.{layer}.mlp") for layer in (0, 1999)] == [1, 2000]
    assert many.rank_of("text.model.layers.1.mlp") == 8  # a name with a mark of its beginning is whole
