"""The process beside the first rank that looks after the directory: it tells what others have written, and makes room.

With many files each look takes long, and in the rank's own process it would hold up steps: Python runs one thread at a
time. Nothing is remembered of what the rank itself wrote, since several servers and people may change the directory: it
is looked at as it is.
"""

import argparse
import logging
import os
import select
import sys

from oarlock.workers.kv_offload import KVReportSender, Report
from oarlock.workers.kv_tiers.directory import BlockDirectory
from oarlock.workers.python_child import die_with_parent, leave_signals_to_parent

logger = logging.getLogger("oarlock.kv_offload")

MODULE = "oarlock.workers.kv_tiers.keeper"
LOG_FORMAT = "%(levelno)d %(message)s"  # of each line of the standard output, which the rank logs
_NICENESS = 10  # steps come first


def keep(files: BlockDirectory, reports: KVReportSender, wakes: int, look_s: float) -> None:
    """Look every `look_s` seconds, until `wakes` is closed. A byte that comes from there asks for room, if the limit is
    reached, and for a look at once."""
    asks_for_room = True
    while True:
        if asks_for_room:
            try:
                reports.usage(*files.make_room())
            except BrokenPipeError:
                raise
            except OSError as error:
                logger.warning("event=kv_offload_failed kind=room path=%r cause=%r", str(files.path), error.strerror)
        appeared, vanished = files.changes()
        reports.digests(Report.APPEARED, appeared)
        reports.digests(Report.VANISHED, vanished)
        is_awake = bool(select.select([wakes], [], [], look_s)[0])
        asked = os.read(wakes, 4096) if is_awake else b""
        if is_awake and not asked:
            return
        asks_for_room = bool(asked)


def main(argv: list[str]) -> int:
    """Runs the keeper's process, which `FileThreads.keep` starts."""
    parser = argparse.ArgumentParser(prog="python -m oarlock.workers.kv_tiers.keeper", allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--reports", type=int, required=True, help="descriptor of the ranks' pipe")
    parser.add_argument("--root", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--look-s", type=float, required=True)
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    leave_signals_to_parent()
    os.nice(_NICENESS)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format=LOG_FORMAT)
    try:
        files = BlockDirectory(arguments.root, arguments.key, arguments.rank, arguments.max_bytes)
        keep(files, KVReportSender(arguments.reports, arguments.rank), sys.stdin.fileno(), arguments.look_s)
    except BrokenPipeError:  # the engine has ended, and the ranks end with it
        return 0
    except OSError as error:
        logger.warning("event=kv_offload_failed kind=room path=%r cause=%r", arguments.root, error.strerror)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
