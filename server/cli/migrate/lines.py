"""Reading of a command line: the server that it starts, its variables and flags, and the rules that no table has."""

import itertools
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.migrate.container import read_container
from oarlock.server.cli.migrate.dialects import DIALECTS, LLAMA_SERVER, OLLAMA, VLLM, Dialect
from oarlock.server.cli.migrate.rows import Row, Table, parse
from oarlock.server.cli.migrate.translation import Translation
from oarlock.server.config.option_groups import HttpSettings
from oarlock.server.config.options import parse_count
from oarlock.server.config.settings import OPTIONS
from oarlock.server.config.vllm_flags import FLAGS

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_BEFORE = ("env", "exec", "sudo", "nohup", "export", "&&", ";", "time")
_ENDS = ("&", "&&", "|", "||", ";")


def translate(line: str) -> Translation:
    """Translate a command line. Raises `UsageError` if it cannot be read or starts no known server."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"LINE cannot be read: {error}.", "Close every quotation mark.") from None
    variables: dict[str, str] = {}
    while words and (words[0] in _BEFORE or _VARIABLE.fullmatch(words[0])):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            variables[name] = value.removesuffix(";")
    container = None
    if words[:1] in (["docker"], ["podman"], ["nerdctl"]) and words[1:2] == ["run"]:
        container = read_container(words[2:])
        # The value of a variable without `=` is the shell's own.
        variables |= dict(text.split("=", 1) for text in container.flags.env if "=" in text)
        words = container.arguments
        if container.dialect is OLLAMA:
            words = ["ollama", *(words or ["serve"])]
    started = _started(words)
    if container is not None:
        started = started or (container.dialect, "", _without_shell(words))
    if started is None:
        known = ", ".join(command for dialect in DIALECTS for command in dialect.commands)
        raise UsageError("LINE starts no known server.", f"Known are: {known}.")
    dialect, command, words = started
    found = _translated(dialect, command, words, variables)
    if container is not None:
        container.leave(found, dialect.port if command else dialect.image_port or dialect.port)
    if container is None or container.shares_network:
        _listen(found, dialect)
    found.drop_conflicting()
    return found


def _started(words: list[str]) -> tuple[Dialect, str, list[str]] | None:
    """Return the server that a command starts, how, and the words after that."""
    for at, word in enumerate(words):
        program = word.rpartition("/")[2].removesuffix(".exe")
        for dialect in DIALECTS:
            for command in dialect.commands:
                wanted = command.removeprefix("python -m ").split()
                end = at + len(wanted)
                if [program, *words[at + 1 : end]] == wanted:
                    return dialect, command, _without_shell(words[end:])
    return None


def _without_shell(words: list[str]) -> list[str]:
    """Return the words of the first command, without redirections."""
    words = list(itertools.takewhile(lambda word: word not in _ENDS, words))
    is_file = [re.fullmatch(r"[0-9&]?>>?", before) for before in ["", *words]]  # the file that is written
    return [word for word, file in zip(words, is_file, strict=False) if not file and not re.match(r"[0-9&]?>", word)]


def _translated(dialect: Dialect, command: str, words: list[str], variables: Mapping[str, str]) -> Translation:
    found, table = Translation(), table_of(dialect)
    _read_variables(found, variables, dialect, table)
    words = _with_objects(words) if dialect is VLLM else _with_lists(words) if dialect is LLAMA_SERVER else words
    others = found.read_flags(words, table)
    if others and found.model is None and "" in table:
        model = others.pop(0)
        found.put(model, "", table[""], [model])
    if others and (prompt := [row for row in table.get("", []) if row.value.endswith("…")]):
        found.put(" ".join(others), "", prompt, others)
    else:
        reason = "it follows no flag" + (", and there is already a model." if found.model else ".")
        found.lost += [(word, reason) for word in others]
    if dialect.commands.get(command):
        found.notes.append((command, dialect.commands[command]))
    if dialect is LLAMA_SERVER:
        _divide_context(found)
    return found


def table_of(dialect: Dialect) -> Table:
    """Return the rows of a dialect. vLLM's end with our own flags and with `vllm_flags`."""
    table = parse(dialect.table)
    if dialect is not VLLM:
        return table
    for option in OPTIONS.values():
        rows = [Row("{x}…" if option.many else "{x}", f"{option.flag} {{x}}")]
        if option.kind is bool:
            rows = [Row("", option.flag)]
            table[f"--no-{option.flag[2:]}"] = [Row("", f"--no-{option.flag[2:]}")]
        flag = f"--{option.name.replace('_', '-')}"  # --model, although ours has no flag
        for each in (flag, *([option.short] if option.short else [])):
            table[each] = [*table.get(each, []), *rows]
    for flag, known in FLAGS.items():
        accepted, refused = (Row("{x}", ours, known.holds) for ours in ("not needed", "no equivalent"))
        if known.is_switch:
            off = accepted if known.is_either else refused
            rows = [replace(accepted, value=""), replace(off, value="{off}"), replace(accepted, value="{bool}")]
            table[f"--no-{flag}"] = [replace(off, value="")]
        else:
            values = "|".join(known.harmless or ())
            rows = [replace(accepted, value=values)] if values else []
            rows.append(accepted if known.harmless == () else refused)
            table[f"--no-{flag}"] = [Row("", "not needed")]
        table[f"--{flag}"] = rows
    return table


def _read_variables(found: Translation, variables: Mapping[str, str], dialect: Dialect, table: Table) -> None:
    """Translate variables that have a row. Others of the server are lost, those of CUDA or the hub stay the same."""
    prefix = dialect.flag_prefix
    for name, value in variables.items():
        written, flag = f"{name}={value}", ""
        if prefix is not None and name.startswith(prefix):
            flag = f"--{name[len(prefix) :].lower().replace('_', '-')}"
        row = name if name in table else flag
        if row in table and row:
            found.put(written, row, table[row], [value] if value else [])
        elif dialect.prefix and name.startswith(dialect.prefix):
            found.lost.append((written, "this variable is not read; `oarlock config` lists ours."))
        else:
            found.environment[name] = value


def _listen(found: Translation, dialect: Dialect) -> None:
    """Add the server's default address, if its line has none and ours is different."""
    if "uds" in found.flags:
        return
    usual = (("host", dialect.host, HttpSettings.host), ("port", dialect.port, HttpSettings.port))
    missing = [f"--{name} {value}" for name, value, ours in usual if name not in found.flags and value != ours]
    for flag in missing:
        found.set(flag, flag.split(" ")[0], flag.split(" ")[1:])
    if missing:
        found.notes.append((" ".join(missing), dialect.address_note))


def _with_objects(words: list[str]) -> list[str]:
    """Write vLLM's `--name.key VALUE` as `--name JSON`."""
    words, kept, objects = list(words), [], {}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        if not flag.startswith("--") or not dot:
            kept.append(word)
            continue
        value = value if equals or not words else words.pop(0)
        inner: dict[str, Any] = objects.setdefault(name, {})
        *parents, last = path.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        try:
            inner[last] = json.loads(value)
        except ValueError:
            inner[last] = value
    return kept + [text for name, made in objects.items() for text in (name, json.dumps(made))]


def _with_lists(words: list[str]) -> list[str]:
    """Write the adapters of llama-server's repeated `--lora FILE` as one list, since the last of other flags counts."""
    files = [file for flag, file in itertools.pairwise(words) if flag == "--lora"]
    if len(files) < 2:
        return words
    kept = [word for before, word in itertools.pairwise(["", *words]) if "--lora" not in (before, word)]
    return [*kept, "--lora", ",".join(files)]


def _divide_context(found: Translation) -> None:
    """Divide the context among the slots, as llama-server does unless they share it."""
    whole, users = found.flags.get("max_model_len"), found.flags.get("max_num_seqs")
    is_shared = any(written in ("-kvu", "--kv-unified") for written, _ in found.notes)
    if whole is None or users is None or is_shared or "$" in whole[1] + users[1]:
        return
    written = f"-c {whole[1]} -np {users[1]}"
    del found.flags["max_model_len"]
    if found.set(written, "--max-model-len", [str(parse_count(whole[1]) // int(users[1]))]):
        found.notes.append((written, "--max-model-len is per request, so it is the quotient."))
