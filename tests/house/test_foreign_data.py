"""SECURITY.md lists every route, file reader and parser of data from outside, with a bound and a test for each."""

import pytest

from tests.house import foreign_data
from tests.house.rules import ROOT
from tests.house.test_house_documents import routes

ROWS = foreign_data.rows((ROOT / "SECURITY.md").read_text("utf-8"))


def test_every_route_has_its_row():
    listed = {name for row in ROWS for name in row.places if name.startswith("/")}
    assert listed == {path.replace(":path", "") for path in routes()}


def test_every_place_in_the_code_has_its_row():
    found = foreign_data.found_in_the_code()
    assert len(found) > 60
    assert [name for name in found if not any(row.covers(name) for row in ROWS)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.places[0])
def test_every_row_is_whole(row):
    assert foreign_data.faults(row) == []


@pytest.mark.parametrize("name", foreign_data.OWN)
def test_the_exceptions_exist(name):
    assert foreign_data.exists(name)


@pytest.mark.parametrize(
    "line",
    [
        "def a(path):\n    return path.read_text()",
        "def a(path):\n    with open(path) as file: ...",
        "def a(self):\n    return self.path.open('rb')",
        "def a(text):\n    return json.loads(text)",
        "def a(body):\n    return Schema.model_validate_json(body)",
        "def a(path):\n    return tokenizers.Tokenizer.from_file(path)",
    ],
)
def test_a_new_reader_is_found(line):
    assert foreign_data.takers(line, "server/llm/new.py") == ["server.llm.new.a"]


def test_a_new_user_of_a_library_is_found():
    assert foreign_data.takers("from tokenizers.models import BPE", "server/llm/new.py") == ["server.llm.new"]
    assert foreign_data.takers("with queue.place() as place: ...", "server/llm/new.py") == []
    assert foreign_data.takers("def a(): return admission_queue.open()", "server/llm/new.py") == []


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ("| `/health` | nothing | 0 bytes | 1 ms |", "4 cells"),
        ("| `/health` | nothing | | 1 ms | `test_http_wire.py` |", "no size"),
        ("| `/health` | nothing | little | 1 ms | `test_http_wire.py` |", "no number"),
        ("| `/health` | nothing | 0 bytes | 1 ms | by hand |", "no test"),
        ("| `/health` | nothing | 0 bytes | 1 ms | `test_never.py` |", "does not exist"),
        ("| `server.http.never` | nothing | 0 bytes | 1 ms | `test_http_wire.py` |", "does not exist"),
    ],
)
def test_a_row_that_says_nothing_is_a_fault(cells, fault):
    (row,) = foreign_data.rows(f"{foreign_data.HEADING}\n\n{cells}\n")
    assert any(fault in found for found in foreign_data.faults(row))


def test_the_list_must_be_there():
    with pytest.raises(ValueError, match="heading"):
        foreign_data.rows("# Security\n")
