"""Finds which server a command line starts, and has its flags translated."""

from __future__ import annotations

import re
import shlex

from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.migrate.container import read_container, take_out_of_container
from oarlock.server.cli.migrate.llama_server import LLAMA_SERVER
from oarlock.server.cli.migrate.ollama import COMMANDS, OLLAMA
from oarlock.server.cli.migrate.sglang import SGLANG
from oarlock.server.cli.migrate.tgi import TGI
from oarlock.server.cli.migrate.translation import KnownServer, Translation
from oarlock.server.cli.migrate.vllm import VLLM
from oarlock.server.config.groups.http import HttpSettings

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_BEFORE = ("env", "exec", "sudo", "nohup", "export", "&&", ";", "time")
_ENDS = ("&", "&&", "|", "||", ";")
_KNOWN = (
    "vllm serve, python -m vllm.entrypoints.openai.api_server, llama-server, text-generation-launcher, "
    "python -m sglang.launch_server, ollama serve and ollama run."
)


_SERVERS = {"vllm": VLLM, "llama-server": LLAMA_SERVER, "tgi": TGI, "sglang": SGLANG, "ollama": OLLAMA}


def translate(line: str) -> Translation:
    """Raises `UsageError` where the line cannot be read or is of no server that is known."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"LINE cannot be read: {error}.", "Close every quotation mark.") from None
    variables: dict[str, str] = {}
    while words and (words[0] in _BEFORE or _VARIABLE.fullmatch(words[0])):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            variables[name] = value.removesuffix(";")
    if words[:1] in (["docker"], ["podman"], ["nerdctl"]) and words[1:2] == ["run"]:
        found = _of_container(words[2:], variables)
    else:
        program = _program(words)
        if program is None:
            raise UsageError("LINE starts no server that is known.", f"Known are: {_KNOWN}")
        name, rest = program
        found = _SERVERS[name].translate(rest, variables)
        _listen(found, _SERVERS[name])
    found.drop_what_does_not_go_together()
    return found


def _program(words: list[str]) -> tuple[str, list[str]] | None:
    """Find the key of `_SERVERS`, and the words that its translation takes."""
    for at, word in enumerate(words):
        program, rest = word.rpartition("/")[2].removesuffix(".exe"), _without_shell(words[at + 1 :])
        if program in ("vllm", "sglang") and rest[:1] == ["serve"]:
            return program, rest[1:]
        if word in ("vllm.entrypoints.openai.api_server", "sglang.launch_server"):
            return word.partition(".")[0], rest
        if program == "llama-server":
            return program, rest
        if program == "text-generation-launcher":
            return "tgi", rest
        if program == "ollama" and rest and rest[0] in COMMANDS:
            return program, rest
    return None


def _without_shell(words: list[str]) -> list[str]:
    """Keep the words of one command, without those that its shell reads."""
    found: list[str] = []
    words = list(words)
    while words and words[0] not in _ENDS:
        word = words.pop(0)
        redirected = re.fullmatch(r"[0-9&]?>>?(.*)", word)
        if redirected is None:
            found.append(word)
        elif not redirected[1] and words:
            words.pop(0)  # the file that it writes
    return found


def _listen(found: Translation, server: KnownServer) -> None:
    """Write down where the server listens unless its line says so, if ours would listen elsewhere."""
    if "uds" in found.flags:
        return
    missing = [
        (name, value)
        for name, value, ours in (("host", server.host, HttpSettings.host), ("port", server.port, HttpSettings.port))
        if name not in found.flags and value != ours
    ]
    for name, value in missing:
        found.set(f"--{name}", name, [str(value)])
    if missing:
        found.notes.append((" ".join(f"--{name} {value}" for name, value in missing), server.address_note))


def _of_container(words: list[str], variables: dict[str, str]) -> Translation:
    container = read_container(words)
    if container is None:
        raise UsageError(
            "LINE runs no image of a server that is known.",
            "Known are those of vLLM, llama.cpp, TGI, SGLang and Ollama.",
        )
    given = variables | container.variables
    program = _program(container.arguments)
    name, rest = program or (container.server, _without_shell(container.arguments))
    if name == "ollama" and program is None:
        rest = ["serve", *rest]
    server = _SERVERS[name]
    found = server.translate(rest, given)
    take_out_of_container(found, container, server.port if program else server.port_in_image)
    if container.shares_network:
        _listen(found, server)
    return found
