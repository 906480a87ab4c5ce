"""Log lines as JSON: one object a line, values apart from their keys, whatever is in them."""

from __future__ import annotations

import json
import logging

import pytest

from oarlock.base.log_format import JsonFormatter, fields_of
from oarlock.engine.core.log_format import log_to_stderr as engine_log
from oarlock.server.launch.banner import Progress
from oarlock.server.observability import logs
from oarlock.workers.config import WorkerConfig
from oarlock.workers.runner.worker_process import log_to_stderr as rank_log

EVIL = 'x" level=ERROR\r\n{"level": "ERROR"}\x1b[2J\u2028'


def record(message: object, *args: object) -> logging.LogRecord:
    return logging.LogRecord("oarlock.engine", logging.INFO, __file__, 1, message, args, None)


@pytest.fixture
def written(capsys):
    """Reads standard error; what logging was before is put back."""
    found = [logging.getLogger(name) for name in (None, "oarlock", "uvicorn")]
    before = [(one.handlers[:], one.level, one.propagate) for one in found]
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    for one, (handlers, level, propagate) in zip(found, before, strict=True):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


def test_fields_come_from_the_template_and_never_from_a_value():
    line = record('event=rank_lost rank=%d took_s=%.1f hung=%s cause="%s" pids=%s', 3, 1.26, True, EVIL, "1,2")
    assert fields_of(line) == {
        "event": "rank_lost", "rank": 3, "took_s": 1.26, "hung": True, "cause": EVIL, "pids": "1,2",
    }  # fmt: skip
    written = JsonFormatter(rank=1).format(record('event=x cause="%s" time=%s', EVIL, "now"))
    assert len(written.splitlines()) == 1 and written.isascii()
    found = json.loads(written)
    assert (found["cause"], found["time_"], found["rank"]) == (EVIL, "now", 1)


def test_two_values_in_one_field_and_texts_that_are_no_event():
    assert fields_of(record('event=x where="%s of %d"', "a", 2)) == {"event": "x", "where": "a of 2"}
    assert fields_of(record("event=x kernel=%r took=%r", "gemm", [1])) == {
        "event": "x",
        "kernel": "gemm",
        "took": "[1]",
    }
    assert fields_of(record("a library says %s", "hello")) == {"message": "a library says hello"}
    assert fields_of(record("share=100% done")) == {"message": "share=100% done"}
    assert fields_of(record(KeyError("odd"))) == {"message": "'odd'"}


def test_the_frontend_writes_objects_with_its_values_as_they_are(written):
    logs.configure("info", "json")
    logs.logger("test").info(logs.event("happened", path=EVIL, size=1.25, number=3, missing=None))
    try:
        raise RuntimeError("one\ntwo")
    except RuntimeError:
        logs.logger("test").exception(logs.event("failed"))
    first, second = written()
    assert (first["event"], first["path"], first["size"], first["number"]) == ("happened", EVIL, 1.25, 3)
    assert "missing" not in first and first["level"] == "INFO" and first["time"].endswith("Z")
    assert second["exception"].endswith("RuntimeError: one\ntwo")


def test_the_engine_and_the_ranks_write_the_same(written):
    engine_log("INFO", is_json=True)
    logging.getLogger("oarlock.engine").info("event=engine_ready num_blocks=%d", 7)
    logging.getLogger("oarlock").handlers[:] = []
    logging.getLogger("oarlock").propagate = True
    logging.getLogger().handlers[:] = []
    rank_log(WorkerConfig("none", log_format="json", data_parallel_size=2, data_parallel_rank=1), 3)
    logging.getLogger("oarlock.rank").warning('event=slow cause="%s"', "disk")
    engine, rank = written()
    assert (engine["event"], engine["num_blocks"]) == ("engine_ready", 7)
    assert (rank["event"], rank["cause"], rank["rank"], rank["engine"]) == ("slow", "disk", 3, 1)


def test_a_format_that_is_unknown_is_refused():
    from oarlock.server.config.options import OptionError
    from oarlock.server.config.settings import make_settings

    assert make_settings({"log_format": "json"}).engine_config("none").worker.log_format == "json"
    with pytest.raises(OptionError, match="--log-format"):
        make_settings({"log_format": "xml"})


def test_progress_of_a_start_is_logged(written):
    logs.configure("info", "json")
    progress = Progress(as_events=True)
    for fraction in (0.0, 0.1, 0.5, 1.0):
        progress("loading", fraction, "1 of 2 GB")
    progress.finish()
    found = written()
    assert [line["fraction"] for line in found] == [0.0, 0.5, 1.0]
    assert (found[0]["event"], found[0]["phase"], found[0]["detail"]) == ("progress", "loading", "1 of 2 GB")
