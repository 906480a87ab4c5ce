"""The package is whole, whatever its sources came as: a checkout, GitHub's zip, a checkout without symbolic links."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.running import ROOT

PACKAGES = ("server", "engine", "workers", "base")
DATA = (".py", ".c", ".cc", ".cpp", ".h", ".cu")
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def archive(folder: Path) -> Path:
    run("git", "archive", "--format=zip", f"--output={folder / 'sources.zip'}", "HEAD", cwd=ROOT)
    with zipfile.ZipFile(folder / "sources.zip") as sources:
        sources.extractall(folder / "sources")  # writes a small text file in place of each link
    return folder / "sources"


def checkout(folder: Path) -> Path:
    run("git", "-c", "core.symlinks=false", "clone", "--quiet", "--depth=1", f"file://{ROOT}", "sources", cwd=folder)
    return folder / "sources"


def sdist(folder: Path) -> Path:
    built = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", built, folder, cwd=archive(folder))
    (packed,) = folder.glob("*.tar.gz")
    run("tar", "xf", packed, cwd=folder)
    (unpacked,) = folder.glob("oarlock-*/")
    return unpacked


@pytest.fixture(
    scope="module",
    params=[archive, pytest.param(checkout, marks=pytest.mark.soak), pytest.param(sdist, marks=pytest.mark.soak)],
)
def installed(request, tmp_path_factory) -> Path:
    """The content of a wheel that was built from these sources."""
    if not (ROOT / ".git").exists():
        pytest.skip("the sources are no git checkout, so there is no archive of them")
    folder = tmp_path_factory.mktemp("package")
    sources = request.param(folder)
    assert not (sources / "oarlock" / "server").is_dir(), "there are no links"
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ".")
    run(sys.executable, *build, cwd=sources)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "installed")
    return folder / "installed"


def test_a_wheel_has_every_file_of_the_packages(installed):
    tracked = run("git", "ls-tree", "-r", "--name-only", "HEAD", *PACKAGES, cwd=ROOT).splitlines()
    expected = {name for name in tracked if name.endswith(DATA) or "/static/" in name}
    found = {path.relative_to(installed / "oarlock").as_posix() for path in (installed / "oarlock").rglob("*.*")}
    assert len(expected) > 500 and expected - found == set()


def test_a_wheel_can_be_imported(installed, tmp_path):
    asked = "import oarlock.server.cli.main as cli, oarlock.engine.config; print(cli.__file__, oarlock.__version__)"
    kept = os.pathsep.join([str(installed), *(path for path in sys.path if path.endswith("site-packages"))])
    # `-S` keeps the editable install of the checkout out.
    done = subprocess.run(
        [sys.executable, "-S", "-c", asked],
        env={**os.environ, "PYTHONPATH": kept},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith(str(installed)), done.stdout + done.stderr


@pytest.mark.parametrize("lost", PACKAGES)
def test_a_build_without_a_folder_fails(lost, tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for folder in {*PACKAGES} - {lost}:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / "part").mkdir()
        (tmp_path / folder / "part" / "__init__.py").touch()
    done = subprocess.run([sys.executable, "setup.py", "--name"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and f"error: {lost}/ holds no modules" in done.stderr
