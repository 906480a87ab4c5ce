"""Every file, module, class and function that a page names exists. Each check is shown to fail on a planted mistake."""

import pytest

from tests.house import names
from tests.house.rules import ROOT

PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "tests/load/README.md",
            "benchmarks/README.md",
            "models/oarlock-demo/README.md",
        )
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
CODE_PAGES = [ROOT / "docs" / f"{name}.md" for name in ("overview", "architecture", "engine", "workers", "reading")]
API = (ROOT / "docs" / "api.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_exists(page):
    assert names.missing_files(page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page):
    assert names.broken_links(page, page.read_text("utf-8")) == []


def test_the_index_lists_every_page():
    linked = set(names.LINK.findall((ROOT / "docs" / "README.md").read_text("utf-8")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked


@pytest.mark.parametrize("target", ["cellar.md", "api.md#cellar", "#cellar"])
def test_a_broken_link_is_noticed(target):
    page = ROOT / "docs" / "engine.md"
    assert names.broken_links(page, f"# The engine\n[a]({target}) [b](#the-engine) [c](../docs)") == [target]


@pytest.mark.parametrize("page", CODE_PAGES, ids=lambda page: page.name)
def test_every_class_and_function_that_a_page_names_exists(page):
    assert names.missing_names(page.read_text("utf-8")) == []


def test_the_tour_names_what_is_in_its_files():
    page = (ROOT / "docs" / "reading.md").read_text("utf-8")
    assert names.foreign_names(page, API) == []
    stops = [line for line in page.splitlines() if line.startswith("### ")]
    assert len(stops) == 20 and all("`" in stop for stop in stops)


@pytest.mark.parametrize(
    "span",
    [
        "server/cellar/app.py",
        "server/*/cellar.py",
        "workers/cellar/",
        "cellar.py",
        "cellar.cpp",
        "oarlock.engine.scheduler.cellar.Scheduler",
        "tests.fuzz.cellar",
    ],
)
def test_a_missing_file_is_noticed(span):
    assert names.missing_files(f"See `{span}`.") == [span]


@pytest.mark.parametrize("span", ["Cellar", "Scheduler.cellar", "cellar()", "Cellar.schedule()"])
def test_a_missing_name_is_noticed(span):
    assert names.missing_names(f"See `{span}`.") == [span]


@pytest.mark.parametrize("span", ["cellar", "Scheduler.cellar", "EngineClient"])
def test_a_name_of_another_file_is_noticed(span):
    assert names.foreign_names(f"### 1. `engine/scheduler/scheduler.py`\n\nSee `{span}`.", "") == [span]


@pytest.mark.parametrize(
    "span",
    [
        "server/endpoints/app.py",
        "workers/attention/*.py",
        "engine/",
        "app.py",
        "gemm.cpp",
        "oarlock.engine.client",
        "a/b",
        "x.y",
    ],
)
def test_what_is_there_or_no_file_passes(span):
    assert names.missing_files(f"See `{span}`.") == []


@pytest.mark.parametrize(
    "span", ["Scheduler", "Scheduler.schedule", "Scheduler.schedule()", "temperature", "Dockerfile"]
)
def test_what_is_defined_or_no_name_passes(span):
    assert names.missing_names(f"See `{span}`.") == []


def test_what_is_made_from_the_code_and_fenced_text_are_not_read():
    page = "<!-- made from the code: x -->\n`cellar.py`\n<!-- end: x -->\n\n```text\n`cellar.py`\n```\n"
    assert names.missing_files(page) == []
