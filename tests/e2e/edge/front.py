"""nginx and Caddy before one server, with the files of configs/: only names of files and addresses differ."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.contract.edge.certificates import Pair
from tests.e2e.running import ROOT, eventually, free_port

_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
_PACKAGES = {"nginx": "nginx-light", "caddy": "caddy"}
NAMES = tuple(_PACKAGES)
_LIVE = "/etc/letsencrypt/live/llm.example.org"
_SOCKET = "/run/oarlock/http.sock"
# What Debian's own nginx.conf has around the file, but for one process in the foreground that writes into one folder.
_NGINX_MAIN = """
daemon off; worker_processes 1; pid {folder}/pid; error_log stderr; {user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/one-server.conf;
}}
"""


def why_missing(name: str) -> str | None:
    """Reason why this program cannot be run, or None."""
    if shutil.which(name, path=_PATH) is not None:
        return None
    return f"no {name} on this machine (Debian: apt-get install {_PACKAGES[name]})"


class Front:
    """A proxy that speaks HTTPS at `url`. Use as a context manager."""

    def __init__(self, name: str, folder: Path, uds: Path, pair: Pair) -> None:
        self.port = free_port()
        self.url = f"https://localhost:{self.port}/llm"
        self._name, self._folder, self._log = name, folder, folder / "log"
        program = shutil.which(name, path=_PATH)
        assert program is not None
        write = self._nginx if name == "nginx" else self._caddy
        self._command = [program, *write(uds, pair)]

    def _nginx(self, uds: Path, pair: Pair) -> list[str]:
        text = (ROOT / "configs/nginx/one-server.conf").read_text()
        for old, new in (
            (f"unix:{_SOCKET}", f"unix:{uds}"),
            ("listen 443 ssl", f"listen 127.0.0.1:{self.port} ssl"),
            (f"{_LIVE}/fullchain.pem", str(pair.certificate)),
            (f"{_LIVE}/privkey.pem", str(pair.key)),
        ):
            assert old in text
            text = text.replace(old, new)
        (self._folder / "one-server.conf").write_text(text)
        user = "user root;" if os.getuid() == 0 else ""
        (self._folder / "nginx.conf").write_text(_NGINX_MAIN.format(folder=self._folder, user=user))
        return ["-p", str(self._folder), "-c", str(self._folder / "nginx.conf")]

    def _caddy(self, uds: Path, pair: Pair) -> list[str]:
        """Its own certificate would come from the network: here it gets one."""
        text = (ROOT / "configs/caddy/Caddyfile").read_text()
        site = f"https://localhost:{self.port} {{\n\tbind 127.0.0.1\n\ttls {pair.certificate} {pair.key}\n"
        for old, new in ((f"unix/{_SOCKET}", f"unix/{uds}"), ("\nllm.example.org {\n", f"\n{site}")):
            assert old in text
            text = text.replace(old, new)
        (self._folder / "Caddyfile").write_text("{\n\tadmin off\n\tauto_https off\n}\n" + text)
        return ["run", "--adapter", "caddyfile", "--config", str(self._folder / "Caddyfile")]

    def __enter__(self) -> Front:
        homes = {name: str(self._folder) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **homes}
            )
        eventually(self._listens, 60, f"{self._name} listens")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    def _listens(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
