"""Settings of the whole test run."""

import contextlib
import gc
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from xdist.scheduler import LoadFileScheduling

from tests.covering_set import covering_set

# Triton reads this when it is imported, which some libraries do: without a device, kernels are interpreted.
HAS_DEVICE = Path("/dev/nvidia0").exists()
if not HAS_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"
# A script that starts the tests in its background has Ctrl-C ignored; the programs that they stop with it must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
# Parameters and fixtures of tests that run at every level of instruction set.
LEVELS = {"level", "form", "backend", "linear"}
SHARED_SERVERS = re.compile(r"\b(tp1|tp2)\b")  # fixtures of tests/e2e that live as long as a worker


class FilesAndServers(LoadFileScheduling):
    """Distributes tests file by file; files that share servers go to one worker, so that those are started once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "shared servers" if _shares_servers(file) else file


@cache
def _shares_servers(file: str) -> bool:
    path = TESTS.parent / file
    return path.is_relative_to(TESTS / "e2e") and bool(SHARED_SERVERS.search(path.read_text("utf-8")))


@pytest.hookimpl(optionalhook=True)  # for runs without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesAndServers | None:
    return FilesAndServers(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection(session: pytest.Session) -> None:
    """Let each worker of xdist import other test files first.

    All of them import every file, and in a fresh checkout pytest rewrites the assertions of each before that, which is
    half of the work. In one order for all, each worker would do it for every file; so it finds most of them done.
    """
    if session.config.getoption("numprocesses", None):  # workers collect
        return
    gc.disable()  # imports and items make next to nothing but objects that stay
    if not hasattr(session.config, "workerinput"):
        return
    number, workers = int(session.config.workerinput["workerid"][2:]), session.config.workerinput["workercount"]
    for path in sorted(TESTS.rglob("test_*.py"))[number::workers]:
        if any(path.is_relative_to(Path(argument).absolute()) for argument in session.config.args):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest will import it again, and report
                importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def _key(value: object) -> str:
    """Key that is the same for equal values. Classes made for each level share one name, so they go by identity."""
    return f"{value!r} {id(value)}" if callable(value) else repr(value)


def _factors(params: dict[str, object], marks: list[pytest.Mark]) -> dict[str, str]:
    """Values of a case that stand in a product with each other: of a table of cases, the whole row."""
    if LEVELS & params.keys():
        return {name: _key(value) for name, value in params.items()}
    factors = {name: name for name in params}
    for mark in marks:
        if mark.name == "parametrize":
            names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
            factors |= {name.strip(): names for name in names.split(",")}
    rows: dict[str, list[str]] = {}
    for name, value in params.items():
        rows.setdefault(factors[name], []).append(_key(value))
    return {names: " ".join(row) for names, row in rows.items()}


def _why_skipped(marks: list[pytest.Mark]) -> str | None:
    """Reason why a case cannot run here, or None."""
    reasons = [str(mark.kwargs.get("reason")) for mark in marks if mark.name == "skipif" and mark.args[:1] == (True,)]
    return next(iter(reasons), None if HAS_DEVICE or all(mark.name != "gpu" for mark in marks) else "no device")


_told: set[tuple[Path, object]] = set()  # files and reasons to skip, one case of each


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Mark the combinations of a test's parameters beyond those that cover each value: as `product` where they are
    among those that cover each pair, else as `every`. Of those that a value marks as `soak` or `product` already, such
    as a level, each pair is covered without more marks. Of what cannot run here a file tells each reason once.

    What `-m` leaves out is not made, which of all combinations takes longer than to run those of many files.
    """
    yield
    calls, shared = metafunc._calls, list(metafunc.definition.iter_markers())
    tests: dict[tuple[bool, bool], list[Any]] = {}
    for call in calls:
        names = {mark.name for mark in (*call.marks, *shared)}
        tests.setdefault(("soak" in names, "product" in names), []).append(call)
    needs_pairs = _is_wanted(metafunc.config, {"product"}) or _is_wanted(metafunc.config, {"product", "soak"})
    for (is_soak, is_product), combinations in tests.items():
        cases = [_factors(call.params, [*call.marks, *shared]) for call in combinations]
        if len(cases[0]) < 2:
            continue
        reasons = [_why_skipped([*call.marks, *shared]) for call in combinations]
        can_run = [reason is None for reason in reasons]
        in_pairs = covering_set(cases, can_run, pairs=True) if needs_pairs or is_soak or is_product else set()
        chosen = in_pairs if is_soak or is_product else covering_set(cases, can_run)
        path = metafunc.definition.path
        for index, (call, reason) in enumerate(zip(combinations, reasons, strict=True)):
            if index not in chosen or (None in reasons and (path, reason) in _told):
                call.marks.append((pytest.mark.product if index in in_pairs else pytest.mark.every).mark)
            elif reason is not None:
                _told.add((path, reason))
    wanted = [call for call in calls if _is_wanted(metafunc.config, {mark.name for mark in (*call.marks, *shared)})]
    calls[:] = wanted or calls[:1]


_compiled = cache(Expression.compile)


def _among(marks: set[str]) -> Callable[..., bool]:
    return lambda name, **_: name in marks


def _is_wanted(config: pytest.Config, marks: set[str]) -> bool:
    """Whether `-m` can choose a case with these marks; where the arguments name a test, all of its cases are made."""
    expression = config.option.markexpr
    if not expression or any("::" in argument for argument in config.args):
        return True
    return any(_compiled(expression).evaluate(_among(known)) for known in (marks, marks | {"more"}))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a test but the first as `more`, of those that `make test` runs."""
    known: set[str] = set()
    for item in items:
        if not {"soak", "product", "every"} & {mark.name for mark in item.iter_markers()}:
            test = item.nodeid.split("[")[0]
            if test in known:
                item.add_marker("more")
            known.add(test)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore the log after tests in this process that set up that of a server or an engine."""
    loggers = [logging.getLogger(name) for name in ("", "oarlock", "uvicorn")]
    before = [(one, one.level, one.propagate) for one in loggers]
    yield
    for one, level, propagate in before:
        one.setLevel(level)
        one.propagate = propagate


@pytest.fixture(scope="session", autouse=True)
def one_process_for_chat_templates() -> Iterator[None]:
    """Keep the process that starts renderers for all tests; it would end with its last user."""
    from oarlock.server.llm.template_renderers import processes

    processes.acquire()
    yield
    processes.release()


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from garbage collection: they stay until the end."""
    if "triton.runtime.interpreter" in sys.modules:
        from tests.interpreted_products import patch_language_once_a_launch

        patch_language_once_a_launch()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ignore Ctrl-C once a worker of xdist has sent its results: it interrupts slow workers, which would then print."""
    if hasattr(session.config, "workerinput"):
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
