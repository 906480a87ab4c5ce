"""`--kv-events-config`: vLLM's object, from every source, with one line of cause and one of fix for every mistake."""

from __future__ import annotations

import importlib.util
import json

import pytest

from oarlock.engine.config import EngineConfig, KvEventsConfig
from oarlock.server.config.json_options import parse_kv_events_config
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import Settings, make_settings
from oarlock.server.config.sources import load_settings

ON = {"enable_kv_cache_events": True}


def test_nothing_is_published_by_default():
    assert Settings().engine_config("/m").kv_events is None


@pytest.mark.parametrize("keys", [{"enable_kv_cache_events": False, "topic": "x"}, {**ON, "publisher": "null"}])
def test_it_can_be_off(keys):
    assert make_settings({"kv_events_config": keys}).engine_config("/m").kv_events is None


def test_vllms_defaults_are_ours():
    assert parse_kv_events_config(json.dumps(ON)) == KvEventsConfig(
        "tcp://*:5557", None, buffer_steps=10_000, hwm=100_000, max_queue_size=100_000, topic=""
    )
    assert parse_kv_events_config({**ON, "publisher": None, "replay_endpoint": None}) == KvEventsConfig()


@pytest.mark.parametrize("source", ["flag", "environment", "table", "offline"])
def test_it_reaches_the_engine_from_every_source(tmp_path, source):
    keys = {**ON, "publisher": "zmq", "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://[::1]:6100"}
    keys |= {"buffer_steps": 5, "hwm": 6, "max_queue_size": 7, "topic": "kv@pod@model"}
    path = tmp_path / "o.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join(["[kv_events_config]", *lines]) if source == "table" else "")
    if source == "offline":
        settings = make_settings({"kv_events_config": keys})
    else:
        flags = {"kv_events_config": json.dumps(keys)} if source == "flag" else {}
        environment = {"OARLOCK_KV_EVENTS_CONFIG": json.dumps(keys)} if source == "environment" else {}
        settings = load_settings(flags, environment, str(path)).settings
    config = settings.engine_config("/m")
    assert config.kv_events == KvEventsConfig("tcp://*:6000", "tcp://[::1]:6100", 5, 6, 7, "kv@pod@model")
    assert EngineConfig.from_json(config.to_json()) == config


def test_with_api_keys_no_salt_tells_which():
    config = make_settings({"kv_events_config": ON, "api_key": ("one",)}).engine_config("/m").kv_events
    assert config is not None and config.has_key_in_salts


@pytest.mark.parametrize(
    ("endpoint", "is_bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/kv.sock", True),
        ("tcp://epp.example.org:5557", False),
    ],
)
def test_a_wildcard_is_bound_and_a_host_connected_to(endpoint, is_bound):
    config = parse_kv_events_config({**ON, "endpoint": endpoint})
    assert config is not None and config.is_bound is is_bound


@pytest.mark.parametrize(
    ("value", "cause", "fix"),
    [
        ("zmq", "must be a JSON object", "enable_kv_cache_events"),
        ("[1]", "must be a JSON object", "enable_kv_cache_events"),
        ('{"enable_kv_cache_events": true', "must be a JSON object", "enable_kv_cache_events"),
        ({"endpoint": "tcp://*:1"}, "enable_kv_cache_events None", "For example"),
        ({"enable_kv_cache_events": "yes"}, "must be true or false", "For example"),
        ({**ON, "end_point": "tcp://*:1"}, "'end_point', which is not known", "Did you mean endpoint?"),
        ({**ON, "x": 1}, "'x', which is not known", "The keys are enable_kv_cache_events"),
        ({**ON, "publisher": "kafka"}, "publisher 'kafka'", "For example"),
        ({**ON, "endpoint": 5557}, "endpoint 5557", "For example"),
        ({**ON, "endpoint": "5557"}, "must be an address", "For example"),
        ({**ON, "endpoint": "tcp://*"}, "must be an address", "For example"),
        ({**ON, "endpoint": "inproc://kv"}, "must be an address", "For example"),
        ({**ON, "endpoint": "tcp://*:65536"}, "port is at most 65535", "For example"),
        ({**ON, "replay_endpoint": ""}, "replay_endpoint ''", "For example"),
        ({**ON, "replay_endpoint": "tcp://*:5557"}, "use the same port", "at least 1 apart"),
        ({**ON, "buffer_steps": 0}, "from 1 to", "For example"),
        ({**ON, "hwm": True}, "must be an integer", "For example"),
        ({**ON, "max_queue_size": "9"}, "must be an integer", "For example"),
        ({**ON, "topic": 7}, "topic 7", "For example"),
        ({**ON, "topic": "a\nb"}, "printable", "For example"),
    ],
)
def test_mistakes_have_a_cause_and_a_fix(value, cause, fix):
    with pytest.raises(OptionError) as caught:
        make_settings({"kv_events_config": value})
    assert caught.value.cause.startswith("--kv-events-config") and cause in caught.value.cause
    assert fix in caught.value.fix
    assert len(caught.value.cause) < 300 and "\n" not in str(caught.value)


def test_ports_of_replicas_do_not_meet():
    value = {**ON, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5560"}
    assert parse_kv_events_config(value, num_replicas=3) is not None
    with pytest.raises(OptionError, match="with 4 replicas, which count both on"):
        parse_kv_events_config(value, num_replicas=4)
    with pytest.raises(OptionError, match="at most 65533"):
        parse_kv_events_config({**ON, "endpoint": "tcp://*:65534"}, num_replicas=3)


def test_without_a_prefix_cache_there_is_nothing_to_tell():
    with pytest.raises(OptionError, match="turns it off") as caught:
        make_settings({"kv_events_config": ON, "enable_prefix_caching": False})
    assert "Leave one" in caught.value.fix


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zmq" else real(name))
    with pytest.raises(OptionError) as caught:
        make_settings({"kv_events_config": ON})
    assert "package zmq is missing" in caught.value.cause and "pip install 'oarlock[kv-events]'" in caught.value.fix
    off = {"enable_kv_cache_events": False}
    assert make_settings({"kv_events_config": off}).published_kv_events() is None
