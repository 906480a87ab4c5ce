"""Options of LoRA adapters, and the parsing of `--lora-modules`."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from oarlock.server.config.options import OptionError, option

MAX_LORA_RANK = 16
MAX_NAME = 128  # characters of an adapter's name
REPLACEMENT = " (replacement)"  # ends the engine's name of the new content while it replaces an adapter
_MOST_SLOTS = 8  # of the default of --max-loras
_EXAMPLE = "For example: --lora-modules sql=/adapters/sql"
_KEYS = ("name", "path", "base_model_name")


@dataclass(frozen=True)
class AdapterSettings:
    """LoRA adapters: small changes of the model, which requests select by the name in `model`."""

    GROUP = "LoRA adapters"

    enable_lora: bool = option(False, help="serve LoRA adapters next to the model; requests name one as their model")
    lora_modules: tuple[str, ...] = option(
        (),
        example="sql=/adapters/sql",
        has_objects=True,
        help="adapters to load at the start: name=path, or a JSON object with name, path and base_model_name; a path "
        "is a directory that PEFT has written, a GGUF file or a hub id",
    )
    lora_dir: str | None = option(
        None,
        is_path=True,
        example="/adapters",
        help="directory of more adapters: each is loaded when a request first names its folder, and the admin key may "
        "load any path in it (/v1/load_lora_adapter)",
    )
    max_loras: int | None = option(
        None,
        example="8",
        limits=(1, 256),
        help="adapters in one step, each in a slot of every rank's memory; more adapters take turns (default: the "
        "number of --lora-modules, 1 to 8)",
    )
    max_lora_rank: int | None = option(
        None, example="64", limits=(1, 1024), help="highest rank of an adapter, which sizes the slots (default: 16)"
    )
    max_cpu_loras: int | None = option(
        None,
        example="32",
        limits=(1, 4096),
        help="adapters in the host memory of each rank; the least recently used leave, and are read again from their "
        "files (default: --max-loras)",
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        example="q_proj v_proj",
        help="names of the modules that adapters may change, such as q_proj, experts, embed_tokens or lm_head; fewer "
        "modules take less memory (default: all)",
    )

    @property
    def num_slots(self) -> int:
        """Adapters in one step; 0: LoRA is off."""
        if not self.enable_lora:
            return 0
        return self.max_loras or min(max(1, len(self.lora_modules)), _MOST_SLOTS)

    def worker_fields(self) -> dict[str, Any]:
        """Return the fields of `WorkerConfig` that these options decide."""
        return {
            "max_loras": self.num_slots,
            "max_lora_rank": self.max_lora_rank or MAX_LORA_RANK,
            "max_cpu_loras": self.max_cpu_loras,
            "lora_target_modules": self.lora_target_modules or None,
        }


class LoraModule(NamedTuple):
    """One adapter of `--lora-modules`."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_lora_modules(texts: Iterable[str]) -> list[LoraModule]:
    """Return the adapters of `--lora-modules`. Raises `OptionError`."""
    modules = [_from_json(text) if text.startswith("{") else _from_pair(text) for text in texts]
    names = [module.name for module in modules]
    for name in names:
        if (reason := why_no_name(name)) is not None:
            raise OptionError(f"--lora-modules has the name {name!r:.80}. {reason}", "Give the adapter another name.")
        if names.count(name) > 1:
            raise OptionError(f"--lora-modules has the name {name!r:.80} twice.", "Give each adapter its own name.")
    return modules


def why_no_name(name: str) -> str | None:
    """Return the reason why no adapter can have this name; None: an adapter can have it."""
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        return f"The name of an adapter has 1 to {MAX_NAME} printable characters, without spaces at its ends."
    if name.endswith(REPLACEMENT):
        return f"The server itself uses names that end with '{REPLACEMENT}'."
    return None


def check_adapters(settings: AdapterSettings) -> None:
    """Raise `OptionError` if the options of adapters do not go together."""
    if not settings.enable_lora:
        for name, value in vars(settings).items():
            if name in AdapterSettings.__annotations__ and name != "enable_lora" and value not in (None, ()):
                flag = "--" + name.replace("_", "-")
                raise OptionError(f"{flag} is given, but LoRA adapters are not served.", "Add --enable-lora.")
        return
    parse_lora_modules(settings.lora_modules)
    if settings.max_cpu_loras is not None and settings.max_cpu_loras < settings.num_slots:
        raise OptionError(
            f"--max-cpu-loras ({settings.max_cpu_loras}) is below --max-loras ({settings.num_slots}), but an adapter "
            "in a slot is in host memory, too.",
            f"Raise --max-cpu-loras to at least {settings.num_slots}.",
        )
    for name in settings.lora_target_modules:
        if not name.isidentifier():
            raise OptionError(
                f"--lora-target-modules has {name!r:.80}, but it takes the last parts of the names of modules.",
                "For example: --lora-target-modules q_proj k_proj v_proj o_proj",
            )


def _from_pair(text: str) -> LoraModule:
    name, mark, path = text.partition("=")
    if not (name.strip() and mark and path.strip()):
        raise OptionError(f"--lora-modules has {text!r:.80}, but it must be name=path or a JSON object.", _EXAMPLE)
    return LoraModule(name.strip(), path.strip())


def _from_json(text: str) -> LoraModule:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise OptionError(f"--lora-modules has invalid JSON: {error}.", _EXAMPLE) from None
    for key, value in table.items():
        if key not in _KEYS:
            keys = ", ".join(_KEYS)
            raise OptionError(f"--lora-modules has the key {key!r:.80}, which is not known.", f"The keys are {keys}.")
        if not (isinstance(value, str) and value.strip()) and (key, value) != ("base_model_name", None):
            raise OptionError(f"--lora-modules has a value of {key} that is not a text.", _EXAMPLE)
    if "name" not in table or "path" not in table:
        raise OptionError(f"--lora-modules has {text!r:.80}, which lacks name or path.", _EXAMPLE)
    return LoraModule(**table)
