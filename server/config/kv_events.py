"""The value of `--kv-events-config`: vLLM's JSON object, strictly checked before anything starts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from oarlock.engine.config import KvEventsConfig
from oarlock.server.config.option_checks import json_object
from oarlock.server.config.options import OptionError, nearest

EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
_FLAG = "--kv-events-config"
_COUNTS = ("buffer_steps", "hwm", "max_queue_size")
_KEYS = ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", *_COUNTS, "topic")
_MOST = 10_000_000
_ADDRESS = re.compile(r"tcp://(?:\[[^\[\]\s]+\]|[^\[\]:\s/]+):(?P<port>\d{1,5}|\*)|ipc:///[^\s]{1,90}")
_LIBRARIES = ("zmq", "msgspec")


def parse_kv_events_config(
    value: str | Mapping[str, Any], *, has_api_keys: bool = False, num_replicas: int = 1
) -> KvEventsConfig | None:
    """Parse and check the object; None where nothing is to be published. Raises `OptionError`."""
    keys = json_object(_FLAG, value, _usage())
    for name in keys:
        if name not in _KEYS:
            near = nearest(name, _KEYS)
            fix = f"Did you mean {near}?" if near else f"Its keys are {', '.join(_KEYS)}."
            raise OptionError(f"{_FLAG} has the key {name!r:.80}, which is not known.", fix)
    enabled = keys.get("enable_kv_cache_events")
    if not isinstance(enabled, bool):
        raise _wrong("enable_kv_cache_events", enabled, "true or false")
    publisher = keys.get("publisher", "zmq")
    if publisher not in ("zmq", "null", None):
        raise _wrong("publisher", publisher, '"zmq" or "null"')
    topic = keys.get("topic", "")
    if not isinstance(topic, str) or not topic.isprintable() or len(topic) > 256:
        raise _wrong("topic", topic, "a printable string of at most 256 characters")
    defaults = KvEventsConfig()
    config = KvEventsConfig(
        endpoint=_address(keys, "endpoint", defaults.endpoint, num_replicas),
        replay_endpoint=None
        if keys.get("replay_endpoint") is None
        else _address(keys, "replay_endpoint", "", num_replicas),
        topic=topic,
        has_key_in_salts=has_api_keys,
        **{name: _count(keys, name, getattr(defaults, name)) for name in _COUNTS},
    )
    _check_distance(config, num_replicas)
    if not enabled or publisher == "null":
        return None
    _check_installed()
    return config


def _check_distance(config: KvEventsConfig, num_replicas: int) -> None:
    """Check that the two port ranges do not overlap: each replica uses the next port of both."""
    if config.replay_endpoint is None:
        return
    first, second = (_port(address) for address in (config.endpoint, config.replay_endpoint))
    if config.endpoint == config.replay_endpoint or (first and second and abs(first - second) < num_replicas):
        raise OptionError(
            f"{_FLAG} has endpoint {config.endpoint!r} and replay_endpoint {config.replay_endpoint!r}, which use the "
            f"same port{'' if num_replicas == 1 else f' with {num_replicas} replicas, which count both on'}.",
            f"Put them at least {num_replicas} apart, for example tcp://*:5557 and tcp://*:5657.",
        )


def _check_installed() -> None:
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"{_FLAG} publishes KV events, for which the Python package {' and '.join(missing)} is missing.",
            "Run: pip install 'oarlock[kv-events]' (in a checkout: pip install --editable '.[kv-events]')",
        )


def _address(keys: Mapping[str, Any], name: str, default: str, num_replicas: int) -> str:
    value = keys.get(name, default)
    if not isinstance(value, str) or not (found := _ADDRESS.fullmatch(value)):
        raise _wrong(name, value, "an address like tcp://*:5557, tcp://router:5557 or ipc:///run/kv.sock")
    if found["port"] not in (None, "*") and int(found["port"]) + num_replicas - 1 > 65535:
        raise _wrong(name, value, f"an address whose port is at most {65536 - num_replicas}")
    return value


def _port(address: str) -> int | None:
    """Port of an address; None where the system chooses it, or where it has none."""
    found = _ADDRESS.fullmatch(address)
    port = None if found is None else found["port"]
    return None if port in (None, "*", "0") else int(port)


def _count(keys: Mapping[str, Any], name: str, default: int) -> int:
    value = keys.get(name, default)
    if type(value) is not int or not 1 <= value <= _MOST:
        raise _wrong(name, value, f"an integer from 1 to {_MOST}")
    return value


def _wrong(name: str, value: Any, must_be: str) -> OptionError:
    return OptionError(f"{_FLAG} has {name} {value!r:.80}, but it must be {must_be}.", f"For example: {_usage()}")


def _usage() -> str:
    return f"{_FLAG} '{EXAMPLE}'"
