"""One event is one line: nothing that is logged can forge another."""

import io
import logging

import pytest

from oarlock.base.log_format import LineFormatter
from oarlock.engine.core.log_format import log_to_stderr


def formatted(message: str, *args) -> str:
    record = logging.LogRecord("oarlock.engine", logging.INFO, __file__, 1, message, args, None)
    return LineFormatter().format(record)


@pytest.mark.parametrize("nasty", ["a\nlevel=ERROR", "a\r\nb", "\x1b[31m", "a\u2028b", "\x00"])
def test_control_characters_are_escaped(nasty: str) -> None:
    line = formatted('event=x cause="%s"', nasty)
    assert line.isprintable() and len(line.splitlines()) == 1 and "event=x" in line


def test_values_end_at_their_quotes() -> None:
    line = formatted('event=x rank=%d cause="%s" took_s=%.1f of=%r', 3, 'a" level="ERROR\\', 1.26, "b c")
    assert line.endswith(r"""event=x rank=3 cause="a\" level=\"ERROR\\" took_s=1.3 of='b c'""")
    assert formatted("a library says %s", "event=x\n").endswith(r"a library says event=x\n")
    assert formatted("event=x share=100%d").endswith("event=x share=100%d")
    assert formatted("event=x share=%d%% of=%s", 5, "a").endswith("event=x share=5% of=a")


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
