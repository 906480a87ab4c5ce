"""Name the folders of the packages for a build.

A folder of the sources such as `server/` is a package such as `oarlock.server` of an installation. A checkout imports
it through a symbolic link in `oarlock/`. GitHub's zip and a checkout without symbolic links, the default on Windows,
have small text files there, so a build must not depend on the links.
"""

import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup

FOLDERS = ("server", "engine", "workers", "base")
HERE = Path(__file__).parent


def packages() -> list[str]:
    """Return the name of every package. Raises `SystemExit` if a folder has none."""
    found = ["oarlock"]
    for folder in FOLDERS:
        if not (HERE / folder / "__init__.py").is_file() or len(list((HERE / folder).rglob("*.py"))) < 2:
            raise SystemExit(f"error: {folder}/ holds no modules\nfix: build from the whole source tree")
        inside = find_namespace_packages(str(HERE / folder), exclude=["*.__pycache__", "__pycache__"])
        found += [f"oarlock.{folder}", *(f"oarlock.{folder}.{name}" for name in inside)]
    return found


# An editable install of a checkout that has the links is one entry of the import path. Without the links, setuptools
# writes an import hook with the table of folders.
HAS_LINKS = all((HERE / "oarlock" / folder).is_dir() for folder in FOLDERS)
IS_EDITABLE = "editable_wheel" in sys.argv
setup(
    packages=packages(),
    package_dir={"": "."} if HAS_LINKS and IS_EDITABLE else {f"oarlock.{folder}": folder for folder in FOLDERS},
)
