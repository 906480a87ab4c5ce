"""How every Python process of ours is started: our packages are importable in it, and the caller's folder is not.

`python -m` puts the current directory first on the path, so a `json.py` or an `engine/` that lies where the user stands
would run in our place. `-P` keeps it out. The user's own PYTHONPATH is respected, except for its empty entries, which
mean the current directory as well and mostly come from `PYTHONPATH=$PYTHONPATH:/more`.

Torch-free; knows nothing of what the processes do.
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
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """`python -P COMMAND` of this very interpreter, e.g. ("-m", "workers.worker.worker_process", ...).

    `environment`: added to ours. `stdin`: as for `subprocess.Popen`; None shares ours.
    """
    return subprocess.Popen(
        [sys.executable, "-P", *command],
        pass_fds=pass_fds,
        stdin=stdin,
        env={**os.environ, "PYTHONPATH": import_path(os.environ.get("PYTHONPATH", "")), **(environment or {})},
    )


def import_path(of_user: str) -> str:
    """The PYTHONPATH of a process of ours, from the one that the user has set."""
    return os.pathsep.join([str(_ROOT), *filter(None, of_user.split(os.pathsep))])
