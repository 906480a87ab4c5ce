"""Describes flags of other servers in tables, and reads command lines by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oarlock.server.cli.migrate.translation import Translation, values_after
from oarlock.server.config.settings import OPTIONS


@dataclass(frozen=True, slots=True)
class Theirs:
    """Describes a flag. Without `option` it asks for what `holds`, or, if `is_lost`, for what Oarlock lacks."""

    option: str = ""  # ours, or "model"
    holds: str = ""  # a sentence; with an option, on what is another there
    is_switch: bool = False
    is_lost: bool = False
    many: bool = False  # takes every value up to the next flag
    is_list: bool = False  # its value has commas between its parts
    values: dict[str, str] = field(
        default_factory=dict
    )  # their value -> ours; "" drops the flag, others pass as they are


Table = Mapping[str, Theirs]


def same(
    option: str,
    *names: str,
    holds: str = "",
    switch: bool = False,
    is_list: bool = False,
    values: dict[str, str] | None = None,
) -> dict[str, Theirs]:
    """Describe flags that are our `option`, with values that may be others."""
    theirs = Theirs(option, holds, is_switch=switch, is_list=is_list, values=values or {})
    return dict.fromkeys(names, theirs)


def holds(sentence: str, *names: str, switch: bool = False) -> dict[str, Theirs]:
    """Describe flags that ask for what is so anyway, or for what has no counterpart and changes no answer."""
    return dict.fromkeys(names, Theirs(holds=sentence, is_switch=switch))


def lost(sentence: str, *names: str, switch: bool = False, many: bool = False) -> dict[str, Theirs]:
    """Describe flags that ask for what Oarlock lacks."""
    return dict.fromkeys(names, Theirs(holds=sentence, is_switch=switch, is_lost=True, many=many))


def read_flags(found: Translation, words: list[str], table: Table) -> list[str]:
    """Translate `words`, what follows the program's name, into `found`. Returns those that stand behind no flag."""
    words, others = list(words), []
    while words:
        shown, equals, value = words.pop(0).partition("=")
        if not shown.startswith("-"):
            others.append(shown + equals + value)
            continue
        theirs = table.get(shown) or table.get(f"--{shown[2:].replace('_', '-')}" if shown[:2] == "--" else "")
        if theirs is None:
            given = [value] if equals else values_after(words)
            found.lost.append((" ".join([shown, *given]), "there is no such flag here."))
            continue
        many = theirs.many or (theirs.option in OPTIONS and OPTIONS[theirs.option].many)
        given = [value] if equals else [] if theirs.is_switch else values_after(words, None if many else 1)
        put(found, " ".join([shown, *given]), theirs, given)
    return others


def read_variables(found: Translation, variables: Mapping[str, str], table: Table, prefix: str) -> None:
    """Translate variables that are in `table`; others with the server's `prefix` are lost, the rest mean the same."""
    for name, value in variables.items():
        if name in table:
            put(found, f"{name}={value}", table[name], [value])
        elif prefix and name.startswith(prefix):
            found.lost.append((f"{name}={value}", "this variable is not read; `oarlock config` lists ours."))
        else:
            found.environment[name] = value  # of CUDA, the hub and the system


def put(found: Translation, written: str, theirs: Theirs, given: list[str]) -> None:
    """Enter one flag with its values into `found`."""
    if not theirs.option:
        (found.lost if theirs.is_lost else found.notes).append((written, theirs.holds))
        return
    if theirs.option == "model":
        found.model = given[0] if given else found.model
        return
    if theirs.is_list:
        given = [part for text in given for part in text.split(",") if part]
    ours = [theirs.values.get(each, each) for each in given or ([""] if "" in theirs.values else [])]
    if ours == [""]:
        found.notes.append((written, theirs.holds or "this is what happens without a flag."))
    elif found.set(written, theirs.option, ours) and theirs.holds:
        found.notes.append((written, theirs.holds))
