"""Table of faults while two hosts serve one model: how each is made, how each host ends, and which cause they name.

`test_faults.py` does the rows to a real group while an answer is under way, two of them when it is asked to;
`docs/scaling.md` shows the table.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from oarlock.base.errors import EXIT_RANK_DIED, EXIT_RANK_HUNG
from tests.multihost.group import Group
from tests.multihost.hosts import INTERFACE

KILLED: Final = -signal.SIGKILL
WITHIN_S: Final = 40.0  # at most, from the fault to the end of every process on both hosts
STEP_TIMEOUT_S: Final = 60.0  # so that nothing but what watches the link ends a group


@dataclass(frozen=True)
class Fault:
    """`head` and `node`: the exit statuses that are right there. `cause`: a regular expression for the first cause, in
    the logs of the hosts `says`. `shown` is an example of it, `advice` for the operator."""

    what: str
    do: Callable[[Group], object]
    cause: str
    shown: str
    advice: str
    head: tuple[int, ...] = (EXIT_RANK_DIED,)
    node: tuple[int, ...] = (EXIT_RANK_DIED,)
    says: tuple[str, ...] = ("head", "node1")
    step_timeout_s: float = STEP_TIMEOUT_S
    goes_on: Callable[[Group], object] | None = None  # for what was stopped: it ends as soon as it goes on
    answers_first: bool = False  # whether two hosts first answer as one


def _pull(group: Group) -> None:
    """The node's interface goes down, which the node itself sees and the head does not."""
    with group.hosts.node.inside():
        subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)


def _power_off(group: Group) -> None:
    """Nothing of the node answers any more, not even its kernel."""
    group.hosts.cut()
    for process in group.node.processes():
        process.kill()


_ITS_LOG = "Read that host's log, and `dmesg` for a kill by lack of memory."
_NETWORK = "Check cable, switch and interface of the hosts named."

FAULTS = (
    Fault(
        "a rank on a node is killed",
        lambda group: group.node.ranks()[0].kill(),
        cause=r"rank 1\b.*(SIGKILL|signal 9)",
        shown="rank 1 failed at step 6: killed by signal 9 (on node 1 (box2, 10.0.0.2))",
        advice=_ITS_LOG,
        answers_first=True,
    ),
    Fault(
        "a rank on the head is killed",
        lambda group: group.head.ranks()[0].kill(),
        cause=r"rank 0\b.*(SIGKILL|signal 9)",
        shown="rank 0 failed at step 5: killed by signal 9",
        advice=_ITS_LOG,
    ),
    Fault(
        "the process of a node is killed",
        lambda group: group.node.main().kill(),
        node=(KILLED,),
        cause=r"node 1\b",
        shown="rank 1 failed at step 4: node 1 (box2, 10.0.0.2) has closed the connection",
        says=("head",),
        advice=_ITS_LOG,
    ),
    Fault(
        "the head's engine is killed",
        lambda group: group.head.engine().kill(),
        cause=r"node 0\b",
        shown="node 0 (box1, 10.0.0.1) has closed the connection",
        says=("node1",),
        advice=_ITS_LOG,
    ),
    Fault(
        "the head's frontend is killed",
        lambda group: group.head.main().kill(),
        head=(KILLED,),
        cause=r"node 0\b",
        shown="node 0 (box1, 10.0.0.1) has closed the connection",
        says=("node1",),
        advice=_ITS_LOG,
    ),
    Fault(
        "a rank on a node hangs",
        lambda group: group.node.ranks()[0].suspend(),
        head=(EXIT_RANK_HUNG,),
        node=(EXIT_RANK_HUNG,),
        # A rank that was stopped inside an all-reduce is at the same collective as the rank that waits for it.
        cause=r"rank 1\b.*no output|all ranks without output are at collective",
        shown="rank 1 failed at step 4: no output within 120 s",
        step_timeout_s=3.0,
        advice="The log has the stacks of the ranks; if the step was only slow, raise `--step-timeout`.",
    ),
    Fault(
        "the process of a node is stopped",
        lambda group: group.node.main().suspend(),
        node=(EXIT_RANK_DIED, EXIT_RANK_HUNG),
        cause=r"node 1\b",
        shown="node 1 (box2, 10.0.0.2) has sent nothing for 5 s",
        says=("head",),
        goes_on=lambda group: group.node.main().resume(),
        advice="It was stopped, or its host lacked memory or processor time.",
    ),
    Fault(
        "the head's engine is stopped",
        lambda group: group.head.engine().suspend(),
        head=(EXIT_RANK_HUNG,),
        node=(EXIT_RANK_DIED, EXIT_RANK_HUNG),
        cause=r"node 0\b",
        shown="node 0 (box1, 10.0.0.1) has closed the connection",
        step_timeout_s=3.0,
        says=("node1",),
        advice="As above; the head waits `--step-timeout` for it.",
    ),
    Fault(
        "the network between the hosts is cut",
        lambda group: group.hosts.cut(),
        cause=r"node [01]\b.*\d s",
        shown="node 1 (box2, 10.0.0.2) has sent nothing for 5 s",
        advice=_NETWORK,
    ),
    Fault(
        "messages to the node are lost, messages to the head arrive",
        lambda group: group.hosts.cut("to_node"),
        cause=r"node [01]\b",
        shown="node 1 (box2, 10.0.0.2) has sent nothing for 5 s",
        advice=_NETWORK,
    ),
    Fault(
        "messages to the head are lost, messages to the node arrive",
        lambda group: group.hosts.cut("to_head"),
        cause=r"node [01]\b",
        shown="node 1 (box2, 10.0.0.2) has sent nothing for 5 s",
        advice=_NETWORK,
    ),
    Fault(
        "the node's interface goes down",
        _pull,
        cause=r"node [01]\b",
        shown="node 1 (box2, 10.0.0.2) has sent nothing for 5 s",
        advice=_NETWORK,
    ),
    Fault(
        "a node loses its power",
        _power_off,
        node=(KILLED,),
        cause=r"node 1\b.*\d s",
        shown="node 1 (box2, 10.0.0.2) has sent nothing for 5 s",
        says=("head",),
        advice="Start all hosts again when it is back.",
    ),
)


def table() -> str:
    """Format the table for readers: the fault, the end of each host, the logged cause, the advice."""
    lines = [
        "| fault | status of head, node | cause in the log, for example | remedy |",
        "|---|---|---|---|",
    ]
    grouped: dict[str, list[Fault]] = {}  # what looks alike is one row
    for row in FAULTS:
        where = "" if len(row.says) == 2 else " (the head's log)" if row.says == ("head",) else " (the node's log)"
        grouped.setdefault(f"`{row.shown}`{where} | {row.advice} |", []).append(row)
    for rest, rows in grouped.items():
        statuses = ", ".join(map(_statuses, ([row.head for row in rows], [row.node for row in rows])))
        lines.append(f"| {'; '.join(row.what for row in rows)} | {statuses} | {rest}")
    return "\n".join(lines)


def _statuses(found: list[tuple[int, ...]]) -> str:
    return " or ".join(
        dict.fromkeys("killed" if number == KILLED else str(number) for each in found for number in each)
    )
