"""Sources of settings: flag > environment (`OARLOCK_*`) > TOML file > torchrun, LeaderWorkerSet or Ray > default.

Only this module reads the file, and the environment for options. Errors about unknown names suggest the nearest name.
"""

import os
import re
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.base.paths import expand
from oarlock.server.config.nodes import launched
from oarlock.server.config.option_checks import unknown_name
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import OPTIONS, Settings, make_settings

_HOST = "_SERVICE_HOST"
_PORT = "_PORT"
_OTHERS = r"_SERVICE_PORT(_\w+)?|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
_ADDRESS = re.compile("(tcp|udp|sctp)://")


def service_links(environment: Mapping[str, str]) -> set[str]:
    """Return the names of Kubernetes' service links. OARLOCK_PORT is a link only if its value is like `tcp://…`."""
    services = [name.removesuffix(_HOST) for name in environment if name.endswith(_HOST)]
    others = re.compile(f"({'|'.join(map(re.escape, services))})({_OTHERS})")
    found = {name for name in environment if services and others.fullmatch(name)}
    found |= {service + _HOST for service in services}
    return found | {service + _PORT for service in services if _ADDRESS.match(environment.get(service + _PORT, ""))}


# Variables that are not options: the name of the file, and the variable that `workers/kernels/cpu/build.py` reads.
_READ_ELSEWHERE = ("OARLOCK_CONFIG", "OARLOCK_CPU_LEVEL")


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and the origin of each value.

    An origin is `flag`, `environment`, the file's name, `torchrun`, `LeaderWorkerSet`, `ray` or `default`.
    """

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=dict)


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, config_file: str | None = None
) -> LoadedSettings:
    """Merge the sources. `flags` has only the flags that were given, already parsed. Raises `OptionError`."""
    environment = os.environ if environment is None else environment
    config_file = config_file or environment.get("OARLOCK_CONFIG")
    values: dict[str, Any] = {}
    origins = dict.fromkeys(OPTIONS, "default")
    layers = [(config_file or "", _from_file(config_file)), ("environment", _from_environment(environment))]
    for origin, layer in [*layers, ("flag", dict(flags))]:
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    launcher, layer = launched(environment, values)
    values |= layer
    origins |= dict.fromkeys(layer, launcher)
    return LoadedSettings(make_settings(values), origins)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    by_env = {described.env: described for described in OPTIONS.values()}
    values = {}
    not_ours = service_links(environment).union(_READ_ELSEWHERE)
    for name, text in environment.items():
        if not name.startswith("OARLOCK_") or name in not_ours:
            continue
        if name not in by_env:
            raise unknown_name("environment variable", name, by_env)
        if not text.strip() and not by_env[name].secret:  # compose files pass unset variables on as empty
            continue
        values[by_env[name].name] = by_env[name].from_text(text)
    return values


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(expand(path).read_text(encoding="utf-8"))
    except StartupError as error:
        raise OptionError(f"--config: {error.cause}", error.fix) from None
    except OSError as error:
        raise OptionError(
            f"The configuration file {path} cannot be read: {error.strerror}.", "Give --config an existing TOML file."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not valid TOML: {error}.", "Correct that line.") from None
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if isinstance(value, dict) and not (name in OPTIONS and OPTIONS[name].is_json):
            raise OptionError(
                f"{path} has a table [{key}], but options must not be in tables.",
                f"Move the keys below it to the beginning of the file, and remove [{key}].",
            )
        if name not in OPTIONS:
            raise unknown_name(f"key in {path}", key, OPTIONS)
        values[name] = OPTIONS[name].from_toml(value)
    return values


def as_flags(loaded: LoadedSettings, without: Container[str]) -> list[str]:
    """Return the words of a command line for all values that are not defaults.

    Secrets and options of the groups in `without` are left out.
    """
    words = []
    for described in OPTIONS.values():
        value = getattr(loaded.settings, described.name)
        is_default = loaded.origins.get(described.name, "default") == "default"
        if is_default or described.group in without or described.secret or value is None:
            continue
        if described.positional:
            words.append(value)
        elif described.kind is bool:
            words.append(described.flag if value else f"--no-{described.flag[2:]}")
        elif described.many:
            words += [described.flag, *map(str, value)]
        else:
            words.append(f"{described.flag}={value}")
    return words


def as_table(loaded: LoadedSettings) -> list[tuple[str, str, str]]:
    """Return rows (name, value, origin) of every option, secrets hidden, as `oarlock config show` prints them."""
    rows = []
    for item in fields(Settings):
        value = getattr(loaded.settings, item.name)
        described = OPTIONS[item.name]
        if described.secret and value:
            shown = f"({len(value) if described.many else 1} hidden)"
        elif value is None or value == ():
            shown = described.unset_text
        elif isinstance(value, tuple):
            shown = ", ".join(value)
        else:
            shown = str(value).lower() if described.kind is bool else str(value)
        rows.append((item.name, shown, loaded.origins.get(item.name, "default")))
    return rows
