"""The environment of Ray, which is not the server's own. Made once, and kept while its pins stay the same.

The application is in it as `pip install --editable ./integrations/ray` would put it there.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from oarlock.base.paths import cache_home
from tests.clients.environments import bare_python

PINS = Path(__file__).with_name("pins.txt")
APPLICATION = Path(__file__).resolve().parents[2] / "integrations" / "ray"
DIRECTORY = cache_home() / "oarlock" / "ray"


def prepare() -> Path:
    """The interpreter of the environment; installs exactly the pins where they have changed."""
    python = DIRECTORY / "bin" / "python"
    stamp = DIRECTORY / "made-from"
    packages = DIRECTORY / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if packages.is_dir():
        (packages / "oarlock_ray.pth").write_text(f"{APPLICATION}\n")
    wanted = f"{sys.version}\n{hashlib.sha256(PINS.read_bytes()).hexdigest()}\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"==> installing Ray into {DIRECTORY}", flush=True)
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    bare_python(DIRECTORY)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
    subprocess.run([*pip, "-r", PINS], check=True)
    (packages / "oarlock_ray.pth").write_text(f"{APPLICATION}\n")
    stamp.write_text(wanted)
    return python
