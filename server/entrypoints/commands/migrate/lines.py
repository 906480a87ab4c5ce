"""Finds which server a command line starts, and has its flags translated."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise

from server.entrypoints.arguments import UsageError
from server.entrypoints.commands.migrate.by_table import translate as translate_by_table
from server.entrypoints.commands.migrate.tables import LLAMA_SERVER, TGI
from server.entrypoints.commands.migrate.translation import Translation
from server.entrypoints.commands.migrate.vllm import translate as translate_vllm

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


def translate(line: str) -> Translation:
    """Raises `UsageError` where the line cannot be read or is of no server that is known."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"LINE cannot be read: {error}.", "Close every quotation mark.") from None
    variables: dict[str, str] = {}
    while words and (words[0] in ("env", "exec", "sudo", "nohup") or _VARIABLE.fullmatch(words[0])):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            variables[name] = value
    if words[:2] in (["docker", "run"], ["podman", "run"]):
        return _of_container(words[2:], variables)
    for at, word in enumerate(words):
        program, rest = word.rpartition("/")[2], words[at + 1 :]
        if program == "vllm" and rest[:1] == ["serve"]:
            return translate_vllm(rest[1:], variables)
        if word == "vllm.entrypoints.openai.api_server":
            return translate_vllm(rest, variables)
        if program == "llama-server":
            return _llama_server(rest, variables)
        if program == "text-generation-launcher":
            return translate_by_table(rest, variables, TGI)
    raise UsageError(
        "LINE starts no server that is known.",
        "Known are: vllm serve, python -m vllm.entrypoints.openai.api_server, llama-server, text-generation-launcher.",
    )


def _of_container(words: list[str], variables: dict[str, str]) -> Translation:
    """`docker run`: the image says which server it is; of its own flags only variables are of interest."""
    for at, word in enumerate(words):
        before, rest = words[:at], words[at + 1 :]
        for flag, value in pairwise(before):
            if flag in ("-e", "--env") and "=" in value:
                name, _, text = value.partition("=")
                variables[name] = text
        if "vllm/vllm-openai" in word:
            found = translate_vllm(rest, variables)
        elif "text-generation-inference" in word:
            found = translate_by_table(rest, variables, TGI)
        elif "llama.cpp" in word:
            found = _llama_server(rest, variables)
        else:
            continue
        found.notes.append(("docker run", "docker-compose.yml and docs/configuration.md have our containers."))
        return found
    raise UsageError("LINE runs no image of a server that is known.", "Known are those of vLLM, llama.cpp and TGI.")


def _llama_server(words: list[str], variables: dict[str, str]) -> Translation:
    found = translate_by_table(words, variables, LLAMA_SERVER)
    host = found.flags.get("host", ["", ""])[1]
    if host.endswith(".sock"):  # llama-server listens on a Unix socket where the host ends so, and uses no port
        del found.flags["host"]
        found.set(f"--host {host}", "uds", [host])
        if found.flags.pop("port", None):
            found.notes.append(("--port", "a Unix socket has none."))
    if "max_model_len" in found.flags and "max_num_seqs" in found.flags:
        whole, each = int(found.flags["max_model_len"][1]), int(found.flags["max_num_seqs"][1])
        found.flags["max_model_len"][1] = str(whole // each)
        found.notes.append((f"-c {whole} -np {each}", "--max-model-len is of one request, so it is the quotient."))
    if found.model is not None and re.fullmatch(r"[\w.-]+/[\w.-]+:[\w.-]+", found.model):
        repository, _, form = found.model.partition(":")
        found.lost.append(
            (f"-hf {found.model}", f"name the file of {form}: fetch it, and give its path in place of {repository}.")
        )
        found.model = repository
    return found
