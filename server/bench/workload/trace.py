"""Reads a trace of requests: JSON lines with `timestamp` (ms), `input_length`, `output_length` and maybe `hash_ids`.

The format of the traces published with Mooncake (github.com/kvcache-ai/Mooncake): each of `hash_ids` stands for a block
of 512 prompt tokens, and requests with equal ids have equal blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarlock.engine.errors import StartupError

BLOCK_TOKENS = 512
_FORM = '{"timestamp": 1500, "input_length": 128, "output_length": 64}'


@dataclass(frozen=True, slots=True)
class Traced:
    """One line of a trace. `at_s`: seconds after the first."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read(file: Path) -> list[Traced]:
    """The requests of a trace in the order of their times. Raises `StartupError` with the line that is wrong."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--trace {file} cannot be read: {error}.", "Name a file of JSON lines.") from None
    found = [_request(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise StartupError(f"--trace {file} has no line.", f"Each request is a line such as {_FORM}.")
    found.sort(key=lambda request: request.at_s)
    begin = found[0].at_s
    return [Traced(each.at_s - begin, each.input_tokens, each.output_tokens, each.blocks) for each in found]


def _request(line: str, place: str) -> Traced:
    fix = f"A line is such as {_FORM}; timestamps are in milliseconds."
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise StartupError(f"{place} is not JSON: {error}.", fix) from None
    if not isinstance(fields, dict):
        raise StartupError(f"{place} is not a JSON object.", fix)
    at = fields.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not at >= 0:
        raise StartupError(f"{place}: timestamp is {at!r}, not a number of at least 0.", fix)
    lengths = []
    for name in ("input_length", "output_length"):
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StartupError(f"{place}: {name} is {value!r}, not a whole number of at least 1.", fix)
        lengths.append(value)
    blocks = fields.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise StartupError(f"{place}: hash_ids is not a list of whole numbers.", "Correct the line, or leave them out.")
    return Traced(at / 1e3, lengths[0], lengths[1], tuple(blocks))
