"""Plants each fault of the table in a copy of this tree and runs the tests that stand for its concern.

    python -m tests.mutants [--list] [--jobs N] [NAME ...]

Prints a row for each fault: the test that found it, and the seconds. A test counts only if it passes without the fault.
A fault that crashes the interpreter is found, by the test that ran then.
What the tests of `make test` do not find is tried with those that `make test-long` adds. Exits with 1 if a fault was
not found, or if its text is not in the code exactly once.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.house.rules import ROOT
from tests.mutants.table import CONCERNS, FAULTS, Fault

TIMEOUT_S = 600  # for the tests of one fault
TEST_TIMEOUT_S = 120  # a fault that makes a test hang is found
LONGER = ("-m", "product")
NO_TESTS = 5  # pytest's status where all are deselected
STARTED = re.compile(
    r"^(tests/\S+?\.py::[^\s\[]+(?:\[.*?\](?=\s|$))?)", re.MULTILINE
)  # pytest writes it before a test runs
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    found_by: str | None
    seconds: float
    note: str = ""


@functools.cache
def sources() -> dict[Path, str]:
    """Text of each source file of the packages, by its path below the root; read once for all faults."""
    files = [file for top in ("server", "engine", "workers", "base") for file in sorted((ROOT / top).rglob("*"))]
    return {file.relative_to(ROOT): file.read_text("utf-8") for file in files if file.suffix in {".py", ".cpp", ".h"}}


def file_of(fault: Fault) -> Path:
    """The one source file that has the text of `fault`, which stands in it once. Raises `LookupError`."""
    found = {file: count for file, text in sources().items() if (count := text.count(fault.before))}
    if list(found.values()) != [1]:
        places = ", ".join(f"{file} ({count})" for file, count in found.items())
        raise LookupError(f"{fault.name}: its text must stand in the code once, and stands in {places or 'no file'}")
    return next(iter(found))


def copy_of_tree(folder: Path) -> Path:
    """A copy of the files that git knows or would know, with this tree's virtual environment."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def run_tests(tree: Path, arguments: tuple[str, ...], cache: Path | None) -> tuple[int | None, str]:
    """Exit status of pytest in `tree` (None: out of time) and its output; compiled kernels go to `cache`."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment |= {"XDG_CACHE_HOME": str(cache)} if cache else {}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=line", "-p", "no:cacheprovider"]
    command += [f"--timeout={TEST_TIMEOUT_S}", *arguments]
    with subprocess.Popen(command, cwd=tree, env=environment, text=True, stdout=-1, stderr=-2) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, process.communicate()[0]
    return process.returncode, output


def try_fault(fault: Fault, tree: Path) -> Outcome:
    """Plant, run, restore; then see that the test which failed passes again."""
    file = tree / file_of(fault)
    clean, started = file.read_text("utf-8"), time.monotonic()
    concern, marked = CONCERNS[fault.concern], ()
    with tempfile.TemporaryDirectory(prefix="oarlock-mutant-") as folder:
        cache = Path(folder) if file.suffix != ".py" else None
        try:
            _write(file, clean.replace(fault.before, fault.after))
            status, output = run_tests(tree, concern, cache)
            if status in (0, NO_TESTS):
                marked = LONGER
                status, output = run_tests(tree, (*concern, *marked), cache)
        finally:
            _write(file, clean)
    seconds = time.monotonic() - started
    if status is None:
        return Outcome("the time limit", seconds)
    if status in (0, NO_TESTS):
        return Outcome(None, seconds, "every test passes")
    test, what = found_in(status, output)
    if what is None:
        return Outcome(None, seconds, f"pytest ended with {status}: {output[-2000:]}")
    options = [word for word in concern if not word.startswith("tests/")] + [*marked]
    status, _ = run_tests(tree, (test, *options) if test else (*concern, *marked), None)
    found_by = f"{what}{' (make test-long)' if marked else ''}"
    return Outcome(found_by, seconds) if status == 0 else Outcome(None, seconds, f"{what}: without it, too")


def found_in(status: int, output: str) -> tuple[str | None, str | None]:
    """The test that failed, and what a row says of it; of a crash that no test began before, the second alone."""
    if status < 0:  # the signal that ended the interpreter
        started = STARTED.findall(output)
        return (
            (started[-1], f"the interpreter crashed in {started[-1]}") if started else (None, "the interpreter crashed")
        )
    failed = FAILED.search(output)
    return (failed[1], failed[1]) if status == 1 and failed else (None, None)


def _write(file: Path, text: str) -> None:
    """Write a source; what Python compiled of it goes, which it would know by the second alone."""
    file.write_text(text, "utf-8")
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plants faults and runs their tests.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults or concerns; all if none is named")
    parser.add_argument("--list", action="store_true", help="print the table and check that it fits the code")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time")
    args = parser.parse_args()
    unknown = set(args.names) - {fault.name for fault in FAULTS} - CONCERNS.keys()
    if unknown:
        parser.error(f"there is no fault or concern called {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if not args.names or {fault.name, fault.concern} & set(args.names)]
    stale = []
    for fault in faults:
        try:
            place = file_of(fault)
        except LookupError as error:
            stale.append(str(error))
        else:
            if args.list:
                print(f"{fault.concern:14} {fault.name:40} {place}: {fault.breaks}")
    for line in stale:
        print(line, file=sys.stderr)
    if stale or args.list:
        return int(bool(stale))
    return run_all(faults, args.jobs)


def run_all(faults: list[Fault], jobs: int) -> int:
    """Try the faults, `jobs` at a time, and print what became of each."""
    with tempfile.TemporaryDirectory(prefix="oarlock-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            trees.put(copy_of_tree(Path(folder) / f"tree{number}"))

        def one(fault: Fault) -> Outcome:
            tree = trees.get()
            try:
                return try_fault(fault, tree)
            finally:
                trees.put(tree)

        missed = 0
        started = time.monotonic()
        for fault, outcome in zip(faults, pool.map(one, faults), strict=True):
            missed += outcome.found_by is None
            what = outcome.found_by or f"NOT FOUND ({fault.breaks}): {outcome.note}"
            print(f"{fault.concern:14} {fault.name:40} {outcome.seconds:5.0f} s  {what}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found in {time.monotonic() - started:.0f} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
