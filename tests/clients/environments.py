"""Environments of the clients: a separate one for each, made once and kept while its pins stay the same.

Installs exactly the pinned packages and lets no resolver choose. Never installs torch: where a client imports it, this
repository's own is lent through a path entry.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.clients.matrix import Client, Kind

HERE = Path(__file__).resolve().parent
PINS = HERE / "pins"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oarlock" / "clients"
_STAMP = "made-from"
_LENT = ("torch", "torchgen", "functorch")


class NotInstalledError(Exception):
    """A program that a client needs is not installed on this machine; the text is one sentence."""


def bare_python(directory: Path, *, with_pip: bool = True) -> Path:
    """The interpreter of a new, empty environment."""
    venv.EnvBuilder(with_pip=with_pip, clear=True).create(directory)
    return directory / "bin" / "python"


def prepare(client: Client) -> tuple[list[str], bool]:
    """The command that runs this client's scripts, and whether its environment had to be made.

    Raises `NotInstalledError`.
    """
    program = {Kind.PROGRAM: client.package, Kind.NODE: "npm"}.get(client.kind)
    if program is not None and shutil.which(program) is None:
        raise NotInstalledError(f"{program} is not installed")
    if client.kind is Kind.PROGRAM:
        return [sys.executable], False
    directory = CACHE / client.name
    wanted = _fingerprint(client)
    stamp = directory / _STAMP
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{client.name}.lock").open("w") as lock:  # another run may be making the same one
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh = not stamp.is_file() or stamp.read_text() != wanted
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            _make(client, directory)
            stamp.write_text(wanted)
    return (["node"] if client.kind is Kind.NODE else [str(directory / "bin" / "python")]), fresh


def version(client: Client) -> str:
    """Version of the client as installed, not as asked for."""
    directory = CACHE / client.name
    if client.kind is Kind.PROGRAM:
        printed = subprocess.run([client.package, "--version"], capture_output=True, text=True, check=True).stdout
        return printed.split()[1]
    if client.kind is Kind.NODE:
        return json.loads((directory / "node_modules" / client.package / "package.json").read_text())["version"]
    question = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    python = directory / "bin" / "python"
    return subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip()


def _fingerprint(client: Client) -> str:
    pins = (PINS / f"{client.name}.txt").read_bytes() if client.kind is Kind.PYTHON else b""
    parts = (sys.version, str(client.requires), str(client.borrows_torch), hashlib.sha256(pins).hexdigest())
    if client.borrows_torch:
        distribution = importlib.metadata.distribution("torch")
        parts += (
            distribution.version,
            str(distribution.locate_file("")),
        )  # of another checkout's: links to what may go
    return "\n".join(parts) + "\n"


def _make(client: Client, directory: Path) -> None:
    if client.kind is Kind.NODE:
        quiet = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", "--loglevel=error"]
        (directory / "package.json").write_text('{"private": true}\n')
        subprocess.run(["npm", "install", *quiet, *client.requires], cwd=directory, check=True)
        return
    # By this environment's pip, and without compiling what no script imports: both took longer than most scripts do.
    pip = [sys.executable, "-m", "pip", "--python", bare_python(directory, with_pip=False)]
    pip += ["--disable-pip-version-check", "install", "-qq", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "-r", PINS / f"{client.name}.txt"], check=True)
    if client.borrows_torch:
        lend_torch(directory)


def lend_torch(directory: Path) -> None:
    """Links to this environment's torch, and nothing else of it, on the client's path."""
    lent = directory / "lent"
    lent.mkdir()
    for name in _LENT:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"error: {name} is not installed here\nfix: make install")
        package = Path(spec.origin).parent
        (lent / name).symlink_to(package)
    for info in package.parent.glob("torch-*.dist-info"):
        (lent / info.name).symlink_to(info)
    site = next(directory.glob("lib/python*/site-packages"))
    (site / "lent.pth").write_text(f"{lent}\n")
