"""Log lines: one per event, with control characters escaped."""

from __future__ import annotations

import logging
import re

import pytest

from oarlock.server.observability import logs


@pytest.mark.parametrize("value", [
    "/a/b", "", "two words", "a=b", 'say "hi" level=ERROR', '"', "a\\b", "ends\\", "a\nb=\tc\x85", "\u202e\udc80",
    "é", -3, True,
])  # fmt: skip
def test_a_reader_of_key_value_lines_finds_each_value(value: object):
    """As `logfmt` does: no value hides the next key or adds one."""
    line = logs.event("happened", first=value, level="INFO")
    assert line.isprintable()
    pairs = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"=\\]*)(?: |$)', line)
    assert [key for key, _ in pairs] == ["event", "first", "level"] and pairs[2][1] == "INFO"
    assert " ".join(f"{key}={found}" for key, found in pairs) == line
    text = pairs[1][1]
    if text.startswith('"'):
        text = re.sub(r'\\(["\\])', r"\1", text[1:-1])
    assert text == logs.escape(str(value))


def test_log_lines_cannot_be_forged(capsys):
    before = logging.getLogger().handlers[:]
    try:
        logs.configure("info")
        evil = "x\r\nlevel=ERROR forged\x1b[2J\u2028\x85"
        logs.logger("test").info(logs.event("happened", path=evil, size=1.5, missing=None, empty=""))
        logs.logger("test").debug("event=unseen")
    finally:
        logging.getLogger().handlers[:] = before
    lines = capsys.readouterr().err.split("\n")
    assert len(lines) == 2
    assert lines[0].isprintable()
    assert 'event=happened path="x\\r\\nlevel=ERROR forged\\e[2J\\u2028\\x85" size=1.500 empty=""' in lines[0]
