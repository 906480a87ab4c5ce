"""Every file in configs/ is accepted by the server's own reader and sets what its name promises."""

import re

import pytest

from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import as_markdown
from oarlock.server.config.sources import load_settings
from tests.house import card_memory
from tests.house.rules import ROOT

EXPECTED = {"cpu": ("cpu", 1), "1gpu": ("cuda", 1), "2gpu": ("cuda", 2)}


def test_there_is_one_file_for_each_machine():
    assert {path.stem for path in (ROOT / "configs").glob("*.toml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_file_loads(name):
    path = f"{ROOT}/configs/{name}.toml"
    loaded = load_settings({}, {}, path)
    assert (loaded.settings.device, loaded.settings.tensor_parallel_size) == EXPECTED[name]
    assert loaded.origins["device"] == path
    assert loaded.settings.host == "127.0.0.1"  # what is reachable from outside is never a file's doing


@pytest.mark.parametrize("name", EXPECTED)
def test_its_commented_advice_loads_as_well(name, tmp_path):
    text = (ROOT / "configs" / f"{name}.toml").read_text()
    advised = re.sub(r"^# (?=[a-z_]+ = \S+$)", "", text, flags=re.MULTILINE)
    copy = tmp_path / "advised.toml"
    copy.write_text(advised)
    load_settings({}, {}, str(copy))
    assert (advised != text) == (name != "2gpu")


@pytest.mark.parametrize("name", card_memory.SHOWN)
def test_its_arithmetic_is_the_servers_own(name):
    text, made = (ROOT / "configs" / f"{name}.toml").read_text(), card_memory.table(name)
    assert f"\n{made}\n" in text, f"put the table of `python -m tests.house.card_memory` into configs/{name}.toml"
    settings = load_settings({}, {}, f"{ROOT}/configs/{name}.toml").settings
    bound = re.search(r"takes up to (\d+) KiB", text)
    steps = [
        card_memory.step_bytes_of(model, settings) / settings.max_num_batched_tokens
        for model in card_memory.SHOWN[name]
    ]
    assert bound is not None and int(bound[1]) * 0.95 <= max(steps) / 1024 <= int(bound[1])


@pytest.mark.parametrize("model", card_memory.MODELS)
def test_a_model_of_the_arithmetic_has_the_size_that_its_card_names(model):
    assert card_memory.spec_of(model).num_parameters == card_memory.MODELS[model][1]


def test_what_the_files_say_of_contexts_holds():
    def fitting(model, name):
        return int(card_memory.column(model, name)[7].replace(",", ""))

    assert fitting("Qwen2.5-7B", "1gpu") >= card_memory.spec_of("Qwen2.5-7B").longest_length == 32_768
    assert fitting("Llama-3.1-8B", "1gpu") >= 16_384
    assert card_memory.spec_of("Llama-3.1-8B").longest_length * 128 * 1024 == 16 * 2**30
    for model in card_memory.SHOWN["2gpu"]:
        assert fitting(model, "2gpu") >= card_memory.spec_of(model).longest_length


def test_a_flag_and_the_environment_outrank_the_file():
    path = f"{ROOT}/configs/2gpu.toml"
    assert load_settings({}, {"OARLOCK_DEVICE": "cpu"}, path).settings.device == "cpu"
    assert load_settings({"device": "auto"}, {"OARLOCK_DEVICE": "cpu"}, path).settings.device == "auto"


def test_a_wrong_key_is_noticed(tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("tensor_paralel_size = 2\n")
    with pytest.raises(OptionError, match="tensor_parallel_size"):
        load_settings({}, {}, str(wrong))


def test_the_documented_table_is_the_one_the_server_prints():
    assert as_markdown() in (ROOT / "docs" / "configuration.md").read_text()
