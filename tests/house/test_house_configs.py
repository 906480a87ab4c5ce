"""Every file in configs/ is accepted by the server's own reader, and its comments are right."""

import re

import pytest

from oarlock.server.config.sources import load_settings
from tests.house.rules import ROOT
from tools import card_memory

EXPECTED = {"cpu": ("cpu", 1), "1gpu": ("cuda", 1), "2gpu": ("cuda", 2)}
TEXTS = {path.stem: path.read_text() for path in (ROOT / "configs").glob("*.toml")}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_file_and_its_commented_advice_load(name, tmp_path):
    assert TEXTS.keys() == EXPECTED.keys()
    settings = load_settings({}, {}, f"{ROOT}/configs/{name}.toml").settings
    assert (settings.device, settings.tensor_parallel_size, settings.host) == (*EXPECTED[name], "127.0.0.1")
    advised = re.sub(r"^# (?=[a-z_]+ = \S+$)", "", TEXTS[name], flags=re.MULTILINE)
    assert (advised != TEXTS[name]) == (name != "2gpu")
    (tmp_path / "advised.toml").write_text(advised)
    load_settings({}, {}, str(tmp_path / "advised.toml"))


@pytest.mark.parametrize("name", card_memory.SHOWN)
def test_its_arithmetic_is_the_servers_own(name):
    made = f"\n{card_memory.table(name)}\n"
    assert made in TEXTS[name], f"put the table of `python -m tools.card_memory` into configs/{name}.toml"
    settings = load_settings({}, {}, f"{ROOT}/configs/{name}.toml").settings
    specs = {model: card_memory.spec_of(model) for model in card_memory.SHOWN[name]}
    largest = max(card_memory.step_bytes_of(model, settings) for model in specs) / settings.max_num_batched_tokens
    (bound,) = re.findall(r"takes up to (\d+) KiB", TEXTS[name])
    assert int(bound) * 0.95 <= largest / 1024 <= int(bound)
    for model, spec in specs.items():
        assert spec.num_parameters == card_memory.MODELS[model][1]  # as its card names it
        fitting = int(card_memory.column(model, name)[7].replace(",", ""))
        assert fitting >= (16_384 if (model, name) == ("Llama-3.1-8B", "1gpu") else spec.longest_length)
