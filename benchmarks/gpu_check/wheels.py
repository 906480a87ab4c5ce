"""Packages that the machine lacks, from a folder of wheels: unpacked beside the results, without pip or a network."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename


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
