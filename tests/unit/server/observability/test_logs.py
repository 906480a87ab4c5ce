"""Log lines: one per event, with control characters escaped."""

from __future__ import annotations

import logging

from oarlock.server.observability import logs


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
