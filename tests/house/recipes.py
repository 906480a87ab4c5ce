"""Read a Dockerfile, as far as this repository uses its syntax, and the compose file."""

import re
from typing import Any

import yaml

from tests.house.rules import ROOT

Steps = list[tuple[str, str]]  # instructions and their texts


def stages() -> dict[str, Steps]:
    """Return each stage of the Dockerfile with its instructions, which follow the instructions of its base stages."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Steps] = {}
    current: Steps = []  # before the first stage: arguments of the build
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = list(found.get(base, []))
        if word:
            current.append((word, rest.strip()))
    return found


def last(steps: Steps, instruction: str) -> str:
    """Return the text of an instruction that holds at the end of a stage."""
    return [text for word, text in steps if word == instruction][-1]


def environment(steps: Steps) -> dict[str, str]:
    """Return the variables of a stage."""
    return dict(pair.split("=", 1) for word, text in steps if word == "ENV" for pair in text.split())


def compose() -> dict[str, Any]:
    """Return the parsed compose file."""
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the mounts of a service: path in the container -> the named volume or the folder of the host."""
    pairs = [re.match(r"(\$\{[^}]*\}|[^:]+):([^:]+)", volume) for volume in service["volumes"]]
    return {pair[2]: pair[1] for pair in pairs if pair}
