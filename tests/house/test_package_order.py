"""The rules for imports inside and between packages, each shown to fail on a planted mistake.

`test_house_code.py` applies them to the code.
"""

import pytest

from tests.house import package_order
from tests.house.package_order import PUBLIC, entries

SMALL = {
    "top": entries("middle low data.py"),
    "middle": entries("low data.py"),
    "low": entries(""),
    "data.py": entries(""),
}


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ({"a": entries("b"), "b": entries("c"), "c": entries("a")}, "the table has a circle: a -> b -> c"),
        ({"a": entries("b")}, "the table names b, which has no line"),
    ],
)
def test_a_fault_in_a_table_is_noticed(order, fault):
    assert package_order.order_faults(order) == [fault]
    assert package_order.order_faults(SMALL) == []


LOW_MUST_NOT = "engine/low/a.py imports engine/top/b.py: engine/low must not import engine/top"


@pytest.mark.parametrize(
    ("sources", "fault"),
    [
        (
            {
                "engine/low/a.py": "if TYPE_CHECKING:\n    from oarlock.engine.top.b import c",
                "engine/top/b.py": "",
            },
            LOW_MUST_NOT,
        ),
        (
            {"engine/data.py": "from oarlock.engine.low import a", "engine/low/a.py": ""},
            "engine/data.py imports engine/low/a.py: engine/data.py must not import engine/low",
        ),
        (
            {
                "engine/low/a.py": "from oarlock.engine.low import b",
                "engine/low/b.py": "from oarlock.engine.low import c",
                "engine/low/c.py": "def f():\n    from oarlock.engine.low import a",
            },
            "circle of files: engine/low/a.py -> engine/low/b.py -> engine/low/c.py",
        ),
    ],
)
def test_an_import_against_the_order_is_noticed(sources, fault):
    assert package_order.import_faults(sources, "engine", SMALL) == [fault]


def test_imports_along_the_order_pass():
    sources = {
        "engine/__init__.py": "",
        "engine/top/a.py": "import json\nfrom ..middle import a\nfrom .. import data\nfrom ..low.a import x",
        "engine/middle/a.py": "from oarlock.engine.middle.deep import b\nfrom ..low import a\nfrom .. import data",
        "engine/middle/deep/b.py": "from ...data import x",
        "engine/low/a.py": "",
        "engine/data.py": "",
    }
    assert package_order.import_faults(sources, "engine", SMALL) == []
    assert package_order.table_faults(sources, "engine", SMALL) == []


THERE: dict[str, str | None] = {
    "engine/top/a.py": "from oarlock.engine.middle.a import x\nfrom ..low.a import x\nfrom ..data import x",
    "engine/middle/a.py": "from oarlock.engine.low.a import x\nfrom oarlock.engine.data import x",
    "engine/low/a.py": "",
    "engine/low/b.py": "",
    "engine/data.py": "",
}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"engine/cellar/a.py": ""}, "engine/cellar has no line in the table"),
        (
            {"engine/top/a.py": "from oarlock.engine.middle.a import x\nfrom oarlock.engine.data import x"},
            "engine/top does not import engine/low any more: the table allows too much",
        ),
    ],
)
def test_a_folder_that_the_table_does_not_describe_is_noticed(changes, fault):
    sources = {file: text for file, text in (THERE | changes).items() if text is not None}
    assert package_order.table_faults(sources, "engine", SMALL) == [fault]


@pytest.mark.parametrize("gone", ["engine/data.py", "engine/low/"])
def test_a_line_of_the_table_without_a_folder_is_noticed(gone):
    sources = {file: text or "" for file, text in THERE.items() if not file.startswith(gone)}
    faults = package_order.table_faults(sources, "engine", SMALL)
    assert f"the table has {gone.removesuffix('/')}, which is not there" in faults


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("workers/runner/model_runner.py", "import oarlock.engine.types"),
        (
            "engine/core/event_loop.py",
            "import importlib\nimportlib.import_module('oarlock.workers.runner.model_runner')",
        ),
        ("server/endpoints/app.py", "from oarlock.engine.scheduler.scheduler import Scheduler"),
        ("server/endpoints/app.py", "from oarlock.workers.protocol import StepMetadata"),
        ("server/endpoints/app.py", "import oarlock.engine"),
        ("base/paths.py", "from oarlock.workers.config import WorkerConfig"),
        ("server/endpoints/chat/serving.py", "from ....engine.scheduler.scheduler import Scheduler"),
    ],
)
def test_an_import_of_another_packages_inside_is_noticed(file, source):
    assert len(package_order.package_faults({file: source}, file.split("/")[0])) >= 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("server/endpoints/app.py", "from oarlock.engine import types\nfrom oarlock.engine.client import EngineClient"),
        ("engine/core/event_loop.py", "from oarlock.workers.executor import Executor\nimport oarlock.workers.protocol"),
        ("workers/runner/model_runner.py", "from oarlock.workers.layers import linear\nfrom .layers import norm"),
        ("workers/runner/model_runner.py", "from oarlock.base.errors import StartupError"),
        ("server/hub/cached.py", "from oarlock.workers.model_files.gguf_model import GGUFModel"),
    ],
)
def test_public_files_may_be_imported(file, source):
    assert package_order.package_faults({file: source}, file.split("/")[0]) == []


def test_a_public_file_that_nothing_imports_any_more_is_noticed():
    names = " ".join(sorted(PUBLIC["engine"]["workers"] - {"protocol.py"})).replace(".py", "").split()
    sources = {"engine/client.py": "\n".join(f"import oarlock.workers.{name}" for name in names)}
    assert package_order.public_faults(sources, "engine") == [
        "engine does not import workers/protocol.py any more: the table allows too much"
    ]


def test_an_arrow_is_left_out_where_a_longer_way_leads_there():
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert package_order.transitive_reduction(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
