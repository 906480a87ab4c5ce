"""Every file in configs/ is accepted by the server's own reader and sets what its name promises."""

import re

import pytest

from server.config.options import OptionError
from server.config.settings import as_markdown
from server.config.sources import load_settings
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
