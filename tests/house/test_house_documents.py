"""The documents match the code: made parts are up to date, named things exist, and everything users see is named."""

import importlib
import json
import pkgutil
import re
import tomllib
from xml.etree import ElementTree

import pytest
from fastapi import APIRouter

from oarlock.engine.core import event_loop
from oarlock.server.endpoints import __path__ as folder
from oarlock.server.http.pages import router as page_router
from oarlock.server.http.request_body import NEUTRAL_VALUES
from oarlock.server.observability import metrics
from oarlock.server.schemas.chat import ChatRequest
from oarlock.server.schemas.generation import CompletionRequest
from oarlock.server.schemas.messages import MessagesRequest
from oarlock.server.schemas.responses import ResponsesRequest
from tests.e2e import recorded_chat
from tests.house.rules import PACKAGES, ROOT, python_files
from tools import documents, requirements_table
from tools.made_parts import filled, hand_written

DOCS = {path: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = DOCS | {
    path: path.read_text("utf-8")
    for path in (*ROOT.glob("*.md"), *ROOT.glob("[bt]*/**/README.md"), *ROOT.glob("models/*/README.md"))
}
API = "".join(DOCS[ROOT / "docs" / f"{name}.md"] for name in ("api", "embeddings", "observability"))
ABOUT_CODE = ("overview", "architecture", "engine", "workers", "reading")
MAX_PAGE_WORDS = 4_000  # without the parts that are made from the code

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
FILE_LINK = re.compile(r"\[`?([\w./-]*\w\.\w+|[\w./-]+/)`?\]\((?!https?:)([^)#\s]+)")


def spans(page: str) -> list[str]:
    """Return the text of every code span, without fenced blocks and generated parts."""
    return CODE_SPAN.findall(FENCED.sub("", hand_written(page)))


@pytest.mark.parametrize(("page", "marker", "make"), documents.MADE)
def test_generated_parts_are_up_to_date(page, marker, make):
    text = (ROOT / page).read_text()
    assert filled(text, marker, make()) == text, "run `make docs`"


@pytest.mark.slow
def test_charts_are_up_to_date():
    charts = documents.charts()
    assert charts and {path: path.read_text() for path in charts} == charts, "run `make docs`"
    assert set((ROOT / "docs").glob("*.svg")) == {*charts, recorded_chat.FILE}, "a chart that no result makes"
    shown = set(re.findall(r"\]\((?:docs/)?([\w-]+\.(?:svg|png))\)", "".join(PAGES.values())))
    assert {path.name for kind in ("svg", "png") for path in (ROOT / "docs").glob(f"*.{kind}")} == shown


def test_the_recorded_chat_is_the_answer_of_the_readme():
    answer = json.loads(PAGES[ROOT / "README.md"].partition("```json\n")[2].partition("```")[0])
    texts = ElementTree.fromstring(recorded_chat.FILE.read_text()).findall(".//{*}text")
    last = " ".join(node.text or "" for node in texts if "gone" not in node.get("class", ""))
    expected = f"> {recorded_chat.TYPED[0]} {answer['choices'][0]['text'].strip()}"
    assert expected in " ".join(last.split())


def test_every_requirement_has_its_row_and_its_user():
    rows = re.findall(
        r"^\| `([\w-]+)` ([\w.]+) \| ([^|]+) \| [\d.]+ MiB \| [^|]+ \| \[[\w./-]+\]\(https:",
        DOCS[ROOT / requirements_table.PAGE],
        re.MULTILINE,
    )
    pins = requirements_table.pins()
    assert [(name, pin, requirements_table.PURPOSES[name]) for name, pin in pins.items()] == rows
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [re.split("[<>=]", line)[0] for line in declared] == list(pins)
    code = "".join(path.read_text() for path in python_files(*PACKAGES))
    used = set(re.findall(r"^ *(?:import|from) (\w+)", code, re.MULTILINE))
    assert {name for name in pins if name.replace("-", "_") not in used} == set()


def test_pages_are_short_and_in_the_index():
    long = {path.name: len(hand_written(text).split()) for path, text in PAGES.items()}
    assert {name: count for name, count in long.items() if count > MAX_PAGE_WORDS} == {}
    index = DOCS[ROOT / "docs" / "README.md"]
    assert [path.name for path in DOCS if path.name != "README.md" and f"]({path.name}" not in index] == []


def routes() -> list[str]:
    """Return every path of every endpoint family, sorted."""
    found = [one.name for one in pkgutil.walk_packages(folder, "oarlock.server.endpoints.")]
    modules = [importlib.import_module(name) for name in found]
    routers = [each for module in modules for each in vars(module).values() if isinstance(each, APIRouter)]
    return sorted({route.path for router in [*routers, page_router] for route in router.routes})


def test_every_route_field_and_metric_is_documented():
    schemas = (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)
    fields = [*NEUTRAL_VALUES, *(name for schema in schemas for name in schema.model_fields)]
    figures = [*metrics._GAUGES, *metrics._COUNTERS, *metrics._HISTOGRAMS]
    names = [*(path.replace(":path", "") for path in routes()), *fields, *figures]
    assert len(names) > 200 and [name for name in names if f"`{name}`" not in API] == []


def test_every_exit_status_of_the_engine_is_documented():
    statuses = {value for name, value in vars(event_loop).items() if name.startswith("EXIT_")} | {2, 3, 4}
    page = DOCS[ROOT / "docs" / "reliability.md"]
    assert statuses <= {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}


def test_every_file_that_a_page_names_exists():
    top = {path.name for path in ROOT.iterdir() if path.is_dir()}
    names = {path.name for path in ROOT.glob("[!.]*/**/*.*")}
    missing = []
    for page, text in PAGES.items():
        for span in spans(text) if page.name != "CHANGELOG.md" else ():
            if re.fullmatch(r"(?:oarlock|tests|benchmarks)(?:\.\w+)+", span):  # a module, or a name in it
                path = ROOT / span.replace(".", "/")
                exists = path.is_dir() or path.with_suffix(".py").is_file() or path.parent.with_suffix(".py").is_file()
                exists = exists or path.parent == ROOT / "oarlock"
            elif re.fullmatch(r"[\w.*{},/-]+", span) and "/" in span and span.split("/")[0] in top:
                exists = any(ROOT.glob(span.rstrip("/").replace("NAME", "*")))
            else:
                exists = not re.fullmatch(r"\w+\.(?:py|cpp)", span) or span in names
            missing += [] if exists else [f"{page.name}: {span}"]
    assert missing == []


@pytest.mark.slow
def test_every_name_of_the_code_that_a_page_names_exists():
    sources = [path for folder in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    code = [path.read_text("utf-8") for path in sources if path.suffix in {".py", ".h", ".cpp", ".txt"}]
    words = {word for text in (*code, API) for word in re.findall(r"\w+", text)}
    missing = []
    for name in ABOUT_CODE:
        found = [span for span in spans(DOCS[ROOT / "docs" / f"{name}.md"]) if IDENTIFIER.fullmatch(span)]
        missing += [span for span in found if not words.issuperset(span.removesuffix("()").split("."))]
    assert missing == []


def test_a_link_whose_text_is_a_file_leads_to_that_file():
    """The links themselves are checked by `rumdl`."""
    wrong = []
    for page, text in PAGES.items():
        for label, target in FILE_LINK.findall(FENCED.sub("", text)):
            path = (page.parent / target).resolve()
            ends = (f"/{path.as_posix()}", f"/{path.parent.as_posix()}")
            if not any(end.endswith(f"/{label.strip('./')}") for end in ends):
                wrong.append(f"{page.name}: [{label}]({target})")
    assert wrong == []
