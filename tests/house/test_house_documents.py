"""The documents match the code: generated parts are up to date, and no route, field, metric or status is missing."""

import importlib
import json
import pkgutil
import re
import tomllib
from xml.etree import ElementTree

import pytest
from fastapi import APIRouter

from oarlock.server.endpoints import __path__ as folder
from oarlock.server.http.pages import router as page_router
from oarlock.server.http.request_body import NEUTRAL_VALUES
from oarlock.server.observability import metrics
from oarlock.server.schemas.chat import ChatRequest
from oarlock.server.schemas.generation import CompletionRequest
from oarlock.server.schemas.messages import MessagesRequest
from oarlock.server.schemas.responses import ResponsesRequest
from tests.e2e import recorded_chat
from tests.house import documents, requirements_table
from tests.house.rules import PACKAGES, ROOT, imports, place, python_files

API = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("api", "embeddings", "observability"))
MAX_PAGE_WORDS = 4_000  # without what is made from the code
RELIABILITY = (ROOT / "docs" / "reliability.md").read_text()


@pytest.mark.parametrize(("page", "marker", "make"), documents.MADE)
def test_what_is_made_from_the_code_is_up_to_date(page, marker, make):
    text = (ROOT / page).read_text()
    assert documents.filled(text, marker, make()) == text, "run `make docs`"
    assert documents.filled(text, marker, make() + "one line more") != text


@pytest.mark.slow
def test_charts_are_up_to_date():
    charts = documents.charts()
    assert charts and {path: path.read_text() for path in charts} == charts, "run `make docs`"
    assert set((ROOT / "docs").glob("*.svg")) == {*charts, recorded_chat.FILE}, "a chart that no result makes"


def test_the_recorded_chat_is_the_answer_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    answer = json.loads(readme.partition("```json\n")[2].partition("```")[0])["choices"][0]["text"].strip()
    picture = recorded_chat.FILE.read_text()
    texts = ElementTree.fromstring(picture).findall(".//{*}text")
    last = [node.text for node in texts if "gone" not in node.get("class", "")]
    assert f"> {recorded_chat.TYPED[0]} {answer}" in " ".join(" ".join(last).split())
    assert len(picture) < 40_000 and f"](docs/{recorded_chat.FILE.name})" in readme


def test_every_requirement_has_its_row_and_its_user():
    page = (ROOT / requirements_table.PAGE).read_text()
    rows = re.findall(r"^\| `([\w-]+)` ([\w.]+) \| ([^|]+) \| [\d.]+ MiB \| [^|]+ \| \[[\w./-]+\]\(https:", page, re.M)
    pins = requirements_table.pins()
    assert [(name, pin, requirements_table.PURPOSES[name]) for name, pin in pins.items()] == rows
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [re.split("[<>=]", line)[0] for line in declared] == list(pins)
    files = [*python_files(*PACKAGES, "oarlock")]
    used = {item.module.split(".")[0] for path in files for item in imports(path.read_text(), place(path))}
    assert {name for name in pins if name.replace("-", "_") not in used} == set()


def test_no_page_has_more_than_4000_words_written_by_hand():
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("[bt]*/**/README.md")]
    words = {path.name: len(documents.hand_written(path.read_text("utf-8")).split()) for path in pages}
    assert len(pages) > 25 and {name: count for name, count in words.items() if count > MAX_PAGE_WORDS} == {}
    made = "one two\n<!-- made from the code: x -->\nthree\n<!-- end: x -->\nfour"
    assert documents.hand_written(made).split() == ["one", "two", "four"]


def test_a_page_without_markers_is_a_mistake():
    with pytest.raises(ValueError, match="options"):
        documents.filled("# page", "options", "x")


def test_a_sentence_ends_at_its_full_stop():
    assert documents.first_sentence("Reads `a.b` | c\nand d. Then more.\n\nOther.") == "Reads `a.b` \\| c and d."


def routes() -> list[str]:
    """Return every path of every endpoint family, sorted."""
    found = [one.name for one in pkgutil.walk_packages(folder, "oarlock.server.endpoints.")]
    modules = [importlib.import_module(name) for name in found]
    routers = [each for module in modules for each in vars(module).values() if isinstance(each, APIRouter)]
    return sorted({route.path for router in [*routers, page_router] for route in router.routes})


def test_every_route_is_documented():
    assert len(routes()) > 40
    assert [path for path in routes() if f"`{path.replace(':path', '')}`" not in API] == []


@pytest.mark.parametrize(
    "schema", [CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest], ids=lambda s: s.__name__
)
def test_every_field_is_documented(schema):
    assert [name for name in schema.model_fields if f"`{name}`" not in API] == []


def test_every_field_that_is_refused_is_documented():
    assert [name for name in NEUTRAL_VALUES if f"`{name}`" not in API] == []


def test_every_metric_is_documented():
    named = [*metrics._GAUGES, *metrics._COUNTERS, *metrics._HISTOGRAMS]
    assert [name for name in named if f"`{name}`" not in API] == []


def test_every_exit_status_of_the_engine_is_documented():
    from oarlock.engine.core import event_loop as core

    statuses = {value for name, value in vars(core).items() if name.startswith("EXIT_")} | {2, 3, 4}
    table = {int(number) for number in re.findall(r"^\| (\d+) \|", RELIABILITY, re.MULTILINE)}
    assert statuses <= table
