"""Building the kernels: once, by one process at a time, and with a reason when it is not possible."""

import subprocess
import sys
from pathlib import Path

import pytest

from workers.kernels.cpu import library

HERE = library.why_not()
needs_kernels = pytest.mark.skipif(HERE is not None, reason=str(HERE))
SCRIPT = """
from workers.kernels.cpu import library
print(library.why_not())
maps = open("/proc/self/maps").read().splitlines()
print(len({line.split()[-1] for line in maps if "libgomp" in line}))
"""


def kernels_in_new_process(home: Path, **environment: str) -> list[str]:
    """From a new process: why the kernels are not available, or None, and how many OpenMP libraries it has loaded."""
    command = [sys.executable, "-c", SCRIPT]
    variables = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(home), "HOME": str(home), **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


@needs_kernels
def test_they_are_built_once_and_share_torchs_threads(tmp_path: Path) -> None:
    assert kernels_in_new_process(tmp_path) == ["None", "1"]
    (first,) = tmp_path.glob("oarlock/kernels/*.so")
    made = first.stat().st_mtime_ns
    assert kernels_in_new_process(tmp_path, CXX="g++") == ["None", "1"]
    assert [path.stat().st_mtime_ns for path in tmp_path.glob("oarlock/kernels/*.so")] == [made]
    assert not list(tmp_path.glob("oarlock/kernels/*.o")), "objects are cleaned up"


@needs_kernels
@pytest.mark.parametrize(
    ("environment", "words"),
    [({"CXX": "no-such-compiler"}, "install g++"), ({"CXX": "false"}, "failed")],
)
def test_a_machine_that_cannot_build_gives_the_reason(tmp_path: Path, environment: dict[str, str], words: str) -> None:
    refusal, _ = kernels_in_new_process(tmp_path, **environment)
    assert words in refusal


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_chosen", lambda: None)
    with pytest.raises(library.KernelsUnavailable, match="AVX2"):
        library.library()
