"""Options whose value is a JSON object, as in vLLM: speculative decoding by prompt lookup, and published KV events.

Both are checked strictly before anything starts.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oarlock.engine.config import KvEventsConfig, SpeculativeConfig
from oarlock.server.config.options import OptionError, nearest


@dataclass(frozen=True, slots=True)
class ObjectOption:
    """An option with a JSON object as its value. Its methods raise `OptionError`, or return one to raise."""

    flag: str
    example: str

    @property
    def usage(self) -> str:
        return f"{self.flag} '{self.example}'"

    def read(self, value: str | Mapping[str, Any]) -> dict[str, Any]:
        """Return the object from its text, or from an object that was already parsed."""
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, Mapping):
            raise OptionError(
                f"{self.flag} is {value!r:.80}, but it must be a JSON object.", f"For example: {self.usage}"
            )
        return dict(found)

    def count(self, keys: Mapping[str, Any], name: str, default: int, most: int) -> int:
        """Return the integer value of a key, from 1 to `most`."""
        value = keys.get(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(name, value, f"an integer from 1 to {most}")
        return value

    def wrong(self, name: str, value: Any, must_be: str) -> OptionError:
        """Return the error for the value of a key."""
        return OptionError(
            f"{self.flag} has {name} {value!r:.80}, but it must be {must_be}.", f"For example: {self.usage}"
        )


SPECULATIVE = ObjectOption("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')
_LIMITS = {"num_speculative_tokens": 16, "prompt_lookup_max": 16, "prompt_lookup_min": 16}  # the largest values
# Defaults. Another prompt_lookup_max also limits the default of prompt_lookup_min.
_NUM_SPECULATIVE_TOKENS, _LOOKUP_MAX, _LOOKUP_MIN = 5, 4, 2
# Other keys of vLLM, each with a sentence on how Oarlock behaves instead.
_UNSUPPORTED = {
    **dict.fromkeys(
        (
            "model",
            "draft_tensor_parallel_size",
            "quantization",
            "revision",
            "code_revision",
            "tokenizer",
            "max_model_len",
            "enforce_eager",
            "draft_load_config",
            "draft_sample_method",
        ),
        "no draft model is loaded.",
    ),
    "disable_by_batch_size": "drafts are made only while the measured step times show that they pay off.",
    "speculative_token_tree": "the draft tokens of a sequence form a chain, not a tree.",
    "rejection_sample_method": "a draft token is accepted if the model samples the same token.",
}


def parse_speculative_config(value: str | Mapping[str, Any]) -> SpeculativeConfig:
    """Parse and check the object. Raises `OptionError`."""
    flag, example = SPECULATIVE.flag, f"For example: {SPECULATIVE.usage}"
    keys = SPECULATIVE.read(value)
    for name in keys:
        if name == "method" or name in _LIMITS:
            continue
        holds = _UNSUPPORTED.get(name)
        near = nearest(name, ("method", *_LIMITS))
        fix = f"Leave it out: {holds}" if holds else f"Did you mean {near}?" if near else example
        raise OptionError(f"{flag} has the key {name!r:.80}, which is not {'supported' if holds else 'known'}.", fix)
    if keys.get("method", "ngram") != "ngram":
        raise OptionError(
            f"{flag} has the method {keys['method']!r:.80}, but only 'ngram' is supported: drafts are "
            "looked up in the request's own prompt and completion.",
            example,
        )

    def number(name: str, default: int) -> int:
        return SPECULATIVE.count(keys, name, default, _LIMITS[name])

    num_tokens = number("num_speculative_tokens", _NUM_SPECULATIVE_TOKENS)
    longest = number("prompt_lookup_max", max(_LOOKUP_MAX, number("prompt_lookup_min", 1)))
    shortest = number("prompt_lookup_min", min(_LOOKUP_MIN, longest))
    if shortest > longest:
        raise OptionError(
            f"{flag} has a prompt_lookup_min ({shortest}) above prompt_lookup_max ({longest}).",
            f"Raise prompt_lookup_max to at least {shortest}, or lower prompt_lookup_min.",
        )
    return SpeculativeConfig(num_tokens, longest, shortest)


KV_EVENTS = ObjectOption("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}')
_COUNTS = ("buffer_steps", "hwm", "max_queue_size")
_KEYS = ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", *_COUNTS, "topic")
_MAX_COUNT = 10_000_000
_ADDRESS = re.compile(r"tcp://(?:\[[^\[\]\s]+\]|[^\[\]:\s/]+):(?P<port>\d{1,5}|\*)|ipc:///[^\s]{1,90}")


def parse_kv_events_config(
    value: str | Mapping[str, Any], *, has_api_keys: bool = False, num_replicas: int = 1
) -> KvEventsConfig | None:
    """Parse and check the object. Return None if nothing is to be published. Raises `OptionError`."""
    keys = KV_EVENTS.read(value)
    for name in keys:
        if name not in _KEYS:
            near = nearest(name, _KEYS)
            fix = f"Did you mean {near}?" if near else f"The keys are {', '.join(_KEYS)}."
            raise OptionError(f"{KV_EVENTS.flag} has the key {name!r:.80}, which is not known.", fix)
    enabled = keys.get("enable_kv_cache_events")
    if not isinstance(enabled, bool):
        raise KV_EVENTS.wrong("enable_kv_cache_events", enabled, "true or false")
    publisher = keys.get("publisher", "zmq")
    if publisher not in ("zmq", "null", None):
        raise KV_EVENTS.wrong("publisher", publisher, '"zmq" or "null"')
    topic = keys.get("topic", "")
    if not isinstance(topic, str) or not topic.isprintable() or len(topic) > 256:
        raise KV_EVENTS.wrong("topic", topic, "a printable string of at most 256 characters")
    defaults = KvEventsConfig()
    config = KvEventsConfig(
        endpoint=_address(keys, "endpoint", defaults.endpoint, num_replicas),
        replay_endpoint=None
        if keys.get("replay_endpoint") is None
        else _address(keys, "replay_endpoint", "", num_replicas),
        topic=topic,
        has_key_in_salts=has_api_keys,
        **{name: KV_EVENTS.count(keys, name, getattr(defaults, name), _MAX_COUNT) for name in _COUNTS},
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
            f"{KV_EVENTS.flag} has endpoint {config.endpoint!r} and replay_endpoint "
            f"{config.replay_endpoint!r}, which use the same port"
            f"{'' if num_replicas == 1 else f' with {num_replicas} replicas, which count both on'}.",
            f"Choose ports at least {num_replicas} apart, for example tcp://*:5557 and tcp://*:5657.",
        )


def _check_installed() -> None:
    if importlib.util.find_spec("zmq") is None:
        raise OptionError(
            f"{KV_EVENTS.flag} publishes KV events, for which the Python package zmq is missing.",
            "Run: pip install 'oarlock[kv-events]' (in a checkout: pip install --editable '.[kv-events]')",
        )


def _address(keys: Mapping[str, Any], name: str, default: str, num_replicas: int) -> str:
    value = keys.get(name, default)
    if not isinstance(value, str) or not (found := _ADDRESS.fullmatch(value)):
        raise KV_EVENTS.wrong(name, value, "an address like tcp://*:5557, tcp://router:5557 or ipc:///run/kv.sock")
    if found["port"] not in (None, "*") and int(found["port"]) + num_replicas - 1 > 65535:
        raise KV_EVENTS.wrong(name, value, f"an address whose port is at most {65536 - num_replicas}")
    return value


def _port(address: str) -> int | None:
    """Return the port of an address, or None if the system chooses the port or the address has none."""
    found = _ADDRESS.fullmatch(address)
    port = None if found is None else found["port"]
    return None if port in (None, "*", "0") else int(port)
