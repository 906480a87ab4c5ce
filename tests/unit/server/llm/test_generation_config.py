"""End tokens and sampling from a checkpoint's files: which file counts, and values that are refused."""

from __future__ import annotations

import json

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.llm.generation_config import GenerationConfig

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_k": 20.0,
    "top_p": 0.8,
    "min_p": None,
}
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(QWEN))
    return tmp_path / "model"


def test_auto_takes_the_models_own(model):
    found = GenerationConfig.load(model)
    assert (dict(found.sampling), found.max_new_tokens, found.eos_token_ids) == (SAMPLING, None, (151645, 151643))
    assert found.source == str(model / "generation_config.json")


def test_vllm_means_neutral_sampling_with_the_models_end_tokens(model):
    found = GenerationConfig.load(model, "vllm")
    assert (dict(found.sampling), found.max_new_tokens, found.source) == ({}, None, "neutral")
    assert found.eos_token_ids == (151645, 151643)


def test_a_folder_replaces_the_models_file(model, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 50, "top_k": -1, "temperature": 0}')
    (model / "config.json").write_text('{"eos_token_id": 7, "temperature": 0.1}')
    found = GenerationConfig.load(model, str(tmp_path))
    assert (dict(found.sampling), found.max_new_tokens) == ({"temperature": 0, "top_k": -1}, 50)
    assert found.eos_token_ids == (7,), "the model's config.json, where the file names none"


def test_without_a_file_sampling_is_neutral(model):
    (model / "generation_config.json").unlink()
    (model / "config.json").write_text('{"eos_token_id": [3, 4]}')
    assert GenerationConfig.load(model) == GenerationConfig(eos_token_ids=(3, 4))


@pytest.mark.parametrize(("own", "ends"), [("", (5,)), ('"eos_token_id": null, ', (5,)), ('"eos_token_id": 6, ', (6,))])
def test_the_text_config_of_a_multimodal_model_names_end_tokens(model, own, ends):
    (model / "generation_config.json").unlink()
    (model / "config.json").write_text(f'{{{own}"text_config": {{"eos_token_id": 5, "vocab_size": 7}}}}')
    assert GenerationConfig.load(model).eos_token_ids == ends
    (model / "config.json").write_text(f'{{{own}"text_config": {{"eos_token_id": 5, "vocab_size": 5}}}}')
    with pytest.raises(StartupError, match="no completion would end"):
        GenerationConfig.load(model)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": None, "max_new_tokens": 5}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": True}, {}),
        ({"do_sample": None}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({}, {}),
    ],
)
def test_only_an_explicit_false_means_greedy(model, values, expected):
    (model / "generation_config.json").write_text(json.dumps(values))
    found = GenerationConfig.load(model)
    assert dict(found.sampling) == expected
    assert found.source == ("neutral" if not expected else str(model / "generation_config.json"))
    assert GenerationConfig.load(model, "vllm").sampling == {}


@pytest.mark.parametrize("value", ["false", 0, 1, "", [], {}])
def test_do_sample_is_true_or_false(model, value):
    (model / "generation_config.json").write_text(json.dumps({"do_sample": value}))
    with pytest.raises(StartupError, match=r"'do_sample' in .*generation_config\.json is"):
        GenerationConfig.load(model)


@pytest.mark.parametrize("value", ["hot", "0.7", True, -1, 3, float("nan"), [0.5], {}])
def test_a_value_that_no_request_may_have_is_refused(model, value):
    (model / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(StartupError, match=r"'temperature' in .*generation_config\.json is") as refused:
        GenerationConfig.load(model)
    assert "--generation-config vllm" in refused.value.fix
    assert GenerationConfig.load(model, "vllm").sampling == {}


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": 10**400},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
    ],
)
def test_ranges_match_requests(model, values):
    (model / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(StartupError, match=next(iter(values))):
        GenerationConfig.load(model)


@pytest.mark.parametrize("value", ["2", True, [2, None], [[2]], 2.5, {}])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_tokens_are_ids(model, name, value):
    (model / "generation_config.json").unlink()
    (model / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(StartupError, match=f"'eos_token_id' in .*{name}"):
        GenerationConfig.load(model)


def test_a_folder_without_the_file_is_named(model, tmp_path):
    for wrong in (str(tmp_path), str(model / "generation_config.json"), "none"):
        with pytest.raises(StartupError, match="--generation-config is"):
            GenerationConfig.load(model, wrong)
