"""The check of a GPU: what runs, what is kept, what a failure means; and its parts on tiny shapes, on the CPU."""

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import step_arithmetic
from benchmarks.gpu_check import __main__ as check
from benchmarks.gpu_check import correctness, demo_answers, graphs, models, results, serving, wheels
from benchmarks.gpu_check.part import NotHere, Part, Row, Where, missing_package
from benchmarks.gpu_check.process import PARTS, run
from benchmarks.gpu_check.ten_cases import spread
from oarlock.base.errors import StartupError
from tests.parallel.direct_engine import Answer

CPU = Where("cpu")
ROWS = [{"name": "one", "figures": {"GB/s": 12.5}, "ok": None, "note": ""}]
RIGHT = [*ROWS, {"name": "two", "figures": {}, "ok": True, "note": ""}]
WRONG = [*RIGHT, {"name": "three", "figures": {}, "ok": False, "note": "differs"}]


def part(name, needs_devices=1):
    return Part(name, lambda where: iter(()), needs_devices=needs_devices)


class Session:
    """`run_all` with parts that end as told, on a made-up machine of one GPU."""

    def __init__(self, monkeypatch, path):
        self.path, self.ran, self.limits, self.ends = path, [], [], {}
        self.machine = {"device": "cuda", "devices": ["made-up"], "commit": "1"} | dict.fromkeys(
            ("driver", "torch", "triton", "python")
        )
        monkeypatch.setattr(check, "run_part", self._run)

    def _run(self, part, device, limit):
        self.ran.append(part.name)
        self.limits.append(limit)
        return results.entry(*self.ends.get(part.name, (ROWS, 0)), 1.0, "the log")

    def all(self, *parts, left_s=1e9):
        self.ran, self.limits = [], []
        arguments = argparse.Namespace(json=self.path, device="cuda")
        kept = results.kept(self.path, self.machine)
        return check.run_all(list(parts), self.machine, kept, arguments, time.monotonic() + left_s)


@pytest.fixture
def session(monkeypatch, tmp_path):
    return Session(monkeypatch, tmp_path / "gpu-check.json")


def states(found):
    return {name: entry["state"] for name, entry in found["parts"].items()}


def test_a_second_run_goes_on_where_the_first_stopped(session):
    parts = [part("right"), part("fast"), part("slow")]
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


def test_a_part_that_fails_stops_no_other_and_heads_the_page(session):
    session.ends = {"kernels": (WRONG, 0), "crashes": (ROWS, 1)}
    found = session.all(part("kernels"), part("crashes"), part("fast"))
    assert session.ran == ["kernels", "crashes", "fast"] and not results.is_fine(found)
    page = session.path.with_suffix(".txt").read_text()
    assert page == results.page(found) + "\n"
    assert "WRONG or broken: kernels; crashes." in page and "WRONG three" in page and "| last" not in page


def test_a_budget_ends_the_run_and_what_is_left_is_run_by_the_next(session):
    parts = [part("first"), part("second")]
    found = session.all(*parts, left_s=20.0)
    assert session.ran == ["first", "second"] and all(7.5 < limit <= 10.0 for limit in session.limits)
    found = session.all(part("third"), left_s=check.LEAST_S)
    assert session.ran == [] and found["parts"]["third"]["state"] == "waiting" and not results.is_fine(found)
    assert "Not run yet:\n  third: no time was left" in results.page(found)
    session.all(part("third"))
    assert session.ran == ["third"] and session.limits == [120.0]


def test_the_page_names_the_three_worst_shares_of_what_bounds_a_row(session):
    shares = [("a", {"share of bandwidth": 0.9}), ("b", {"share of bandwidth": 0.01, "share of products": 0.7})]
    shares += [("c", {"share of floor": 0.4, "ms": 3.0}), ("d", {"share of floor": 0.8}), ("e", {"ms": 0.1})]
    session.ends = {"fast": ([{"name": name, "figures": found, "ok": None, "note": ""} for name, found in shares], 0)}
    parts = session.all(part("fast"))["parts"]
    assert [found[:2] for found in results.worst_shares(parts)] == [(0.4, "floor"), (0.7, "products"), (0.8, "floor")]


def test_a_part_for_two_devices_is_left_out_where_there_is_one(session):
    found = session.all(part("both", needs_devices=2))
    assert session.ran == [] and results.is_fine(found)
    assert found["parts"]["both"]["note"] == "it needs 2 CUDA devices"
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
        ([*WRONG, {"left_out": "no room"}], 3, "failed"),
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

    assert run(Part("some", rows), CPU, tmp_path / "rows") == 3
    first, last = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert first["figures"] == {"ms": 1.0} and last == {"left_out": "the rest does not fit"}


def test_a_library_that_is_missing_leaves_a_part_out_and_a_file_of_ours_does_not(tmp_path):
    def rows(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        yield

    assert run(Part("some", lambda where: rows("httpx")), CPU, tmp_path / "rows") == 3
    assert "httpx" in json.loads((tmp_path / "rows").read_text())["left_out"]
    with pytest.raises(ModuleNotFoundError, match="cellar"):
        run(Part("some", lambda where: rows("oarlock.workers.cellar")), CPU, tmp_path / "rows")


BY_NAME = "Traceback\n  import httpx\nModuleNotFoundError: No module named 'httpx.auth'\n"
DEALT_WITH = "\nDuring handling of the above exception, another exception occurred:\n\nValueError: 0.5 is not 0.25\n"


def test_a_package_that_a_child_misses_is_named_with_the_fix(monkeypatch):
    why = missing_package(f"verify: starting\n{BY_NAME}error: no report\n")
    assert why is not None and why.startswith("No module named 'httpx.auth': ") and "--wheels" in why
    assert missing_package(BY_NAME + DEALT_WITH) is None  # the other exception is what ended it
    assert missing_package("ModuleNotFoundError: No module named 'oarlock.cellar'") is None

    child = subprocess.CompletedProcess([], 1, "", BY_NAME)
    monkeypatch.setattr(correctness, "_run", lambda command: child)
    with pytest.raises(NotHere, match="httpx"):
        list(correctness.demo(CPU))
    child.stderr += DEALT_WITH
    assert [row.ok for row in correctness.demo(CPU)] == [False]


def test_a_server_or_rank_that_misses_a_package_leaves_its_part_out():
    assert results.entry(ROWS, 1, 1.0, BY_NAME)["note"] == missing_package(BY_NAME)
    states = [results.entry(rows, status, 1.0, BY_NAME)["state"] for rows, status in ((WRONG, 1), (ROWS, -9))]
    assert states == ["failed", "broken"]


def test_parts_left_out_are_tried_again_by_the_next_run(session):
    session.ends = {"load": ([{"left_out": "servers need fastapi"}], 3)}
    assert states(session.all(part("load"), part("fast"))) == {"load": "left out", "fast": "measured"}
    assert states(session.all(part("fast")))["load"] == "left out" and session.ran == []
    session.ends = {}
    assert states(session.all(part("load"), part("fast")))["load"] == "measured" and session.ran == ["load"]


REPORT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>
<testcase name="c"><failure message="0.5 is not 0.25"/></testcase></testsuite></testsuites>"""


def test_a_failed_test_is_a_row():
    counts, failed = correctness.rows_of_tests(REPORT, "file")
    assert counts.figures == {"passed": 1.0, "failed": 1.0, "skipped": 1.0} and counts.ok is False
    assert failed.name == "c" and failed.ok is False and failed.note == "0.5 is not 0.25"
    (nothing,) = correctness.rows_of_tests('<testsuite><testcase name="b"><skipped/></testcase></testsuite>', "file")
    assert nothing.ok is False  # a file whose tests are all skipped shows nothing
    (fine,) = correctness.rows_of_tests('<testsuite><testcase name="a"/></testsuite>', "file")
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
    of_kernels = {file.stem for file in (correctness.ROOT / "tests").rglob("test_triton_*.py")}
    skipped = of_kernels - set(files)  # a file without a test that passed would be reported as wrong
    assert "test_attention" in files and skipped == {"test_triton_variants"}
    assert all(f"all kernels {stem.removeprefix('test_')}" in PARTS for stem in files)


def test_the_most_important_parts_come_first():
    names = list(PARTS)
    assert names[:4] == ["float64", "kernels", "ceilings", "attention"] and names.index("load") > names.index(
        "sampling"
    )
    first = names[: names.index("sanitizer") + 1]
    assert all(PARTS[name].needs_devices == 1 for name in first)


def test_a_step_of_more_sequences_is_expected_to_take_longer():
    tables = "\n".join(step_arithmetic.lines(step_arithmetic.arguments().parse_args([]))).split("\n\n")
    assert len(tables) == 2
    rows = [line.strip("| ").split(" | ") for line in tables[0].splitlines()[2:]]
    assert {row[0] for row in rows} == {"0.6B", "8B", "8B, 2 ranks"}
    for first, second in pairwise(rows):
        assert first[0] != second[0] or float(first[-1]) < float(second[-1])


def test_ten_cases_try_every_value_of_every_parameter():
    cases = [frozenset({("dtype", d), ("rows", r)}) for d in ("half", "bf16", "float") for r in map(str, range(10))]
    chosen = spread(cases)
    assert len(chosen) == 10 and frozenset.union(*(cases[index] for index in chosen)) == frozenset.union(*cases)
    assert spread(cases[:3]) == [0, 1, 2]


def test_logprobs_are_judged_by_what_transformers_loses():
    random = np.random.default_rng(0)
    exact = np.log(random.dirichlet(np.ones(50), (7, 8)))
    theirs = exact + random.normal(0.0, 0.01, exact.shape)
    ids = exact.argmax(-1)
    found = np.take_along_axis(exact, ids[..., None], -1)[..., 0] + random.normal(0.0, 0.01, ids.shape)
    assert graphs.judged("", (ids, found), exact, theirs).ok
    assert not graphs.judged("", (ids, found + 0.03), exact, theirs).ok
    assert not graphs.judged("", (np.roll(ids, 1, 1), found), exact, theirs).ok
    second = np.take_along_axis(exact, exact.argsort(-1)[..., -2:-1], -1)[..., 0]
    assert not graphs.judged("", (exact.argsort(-1)[..., -2], second), exact, theirs).ok


def test_wheels_of_what_is_missing_are_unpacked_and_others_are_not(tmp_path):
    for name in ("made_up-1.0-py3-none-any", "torch-9.0-py3-none-any", "other-1.0-cp27-cp27m-win32", "no-wheel"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}/__init__.py", "")
    assert wheels.unpack(tmp_path, tmp_path / "into") == ["made-up 1.0"]
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["made_up"]


def test_servers_are_started_with_the_wheels(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{serving.ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.setattr(serving.checkpoint, "ensure", lambda shape: tmp_path)
    monkeypatch.setattr(serving, "HttpSystem", lambda *given: given)
    environment = serving._server("oarlock", CPU, 1)[4]
    assert environment["PYTHONPATH"] == os.environ["PYTHONPATH"]


@pytest.mark.parametrize(
    ("shape", "billions", "inner"), [("0.6b", 0.596, 0.440), ("8b", 8.191, 6.946), ("latent 2b", 1.962, 1.699)]
)
def test_shapes_match_the_published_models(shape, billions, inner):
    with models.described(shape, Where("cuda")) as folder:
        spec = models.read_spec(folder)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, abs=6e-4)
    assert models.inner_parameters(spec) / 1e9 == pytest.approx(inner, abs=6e-4)


def test_a_part_of_kimi_linear_has_both_kinds_of_layers():
    with models.described("kimi, 8 layers", Where("cuda")) as folder:
        spec = models.read_spec(folder)
    kinds = [type(layer.branches[0].sublayer).__name__ for layer in spec.layers]
    assert sorted(kinds) == ["KimiDeltaSpec"] * 7 + ["LatentAttentionSpec"]


def test_without_a_device_there_is_an_error_and_a_fix(capsys, monkeypatch):
    monkeypatch.setattr(results, "machine", lambda device: {"device": device, "devices": []})
    assert check.main(["--device", "cuda"]) == 2
    assert "fix: oarlock doctor" in capsys.readouterr().out


def test_without_a_device_parts_run_on_the_cpu_and_report_and_status_name_it(capsys, monkeypatch, tmp_path):
    known = dict.fromkeys(("driver", "torch", "triton", "python", "commit"))
    monkeypatch.setattr(results, "machine", lambda device: known | {"device": device, "devices": []})
    monkeypatch.setattr(check, "_environment", lambda *arguments: None)
    ran, rows = [], RIGHT
    monkeypatch.setattr(check, "run_part", lambda *given: ran.append(given[1]) or results.entry(rows, 0, 1.0, ""))
    command = ["--json", str(tmp_path / "found.json"), "--parts", "float64", "load, 2 devices"]
    assert check.main(command) == 2 and ran == ["cpu"]
    assert capsys.readouterr().out.startswith("error: no CUDA device responds")
    page = (tmp_path / "found.txt").read_text()
    assert page.startswith(results.NO_DEVICE) and "load, 2 devices: it needs 2 CUDA devices" in page
    assert check.main([*command, "--device", "cpu"]) == 0
    rows = WRONG
    assert check.main([*command, "--again"]) == 1


def test_a_part_that_takes_too_long_is_ended():
    found = check.run_part(PARTS["ceilings"], "cpu", 0.05)
    assert found["state"] == "broken" and "not over after" in found["note"]


def test_a_part_that_this_machine_cannot_run_is_left_out():
    with pytest.raises(NotHere, match="make test runs them on the CPU"):
        list(PARTS["all kernels attention"].run(CPU))


# What a machine has with PyTorch, transformers and pytest alone: the rest is refused, our own installation too.
MISSING = "cryptography fastapi httptools httpx hypothesis llguidance prometheus_client psutil pydantic pytest_timeout "
MISSING += "rich shtab sse_starlette starlette uvicorn uvloop xdist"
BARE = f"""
import sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {MISSING.split()!r} else super().find_spec(name, path, target)
found = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in found]
"""


def run_parts(tmp_path, names, *, is_bare):
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    if is_bare:
        (tmp_path / "sitecustomize.py").write_text(BARE)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [*command, *(["--parts", *names] if names else [])], cwd=correctness.ROOT, env=environment, capture_output=True
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 0, results.page(found)
    assert list(found["parts"]) == list(names or PARTS)
    rows = [row for part in found["parts"].values() for row in part["rows"]]
    assert rows and all(value > 0 for row in rows if row["ok"] is None for value in row["figures"].values())
    return found["parts"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_parts_run_where_packages_are_missing_and_those_that_need_them_are_named(tmp_path):
    found = run_parts(tmp_path, ["quantised products", "load"], is_bare=True)
    assert [part["state"] for part in found.values()] == ["measured", "left out"]
    names = [row["name"] for row in found["quantised products"]["rows"]]
    assert names[0] == "bfloat16: 1 rows, 64 x 128" and len(names) == 8
    note = found["load"]["note"]
    assert note.startswith("servers need fastapi, starlette, ") and "httpx: install" in note and "--wheels" in note
    assert "torch" not in note
    with pytest.raises(NotHere, match="needs a CUDA device"):
        list(PARTS["sanitizer"].run(CPU))


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
@pytest.mark.every
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("is_bare", [True, False])
def test_every_part_on_tiny_shapes(tmp_path, is_bare):
    found = run_parts(tmp_path, None, is_bare=is_bare)
    left_out = [name for name, part in found.items() if part["state"] == "left out"]
    needs_packages = [name for name in left_out if "servers need" in found[name]["note"]]
    assert needs_packages == (["load", "memory", "one step ahead", "transformers"] if is_bare else [])
