"""The check of a GPU: what runs, what is kept, what a failure means; and its parts on tiny shapes, on the CPU."""

import argparse
import json

import numpy as np
import pytest

from benchmarks.gpu_check import __main__ as check
from benchmarks.gpu_check import correctness, demo_answers, graphs, models, results
from benchmarks.gpu_check.part import NotHere, Part, Row, Where
from benchmarks.gpu_check.process import PARTS, run
from oarlock.workers.errors import StartupError
from tests.parallel.direct_engine import Answer

CPU = Where("cpu")
ROWS = [{"name": "one", "figures": {"GB/s": 12.5}, "ok": None, "note": ""}]
RIGHT = [*ROWS, {"name": "two", "figures": {}, "ok": True, "note": ""}]
WRONG = [*RIGHT, {"name": "three", "figures": {}, "ok": False, "note": "differs"}]


def part(name, is_check=False, needs_devices=1):
    return Part(name, lambda where: iter(()), is_check, needs_devices)


class Session:
    """`run_all` with parts that end as told, on a made-up machine of one GPU."""

    def __init__(self, monkeypatch, path):
        self.path, self.ran, self.ends = path, [], {}
        self.machine = {"device": "cuda", "devices": ["made-up"], "commit": "1"} | dict.fromkeys(
            ("driver", "torch", "triton")
        )
        monkeypatch.setattr(check, "run_part", self._run)

    def _run(self, part, device, limit):
        self.ran.append(part.name)
        return results.entry(*self.ends.get(part.name, (ROWS, 0)), 1.0, "the log")

    def all(self, *parts, named=False):
        self.ran = []
        arguments = argparse.Namespace(parts=named, json=self.path, device="cuda", limit=1.0)
        return check.run_all(list(parts), self.machine, results.kept(self.path, self.machine), arguments)


@pytest.fixture
def session(monkeypatch, tmp_path):
    return Session(monkeypatch, tmp_path / "gpu-check.json")


def states(found):
    return {name: entry["state"] for name, entry in found["parts"].items()}


def test_a_second_run_goes_on_where_the_first_stopped(session):
    parts = [part("right", is_check=True), part("fast"), part("slow")]
    session.ends = {"right": (RIGHT, 0), "slow": (ROWS, None)}
    assert states(session.all(*parts)) == {"right": "passed", "fast": "measured", "slow": "broken"}
    session.ends = {}
    found = session.all(*parts)
    assert session.ran == ["slow"] and results.is_fine(found)
    assert json.loads(session.path.read_text()) == found
    assert found["parts"]["right"]["rows"] == RIGHT
    session.machine = session.machine | {"commit": "2"}  # figures of other code are no result of this
    session.all(*parts)
    assert session.ran == ["right", "fast", "slow"]


def test_nothing_is_timed_where_a_check_fails(session):
    parts = [part("right", is_check=True), part("other", is_check=True), part("fast")]
    session.ends = {"right": (WRONG, 0), "other": (RIGHT, 0)}
    found = session.all(*parts)
    assert session.ran == ["right", "other"] and not results.is_fine(found)
    assert states(found) == {"right": "failed", "other": "passed", "fast": "waiting"}
    assert "a check before it has failed" in results.table(found) and "WRONG three" in results.table(found)
    session.all(parts[2], named=True)
    assert session.ran == ["fast"]
    session.ends["right"] = (RIGHT, 0)
    assert results.is_fine(session.all(*parts))


def test_a_part_for_two_devices_is_left_out_where_there_is_one(session):
    found = session.all(part("both", needs_devices=2))
    assert session.ran == [] and results.is_fine(found)
    assert found["parts"]["both"]["note"] == "it needs 2 devices"
    session.machine = session.machine | {"devices": ["made-up", "made-up"]}
    session.all(part("both", needs_devices=2))
    assert session.ran == ["both"]


@pytest.mark.parametrize(
    ("rows", "status", "state"),
    [
        (ROWS, 0, "measured"),
        (RIGHT, 0, "passed"),
        (WRONG, 0, "failed"),
        (RIGHT, 1, "broken"),
        (RIGHT, None, "broken"),
        ([*ROWS, {"left_out": "no room"}], 3, "left out"),
    ],
)
def test_how_a_part_ended(rows, status, state):
    found = results.entry(rows, status, 7.0, "first\nlast")
    assert found["state"] == state
    assert ("log" in found) == (state in ("failed", "broken"))
    assert len(found["rows"]) == len([row for row in rows if "name" in row])


def test_rows_are_written_as_they_come(tmp_path):
    def rows(where):
        yield Row("first", {"ms": 1.0})
        raise NotHere("the rest does not fit")

    assert run(Part("some", rows, False), CPU, tmp_path / "rows") == 3
    first, last = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert first["figures"] == {"ms": 1.0} and last == {"left_out": "the rest does not fit"}


def test_a_library_that_is_missing_leaves_a_part_out_and_a_file_of_ours_does_not(tmp_path):
    def rows(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        yield

    assert run(Part("some", lambda where: rows("httpx"), False), CPU, tmp_path / "rows") == 3
    assert "httpx" in json.loads((tmp_path / "rows").read_text())["left_out"]
    with pytest.raises(ModuleNotFoundError, match="cellar"):
        run(Part("some", lambda where: rows("oarlock.workers.cellar"), False), CPU, tmp_path / "rows")


REPORT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>
<testcase name="c"><failure message="0.5 is not 0.25"/></testcase></testsuite></testsuites>"""


def test_a_failed_test_is_a_row():
    counts, failed = correctness.rows_of_tests(REPORT)
    assert counts.figures == {"passed": 1.0, "failed": 1.0, "skipped": 1.0} and counts.ok is False
    assert failed.name == "c" and failed.ok is False and failed.note == "0.5 is not 0.25"
    (nothing,) = correctness.rows_of_tests('<testsuite><testcase name="b"><skipped/></testcase></testsuite>')
    assert nothing.ok is False  # a file whose tests are all skipped shows nothing
    (fine,) = correctness.rows_of_tests('<testsuite><testcase name="a"/></testsuite>')
    assert fine.ok is True


def test_graphs_are_judged_by_what_rounding_does():
    random = np.random.default_rng(0)
    ids, logprobs = random.integers(0, 1000, (7, 8)), random.normal(-4.0, 0.3, (7, 8))
    eager = (ids, logprobs)
    reference = (ids, logprobs + random.normal(0.0, 0.01, (7, 8)))
    rounded = (np.where(np.arange(56).reshape(7, 8) == 3, 0, ids), logprobs + random.normal(0.0, 0.01, (7, 8)))
    assert graphs.compared("near-tie", rounded, eager, reference).ok
    faults = {
        "rows of other sequences": (np.roll(ids, 1, axis=1), np.roll(logprobs, 1, axis=1)),
        "one step behind": (np.roll(ids, 1, axis=0), np.roll(logprobs, 1, axis=0)),
        "one row not computed": (ids, np.where(np.arange(8) == 5, np.nan, logprobs)),
        "one row of others": (ids, np.where(np.arange(8) == 5, np.roll(logprobs, 3), logprobs)),
    }
    for name, fault in faults.items():
        assert graphs.compared(name, fault, eager, reference).ok is False, name


def test_every_file_of_tests_of_device_kernels_is_a_part():
    files = [file.stem for file in correctness.tests_of_kernels()]
    assert {"test_attention", *(file.stem for file in (correctness.ROOT / "tests").rglob("test_triton_*.py"))} <= set(
        files
    )
    assert all(f"kernels {stem.removeprefix('test_')}" in PARTS for stem in files)


def test_checks_come_before_what_is_timed():
    kinds = [part.is_check for part in PARTS.values()]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {True, False}


@pytest.mark.parametrize(("shape", "billions", "inner"), [("0.6b", 0.596, 0.440), ("8b", 8.191, 6.946)])
def test_shapes_are_those_of_the_published_models(shape, billions, inner):
    with models.described(shape, Where("cuda")) as folder:
        spec = models.read_spec(folder)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, abs=6e-4)
    assert models.inner_parameters(spec) / 1e9 == pytest.approx(inner, abs=6e-4)


def test_without_a_device_there_is_an_error_and_a_fix(capsys, monkeypatch):
    monkeypatch.setattr(results, "machine", lambda device: {"device": device, "devices": []})
    assert check.main(["--device", "cuda"]) == 2
    assert "fix: oarlock doctor" in capsys.readouterr().out


def test_a_part_that_takes_too_long_is_ended():
    found = check.run_part(PARTS["ceilings"], "cpu", 0.05)
    assert found["state"] == "broken" and "not over after" in found["note"]


@pytest.mark.slow
def test_a_part_that_this_machine_cannot_run_is_left_out():
    found = check.run_part(PARTS["kernels attention"], "cpu", 100.0)
    assert found["state"] == "left out" and found["note"] == "make test runs them on the CPU"


def run_parts(tmp_path, capsys, names):
    status = check.main(["--device", "cpu", "--json", str(tmp_path / "found.json"), "--parts", *names])
    found = json.loads((tmp_path / "found.json").read_text())
    assert status == 0, results.table(found)
    assert list(found["parts"]) == list(names) and all(part in capsys.readouterr().out for part in names[:1])
    rows = [row for part in found["parts"].values() for row in part["rows"]]
    assert rows and all(value > 0 for row in rows if row["ok"] is None for value in row["figures"].values())


@pytest.mark.slow
def test_parts_on_tiny_shapes(tmp_path, capsys):
    run_parts(tmp_path, capsys, ["graphs", "decode 0.6b"])


def test_quantised_products_on_tiny_shapes():
    names = [row.name for row in PARTS["quantised products"].run(CPU)]
    assert names[0] == "bfloat16: 1 rows, 64 x 128" and len(names) == 8


def test_answers_that_depend_on_the_batch_are_a_fault(monkeypatch):
    answer = Answer([1, 2], error=None)
    assert demo_answers.compared("", {3: answer, 4: answer}, {3: answer, 4: Answer([1, 2])}).ok
    found = demo_answers.compared("", {3: answer, 4: answer}, {3: answer, 4: Answer([1, 3])})
    assert found.ok is False and found.figures["that differ"] == 1.0 and found.note == "requests 4"

    def refuses(config, on_progress):
        raise StartupError("numbers depend on the batch here", "leave it out")

    monkeypatch.setattr(demo_answers, "start_executor", refuses)
    with pytest.raises(NotHere):
        list(demo_answers.batch_invariant(CPU))
    assert [row.ok for row in demo_answers.batch_invariant(Where("cuda"))] == [False, False]


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_every_part_on_tiny_shapes(tmp_path, capsys):
    run_parts(tmp_path, capsys, list(PARTS))
