"""Results as files, tables and pages: nothing is lost, nothing is loaded, nothing of a server's text is markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from oarlock.base.errors import StartupError
from oarlock.server.bench import metrics as results
from oarlock.server.bench import report, serve
from oarlock.server.bench.metrics import Sample
from oarlock.server.bench.report import as_html
from tests.unit.server.bench.runs import CLIENT, closed_loop, noisy

RANDOM = np.random.default_rng(1)
EVIL = '<script>alert(1)</script><img src="http://evil/x">'
FAILED = [Sample(0.5, 5, failure="HTTP 500", detail=EVIL), Sample(0.6, 5, failure="timed out", detail="60 s")]


def result(count=60, **more):
    return closed_loop(noisy(RANDOM, count), noisy(RANDOM, count, 0.1), users=4, failed=FAILED, model=EVIL, **more)


def test_a_file_returns_the_written_data(tmp_path):
    wrote, file = result(), tmp_path / "r.json"
    results.write(wrote, file)
    read = results.read(file)
    assert read.as_json() == wrote.as_json()
    assert read.failures == wrote.failures and len(read.samples) == 62
    assert read.samples[-1].ttft_s != read.samples[-1].ttft_s  # what was not measured stays so


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "oarlock-bench-1"}', '{"format": "other"}'])
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(StartupError) as error:
        results.read(file)
    assert str(file) in error.value.cause and "--output" in error.value.fix


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StartupError, match="--output"):
        results.write(result(), tmp_path / "no" / "r.json")


def test_the_table_has_every_measure_and_every_cause():
    text = report.as_text(result())
    for word in ("TTFT", "TPOT", "ITL", "E2EL", "p99", "60 completed, 2 failed", "HTTP 500", "timed out"):
        assert word in text


def test_a_run_in_which_everything_failed_has_a_table_and_a_page():
    nothing = closed_loop([0.1], [0.1])
    nothing.samples = FAILED
    nothing.summary |= {"completed": 0, "failed": 2} | {f"{name}_ms": None for name in ("ttft", "tpot", "itl", "e2el")}
    assert "HTTP 500" in report.as_text(nothing)
    assert "HTTP 500" in as_html(nothing)


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_shows_foreign_text_as_text():
    page = as_html(result())
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert not {"script", "img", "link", "iframe", "object", "use", "image"} & set(reader.tags)
    assert not [each for each in reader.attributes if each[1] in ("src", "href", "xlink:href", "onload")]
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page
    assert "&lt;script&gt;" in page
    assert reader.tags.count("svg") == 6  # four distributions, two charts over time
    assert not re.search(r"\bnan\b|\binf\b", page.split("</style>")[1])


def test_charts_of_equal_values_and_of_one_value():
    for values in ([5.0] * 30, [5.0]):
        assert "<rect" in report.distribution("x", values, [("p50", 5.0)])
    assert "<polyline" in report.over_time("x", [0.0], 1.0, "n")
    assert "<polyline" in report.over_time("x", [], 1.0, "n")


def test_values_beyond_the_chart_are_counted():
    assert "beyond the right edge" in report.distribution("TTFT", [1.0] * 999 + [900.0], [])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]), (93, 107, [95, 100, 105])],
)
def test_ticks_are_round(low, high, expected):
    assert report.ticks(low, high) == pytest.approx(expected)


def test_notes_say_what_makes_the_figures_doubtful():
    assert [note for note in report.notes(result()) if "client" in note.lower()] == []
    slow = result()
    slow.client = {"lag_ms": {"p50": 1.0, "p99": 40.0, "max": 60.0}, "cpu_share": 0.5}
    assert any("40.0 ms late" in note for note in report.notes(slow))
    slow.client = CLIENT | {"cpu_share": 0.97}
    assert any("bottleneck" in note for note in report.notes(slow))
    slow.samples[0].scheduled_s, slow.samples[0].sent_s = 0.0, 0.5
    slow.samples[1].output_tokens, slow.samples[2].counted_by, slow.is_interrupted = 3, "chunks", True
    said = " ".join(report.notes(slow))
    for part in ("500 ms late", "1 of 60 completions do not have the requested number", "token counts", "interrupted"):
        assert part in said


def test_lateness_counts_only_beside_the_gaps_it_distorts():
    late = {"lag_ms": {"p50": 1.0, "p99": 8.0, "max": 9.0}, "cpu_share": 0.1}
    assert serve.warning(late, gap_ms=100.0) is None
    assert serve.warning(late, gap_ms=10.0) is not None
