"""Python processes that import our packages, but nothing from the current directory, and that end with this process.

`python -m` puts the current directory first on the path, so a `json.py` or an `engine/` there would be imported in
place of ours; `-P` prevents it. The user's PYTHONPATH is kept, except for its empty entries, which mean the current
directory as well and mostly come from `PYTHONPATH=$PYTHONPATH:/more`.

Programs that print, including the command line itself, end silently if nobody reads their output any more, as in
`oarlock snippets | head -1`. Python ignores SIGPIPE, which ends other programs in this case, because it would also end
a server whose client leaves. Instead the next write raises `BrokenPipeError`, often only when the interpreter ends.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from oarlock.base.paths import library_caches

EXIT_UNREAD = 128 + signal.SIGPIPE  # a shell's exit code for a program that the signal ended
_PR_SET_PDEATHSIG = 1
# Variables that hold keys. No child gets them unless it needs one: many of them read files of clients or checkpoints.
HUB_SECRETS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
SECRETS = HUB_SECRETS | {"OARLOCK_API_KEY", "OARLOCK_ADMIN_API_KEY"}
_ROOT = Path(__file__).absolute().parents[2]  # the folder of the package, which a checkout links to this file


def start_python(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    stdin: int | None = subprocess.DEVNULL,
    output: int | None = None,
    environment: Mapping[str, str] | None = None,
    secrets: Collection[str] = (),
) -> subprocess.Popen[bytes]:
    """Start `python -P COMMAND` with this interpreter, e.g. ("-m", "oarlock.workers.runner.worker_process", ...).

    `environment`: additional variables. `secrets`: the variables of `SECRETS` that the process needs. `stdin` and
    `output`, which is stdout and stderr: as for `subprocess.Popen`; None shares ours.
    """
    return subprocess.Popen(
        python_command(command),
        pass_fds=pass_fds,
        stdin=stdin,
        stdout=output,
        stderr=output,
        env={
            **child_environment(secrets),
            **library_caches(os.environ),
            "PYTHONPATH": import_path(os.environ.get("PYTHONPATH", "")),
            **(environment or {}),
        },
    )


def child_environment(secrets: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of this process without the variables of `SECRETS`, except those in `secrets`."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS or name in secrets}


def python_command(command: Sequence[str]) -> list[str]:
    """Return the words that start `python -P COMMAND` with this interpreter."""
    return [sys.executable, "-P", *command]


def import_path(of_user: str) -> str:
    """Return the PYTHONPATH of the new process, from the user's."""
    return os.pathsep.join([str(_ROOT), *filter(None, of_user.split(os.pathsep))])


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send signal `number` to this process when its parent ends. Linux only.

    The signal also comes when the *thread* that started this process ends: that thread must stay alive.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignore Ctrl-C, which a terminal sends to all its processes, and SIGTERM, which a service manager or torchrun
    sends. The parent decides which processes end, and in which order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def run_while_read(main: Callable[[], int]) -> int:
    """Run `main`, and write all its output. Returns its exit code, or `EXIT_UNREAD` if a write failed because the
    reader of standard output or standard error has left. Other exceptions are passed on."""
    try:
        try:
            return main()
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
    except BrokenPipeError:
        unread = [number for number in (1, 2) if _is_unread(number)]
        if not unread:  # another pipe or socket of the program
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in unread:  # the interpreter flushes its buffers when it ends
            os.dup2(nowhere, number)
        return EXIT_UNREAD


def _is_unread(descriptor: int) -> bool:
    """Return whether `descriptor` is a pipe or a socket whose other end is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
