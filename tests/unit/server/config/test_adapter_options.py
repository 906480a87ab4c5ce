"""Options of LoRA adapters: names and paths from every source, defaults, and combinations that are refused."""

import pytest

from oarlock.server.config.adapter_options import LoraModule, parse_lora_modules
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import OPTIONS, make_settings
from oarlock.server.config.sources import load_settings

OBJECT = '{"name": "b", "path": "/x,y", "base_model_name": "base"}'
MODULES = [LoraModule("a", "/x=1"), LoraModule("b", "/x,y", "base")]


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_adapters_come_from_every_source(tmp_path, source):
    file = tmp_path / "o.toml"
    table = "{name = 'b', path = '/x,y', base_model_name = 'base'}"
    file.write_text(f'enable_lora = true\nlora_modules = ["a=/x=1", {table}]' if source == "file" else "")
    flags = {"enable_lora": True, "lora_modules": OPTIONS["lora_modules"].from_texts(["a=/x=1", OBJECT])}
    variables = {"OARLOCK_ENABLE_LORA": "1", "OARLOCK_LORA_MODULES": f"a=/x=1, {OBJECT}"}
    given = flags if source == "flag" else {}, variables if source == "environment" else {}
    settings = load_settings(*given, str(file)).settings
    assert parse_lora_modules(settings.lora_modules) == MODULES
    worker = settings.engine_config("/m").worker
    assert (worker.max_loras, worker.max_lora_rank, worker.lora_target_modules) == (2, 16, None)


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        ({"enable_lora": False}, 0),
        ({}, 1),
        ({"lora_modules": [f"a{number}=/x" for number in range(9)]}, 8),
        ({"lora_modules": ["a=/x"], "max_loras": 3, "max_cpu_loras": 3}, 3),
    ],
)
def test_the_number_of_slots_follows_the_adapters(given, slots):
    values = {"enable_lora": True, **given}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    assert make_settings(values).engine_config("/m").worker.max_loras == slots


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"enable_lora": False, "lora_modules": ("a=/x",)}, "--lora-modules is given, but"),
        ({"enable_lora": False, "max_lora_rank": 16}, "--max-lora-rank is given, but"),
        ({"enable_lora": False, "lora_target_modules": ("q_proj",)}, "--lora-target-modules is given, but"),
        ({"lora_modules": ("/x",)}, "must be name=path"),
        ({"lora_modules": ("=/x",)}, "must be name=path"),
        ({"lora_modules": ("a=/x", "a=/y")}, "the name 'a' twice"),
        ({"lora_modules": ('{"name": "a"}',)}, "lacks name or path"),
        ({"lora_modules": ('{"name": "a", "path": 1}',)}, "a value of path that is not a text"),
        ({"lora_modules": ('{"name": "a", "path": "/x", "rank": "8"}',)}, "the key 'rank', which is not known"),
        ({"lora_modules": ('{"name"',)}, "invalid JSON"),
        ({"lora_modules": ('{"name": " a", "path": "/x"}',)}, "1 to 128 printable characters"),
        ({"lora_modules": (f"{'a' * 129}=/x",)}, "1 to 128 printable characters"),
        ({"lora_modules": ("a (replacement)=/x",)}, "names that end with ' (replacement)'"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "--max-cpu-loras (2) is below --max-loras (4)"),
        ({"lora_target_modules": ("model.q_proj",)}, "the last parts of the names of modules"),
        ({"max_lora_rank": 0}, "at least 1"),
    ],
)
def test_mistakes_are_named(given, cause):
    with pytest.raises(OptionError) as caught:
        make_settings({"enable_lora": True, **given})
    assert cause in caught.value.cause and "\n" not in str(caught.value)
