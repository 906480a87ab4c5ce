"""`--speculative-config`: vLLM's object, from every source, with an error for everything that is not done here."""

from __future__ import annotations

import json

import pytest

from oarlock.engine.config import EngineConfig, SpeculativeConfig
from oarlock.server.config.json_options import parse_speculative_config
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import Settings, make_settings
from oarlock.server.config.sources import as_table, load_settings

TEXT = '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5, "prompt_lookup_min": 3}'
MEANT = SpeculativeConfig(7, 5, 3)


def test_there_are_no_drafts_by_default():
    assert Settings().engine_config("/m").speculative is None


@pytest.mark.parametrize("source", ["flag", "environment", "string", "inline table", "table", "offline"])
def test_it_reaches_the_engine_from_every_source(tmp_path, source):
    path = tmp_path / "o.toml"
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in json.loads(TEXT).items())
    tables = {
        "string": f"speculative_config = '{TEXT}'",
        "inline table": "speculative-config = {" + keys.replace("\n", ", ") + "}",
        "table": f"[speculative_config]\n{keys}",
    }
    path.write_text(tables.get(source, ""))
    if source == "offline":
        settings = make_settings({"speculative_config": json.loads(TEXT)})
    else:
        flags = {"speculative_config": TEXT} if source == "flag" else {}
        environment = {"OARLOCK_SPECULATIVE_CONFIG": TEXT} if source == "environment" else {}
        loaded = load_settings(flags, environment, str(path))
        settings = loaded.settings
        shown = next(value for name, value, _ in as_table(loaded) if name == "speculative_config")
        assert json.loads(shown) == json.loads(TEXT)
    config = settings.engine_config("/m")
    assert config.speculative == MEANT
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("keys", "meant"),
    [
        ({}, (5, 4, 2)),
        ({"method": "ngram", "num_speculative_tokens": 1}, (1, 4, 2)),
        ({"prompt_lookup_max": 1}, (5, 1, 1)),
        ({"prompt_lookup_max": 9}, (5, 9, 2)),
        ({"prompt_lookup_min": 6}, (5, 6, 6)),
        ({"prompt_lookup_min": 1}, (5, 4, 1)),
    ],
)
def test_missing_keys_get_defaults_that_fit_the_given_keys(keys, meant):
    assert parse_speculative_config(json.dumps(keys)) == SpeculativeConfig(*meant)


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        ("ngram", "must be a JSON object", '"method": "ngram"'),
        ("[5]", "must be a JSON object", '"method": "ngram"'),
        ("[" * 100_000, "must be a JSON object", '"method": "ngram"'),
        ('{"method": "eagle3"}', "has the method 'eagle3'", '"method": "ngram"'),
        ('{"method": ["ngram"]}', "has the method", '"method": "ngram"'),
        ('{"method": "draft_model", "model": "x"}', "'model', which is not supported", "no draft model"),
        ('{"disable_by_batch_size": 8}', "not supported", "while the measured step times"),
        ('{"num_speculative_token": 8}', "not known", "Did you mean num_speculative_tokens?"),
        ('{"x": 8}', "not known", "For example"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens 0", "For example"),
        ('{"num_speculative_tokens": 17}', "from 1 to 16", "For example"),
        ('{"num_speculative_tokens": true}', "must be an integer", "For example"),
        ('{"prompt_lookup_min": 2.0}', "must be an integer", "For example"),
        ('{"prompt_lookup_min": 3, "prompt_lookup_max": 2}', "prompt_lookup_min (3) above", "Raise"),
    ],
)
def test_mistakes_have_a_cause_and_a_fix(text, cause, fix):
    with pytest.raises(OptionError) as caught:
        make_settings({"speculative_config": text})
    assert caught.value.cause.startswith("--speculative-config") and cause in caught.value.cause
    assert fix in caught.value.fix
    assert len(caught.value.cause) < 250 and "\n" not in str(caught.value)


def test_another_option_must_not_be_a_table(tmp_path):
    path = tmp_path / "o.toml"
    path.write_text("[port]\nx = 1")
    with pytest.raises(OptionError, match="must not be in tables"):
        load_settings({}, {}, str(path))
