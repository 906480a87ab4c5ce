"""`make wheel`, then the server from that wheel where there is no compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from oarlock.workers.kernels.cpu import build
from tests.e2e.running import QUICK_COMPILER, ROOT, RunningServer, environment

FILES = ("Makefile", "pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE")
FOLDERS = ("oarlock", "server", "engine", "workers", "base", "models")
HERE = [level for level in build.LEVELS if level.machine == build.machine_name()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Made from a copy of the sources, with this interpreter's packages. Kernels of all levels are compiled without
    optimising them, in seconds for minutes: nothing here asks how fast they are."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler to make it with")
    copy = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt", "training")
    for name in (*FILES, *FOLDERS):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy2(ROOT / name, copy / name)
    folder = Path(sys.executable).parents[1]
    made = ["make", "wheel", f"VENV={folder}", "-o", str(folder / ".oarlock-installed")]
    variables = {**os.environ, "CXX": str(QUICK_COMPILER)}
    done = subprocess.run(made, cwd=copy, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (copy / "workers/kernels/cpu/prebuilt").exists(), "the checkout is as before"
    (found,) = (copy / "dist").glob("*.whl")
    return found


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_wheel_serves_with_its_kernels_where_there_is_no_compiler(wheel, tmp_path):
    assert "-py3-none-manylinux_2_" in wheel.name and wheel.name.endswith(f"_{build.machine_name()}.whl")
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False)
    python = clean / "bin" / "python"
    packages = sysconfig.get_path("purelib", "venv", {"base": str(clean), "platbase": str(clean)})
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([sys.executable, *map(str, install)], check=True, timeout=120)
    # Torch and the others come from this interpreter; the checkout does not.
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(packages) / "others.pth").write_text("\n".join(ours))
    (Path(packages) / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\n"
    )
    without = {"PATH": str(clean / "bin"), "CXX": "", "PYTHONPATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    asked = (
        "from oarlock import server; from oarlock.workers.kernels.cpu import library; "
        "print(library.library()._name); print(server.__file__)"
    )
    variables = {**environment(), **without}
    done = subprocess.run(
        [python, "-c", asked], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    kernels, server = map(Path, done.stdout.split())
    assert clean in server.parents and clean in kernels.parents
    assert kernels.name == build.prebuilt(build.available()[0]).name
    assert sorted(path.name for path in kernels.parent.iterdir()) == sorted(
        build.prebuilt(level).name for level in HERE
    )
    with RunningServer(None, env=without, cwd=tmp_path, python=python) as running:
        assert f"event=kernel kernel='gemm' level={build.available()[0].name}" in running.log
        assert "compiled_kernels" not in running.log and "no_kernels" not in running.log
        assert running.text("Once", max_tokens=4)
