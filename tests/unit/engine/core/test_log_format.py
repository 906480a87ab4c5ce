"""One event is one line: nothing that is logged can forge another."""

import io
import logging

import pytest

from oarlock.engine.core.log_format import LineFormatter, log_to_stderr


def formatted(message: str, *args) -> str:
    record = logging.LogRecord("oarlock.engine", logging.INFO, __file__, 1, message, args, None)
    return LineFormatter().format(record)


@pytest.mark.parametrize("nasty", ["a\nlevel=ERROR", "a\r\nb", "\x1b[31m", "a\u2028b", "\x00"])
def test_control_characters_are_escaped(nasty: str) -> None:
    line = formatted('event=x cause="%s"', nasty)
    assert line.isprintable() and len(line.splitlines()) == 1 and "event=x" in line


def test_a_traceback_follows_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    root = logging.getLogger("oarlock")
    before = root.handlers[:], root.level, root.propagate
    try:
        log_to_stderr()
        try:
            raise RuntimeError("one\ntwo")
        except RuntimeError:
            logging.getLogger("oarlock.engine").exception("event=failed")
    finally:
        root.handlers[:], root.level, root.propagate = before
    first, *rest = stream.getvalue().splitlines()
    assert first.startswith("time=") and "level=ERROR logger=oarlock.engine" in first and first.endswith("event=failed")
    assert rest and all(line.startswith("    ") for line in rest)
