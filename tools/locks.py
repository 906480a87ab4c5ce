"""The lock files of the images: every package that requirements.txt and the extras of the images bring along, pinned
with the hashes of its wheels.

    python -m tools.locks        # asks the package index; needs a Python of the images' version

`requirements.lock` is for both images; what only torch's CUDA build needs is in `requirements-cuda.lock`. Run it after
a change of requirements.txt or of these extras; the tests compare the pins of both.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.rules import ROOT

FILES = ("requirements.lock", "requirements-cuda.lock")
EXTRAS = ("kv-events", "otel")  # of pyproject.toml
INDEX = "https://pypi.org/simple"
PYTHON = "3.13"  # of the images
MACHINES = ("x86_64", "aarch64")
GLIBC = 36  # of Debian 12
OF_CUDA = re.compile(r"torch|triton|cuda-.*|nvidia-.*")
HEADER = """\
# What requirements.txt and the extras bring along on Linux with Python {python}: {what}.
# Made by `python -m tools.locks`.
"""
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def read_lock(text: str) -> dict[str, tuple[str, list[str]]]:
    """Canonical name -> version and hashes."""
    found = {}
    for entry in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines():
        pin, _, rest = entry.strip().partition(" ")
        name, _, version = pin.partition("==")
        found[canonicalize_name(name)] = (version, _HASH.findall(rest))
    return found


def as_lock(packages: dict[str, tuple[str, list[str]]], what: str) -> str:
    lines = [HEADER.format(what=what, python=PYTHON).rstrip()]
    for name, (version, hashes) in sorted(packages.items()):
        lines.append(" \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{found}" for found in sorted(hashes))]))
    return "\n".join(lines) + "\n"


def unlocked(requirements: str, locked: dict[str, tuple[str, list[str]]]) -> list[str]:
    """Lines of a requirements file that a lock does not hold with the same version and at least one hash."""
    wanted = [Requirement(line.partition("#")[0]) for line in requirements.splitlines() if line.partition("#")[0]]
    return [
        str(requirement)
        for requirement in wanted
        for version, hashes in [locked.get(canonicalize_name(requirement.name), ("", []))]
        if not hashes or version not in requirement.specifier
    ]


def pinned_extras() -> list[str]:
    """The packages of `EXTRAS`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [requirement for name in EXTRAS for requirement in extras[name]]


def is_usable(wheel: str) -> bool:
    """Whether the images can install a file of this name."""
    if not wheel.endswith(".whl"):
        return False
    python, abi, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    of_python = "py3" in python or python == f"cp{PYTHON.replace('.', '')}" or abi == "abi3"
    glibc = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", platforms)]
    of_machine = platforms == "any" or any(f"_{machine}" in platforms for machine in MACHINES)
    return (
        of_python and abi[-1] != "t" and of_machine and (not glibc or min(glibc) <= GLIBC) and "musl" not in platforms
    )


def resolved() -> dict[str, str]:
    """Name -> version of everything that is brought along, by pip, which installs nothing."""
    if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))):
        raise SystemExit(f"error: pip resolves for its own Python\nfix: run this with Python {PYTHON}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--isolated", "--only-binary=:all:", "--report", str(report), "-r", str(ROOT / "requirements.txt")]
        # setuptools: what pyproject.toml builds with
        subprocess.run([*command, *pinned_extras(), "setuptools>=77"], check=True)
        found = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def hashes_of(name: str, version: str) -> list[str]:
    """Hashes of every wheel of this version that an image can install."""
    asked = urllib.request.Request(f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        files: list[dict[str, Any]] = json.load(answer)["files"]
    return [
        file["hashes"]["sha256"]
        for file in files
        if is_usable(file["filename"]) and file["filename"].split("-")[1] == version
    ]


def main() -> int:
    packages = {name: (version, hashes_of(name, version)) for name, version in resolved().items()}
    assert all(hashes for _, hashes in packages.values()), "a package has no wheel"
    for file, of_cuda, what in zip(
        FILES, (False, True), ("all but torch, for both images", "torch for CUDA"), strict=True
    ):
        chosen = {name: found for name, found in packages.items() if bool(OF_CUDA.fullmatch(name)) == of_cuda}
        (ROOT / file).write_text(as_lock(chosen, what))
        print(f"wrote {file}: {len(chosen)} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
