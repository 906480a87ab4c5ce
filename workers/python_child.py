"""Starts Python processes that can import our packages, but nothing from the current directory. Torch-free.

`python -m` puts the current directory first on the path, so a `json.py` or an `engine/` there would be imported in
place of ours; `-P` prevents it. The user's PYTHONPATH is kept, except for its empty entries, which mean the current
directory as well and mostly come from `PYTHONPATH=$PYTHONPATH:/more`.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def start_python(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    stdin: int | None = subprocess.DEVNULL,
    output: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -P COMMAND` with this interpreter, e.g. ("-m", "workers.worker.worker_process", ...).

    `environment`: added to ours. `stdin` and `output`, which is stdout and stderr: as for `subprocess.Popen`; None
    shares ours.
    """
    return subprocess.Popen(
        [sys.executable, "-P", *command],
        pass_fds=pass_fds,
        stdin=stdin,
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": import_path(os.environ.get("PYTHONPATH", "")), **(environment or {})},
    )


def import_path(of_user: str) -> str:
    """The PYTHONPATH of the new process, from the user's."""
    return os.pathsep.join([str(_ROOT), *filter(None, of_user.split(os.pathsep))])
