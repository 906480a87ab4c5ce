"""A command line into ours, by a table of its flags."""

from __future__ import annotations

from collections.abc import Mapping

from server.config.settings import OPTIONS
from server.entrypoints.commands.migrate.tables import Theirs
from server.entrypoints.commands.migrate.translation import Translation, values_after

_TEXT_VARIABLES = {"HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "HUGGING_FACE_HUB_TOKEN"}


def translate(words: list[str], variables: dict[str, str], table: Mapping[str, Theirs]) -> Translation:
    """`words`: what follows the program's name."""
    found = Translation()
    for name, value in variables.items():
        if name in _TEXT_VARIABLES:
            found.environment[name] = value
        else:
            found.lost.append((f"{name}={value}", "this variable is not read; `oarlock config` lists ours."))
    words = list(words)
    while words:
        shown, equals, value = words.pop(0).partition("=")
        theirs = table.get(shown) or table.get(shown.replace("_", "-"))
        if theirs is None:
            given = [value] if equals else values_after(words)
            found.lost.append((" ".join([shown, *given]), "there is no such flag here."))
            continue
        many = theirs.option in OPTIONS and OPTIONS[theirs.option].many
        given = [value] if equals else [] if theirs.is_switch else values_after(words, None if many else 1)
        _put(found, " ".join([shown, *given]), theirs, given)
    return found


def _put(found: Translation, written: str, theirs: Theirs, given: list[str]) -> None:
    if not theirs.option:
        (found.lost if theirs.is_lost else found.notes).append((written, theirs.holds))
    elif theirs.option == "model":
        found.model = given[0] if given else None
    else:
        ours = [theirs.values.get(each, each) for each in given or ([""] if "" in theirs.values else [])]
        if ours == [""]:
            found.notes.append((written, "this is what happens without a flag."))
        else:
            found.set(written, theirs.option, ours)
