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


def test_every_file_that_a_page_names_exists():
    found = {page.name: names.missing_files(page.read_text("utf-8")) for page in PAGES}
    assert {page: missing for page, missing in found.items() if missing} == {}


def test_every_link_of_a_page_leads_somewhere():
    found = {page.name: names.broken_links(page, page.read_text("utf-8")) for page in PAGES}
    assert {page: broken for page, broken in found.items() if broken} == {}


def test_the_index_lists_every_page():
    linked = set(names.LINK.findall((ROOT / "docs" / "README.md").read_text("utf-8")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked


def test_a_broken_link_is_noticed():
    page = ROOT / "docs" / "engine.md"
    links = "# The engine\n[a](cellar.md) [a](api.md#cellar) [a](#cellar) [b](#the-engine) [c](../docs)"
    assert names.broken_links(page, links) == ["cellar.md", "api.md#cellar", "#cellar"]


@pytest.mark.slow
def test_every_class_and_function_that_a_page_names_exists():
    found = {page.name: names.missing_names(page.read_text("utf-8")) for page in CODE_PAGES}
    assert {page: missing for page, missing in found.items() if missing} == {}


@pytest.mark.slow
def test_the_tour_names_what_is_in_its_files():
    page = (ROOT / "docs" / "reading.md").read_text("utf-8")
    assert names.foreign_names(page, API) == []
    stops = [line for line in page.splitlines() if line.startswith("### ")]
    assert len(stops) == 20 and all("`" in stop for stop in stops)


def test_a_missing_file_is_noticed():
    missing = ["server/cellar/app.py", "server/*/cellar.py", "workers/cellar/", "cellar.py", "cellar.cpp"]
    missing += ["oarlock.engine.scheduler.cellar.Scheduler", "tests.fuzz.cellar"]
    there = ["server/endpoints/app.py", "workers/attention/*.py", "engine/", "app.py", "gemm.cpp", "a/b", "x.y"]
    assert names.missing_files(" ".join(f"`{span}`" for span in missing + there)) == missing


@pytest.mark.slow
def test_a_missing_name_is_noticed():
    missing = ["Cellar", "Scheduler.cellar", "cellar()", "Cellar.schedule()"]
    there = ["Scheduler", "Scheduler.schedule", "Scheduler.schedule()", "temperature", "Dockerfile"]
    assert names.missing_names(" ".join(f"`{span}`" for span in missing + there)) == missing


def test_a_name_of_another_file_is_noticed():
    page = "### 1. `engine/scheduler/scheduler.py`\n\nSee `cellar`, `Scheduler.cellar`, `EngineClient`, `Scheduler`."
    assert names.foreign_names(page, "") == ["cellar", "Scheduler.cellar", "EngineClient"]


def test_what_is_made_from_the_code_and_fenced_text_are_not_read():
    page = "<!-- made from the code: x -->\n`cellar.py`\n<!-- end: x -->\n\n```text\n`cellar.py`\n```\n"
    assert names.missing_files(page) == []
