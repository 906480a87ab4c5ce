"""Runs the output of `oarlock snippets` unchanged in a client's environment: it has to end well and print something."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from oarlock.server.cli.snippets import SNIPPETS
from tests.clients.environments import CACHE
from tests.clients.matrix import Client, Kind
from tests.e2e.running import environment as of_repository

_TIMEOUT_S = 300


def printed_snippet(name: str, url: str) -> str:
    """Return what `oarlock snippets` prints for one client of the server at `url`."""
    command = [sys.executable, "-P", "-m", "oarlock", "snippets", url, "--client", name]
    printed = subprocess.run(command, env=of_repository(), capture_output=True, text=True, timeout=120, check=False)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout


def run_snippet(client: Client, interpreter: list[str], url: str, env: dict[str, str]) -> str:
    """Run a client's snippet and return its output. Raises `AssertionError` with that output where it fails."""
    language = SNIPPETS[client.snippet].language
    printed = printed_snippet(client.snippet, url)
    directory = CACHE / client.name
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"snippet.{language}"
    file.write_text(printed)
    words, env = _command(client, interpreter, file, env)
    try:
        done = subprocess.run(
            words,
            cwd=directory,
            env=env,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    finally:
        file.unlink()
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-2000:]}{done.stdout[-2000:]}"
    assert done.stdout.strip(), "it printed nothing"
    return done.stdout


def _command(
    client: Client, interpreter: list[str], file: Path, env: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run a snippet as a person would; one that waits for a message is given one."""
    language = SNIPPETS[client.snippet].language
    if client.snippet == "aider":
        extra = (
            " --message 'What does os.path.join do?' --no-git --yes-always --no-check-update --no-stream --no-pretty"
        )
        file.write_text(file.read_text().rstrip("\n") + extra + "\n")
    if client.snippet == "open-webui":  # its container's program, with the container's variables
        directory, given = file.parent / "state", variables(file.read_text())
        directory.mkdir(exist_ok=True)
        script = Path(__file__).parent / "scripts" / "open_webui.py"
        return [*interpreter, str(script)], {**env, **given, "HOME": str(directory)}
    if client.snippet == "continue":
        ask = ["node_modules/.bin/cn", "--config", file.name, "-p", "What does os.path.join do?"]
        return ask, {**env, "CONTINUE_GLOBAL_DIR": str(file.parent / "state")}
    if language == "sh":
        path = f"{Path(interpreter[0]).parent}:{env.get('PATH', '')}" if client.kind is Kind.PYTHON else env["PATH"]
        return ["bash", "-e", file.name], {**env, "PATH": path}
    return [*interpreter, file.name], env


def variables(text: str) -> dict[str, str]:
    """Environment variables that a `docker run` line gives to its container."""
    words = shlex.split(re.sub(r"\\\n", " ", text))
    return dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "-e")
