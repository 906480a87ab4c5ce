"""Packages that the machine lacks, from a folder of wheels: unpacked beside the results, without pip or a network."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
CLIENT = "httpx"  # asks the servers


def absent() -> list[str]:
    """Packages that parts with servers need, and that are neither installed nor unpacked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = [*(Requirement(line).name for line in project["dependencies"]), CLIENT]
    return [name for name in needed if importlib.util.find_spec(name.replace("-", "_")) is None]


def unpack(wheels: Path, into: Path) -> list[str]:
    """Unpack the wheels that fit this Python and whose packages are not installed. Returns names with versions.

    `into` goes to PYTHONPATH, which comes before what is installed: so a wheel never replaces the machine's own torch.
    """
    fitting, taken = set(sys_tags()), []
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            name, version, _, tags = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            continue
        if not fitting.isdisjoint(tags) and not _is_installed(name):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            taken.append(f"{name} {version}")
    return taken


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
