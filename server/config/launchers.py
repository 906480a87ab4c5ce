"""What programs that start one process on each of several hosts say in the environment: torchrun, LeaderWorkerSet.

torchrun sets its variables for every process that it starts (torch.distributed.run, "Environment Variables");
Kubernetes' LeaderWorkerSet sets `LWS_*` in every container of a group. Knows neither our own variables nor the network.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from server.config.options import OptionError

TORCHRUN, LEADER_WORKER_SET = "torchrun", "LeaderWorkerSet"
_MARKS = ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "GROUP_WORLD_SIZE")  # MASTER_ADDR alone may be of another program
# Our options, and the variables that they follow from.
_FROM_TORCHRUN = {
    "nnodes": "GROUP_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
_FROM_LWS = {"nnodes": "LWS_GROUP_SIZE", "node_rank": "LWS_WORKER_INDEX", "master_addr": "LWS_LEADER_ADDRESS"}
_FLAGS = "--nnodes, --node-rank, --master-addr and --master-port"


def launched(environment: Mapping[str, str], given: Container[str]) -> tuple[str, dict[str, Any]]:
    """(the program that started this process, what it says of the options that are not `given`).

    torchrun comes first where both are there. Raises `OptionError` when its variables cannot be followed.
    """
    if any(environment.get(name) for name in _MARKS):
        _check_one_process_per_node(environment)
        values = _values(TORCHRUN, _FROM_TORCHRUN, environment, given)
        if "master_port" in values:
            values["master_port"] += 1  # torchrun itself listens on its MASTER_PORT
        return TORCHRUN, values
    if any(environment.get(name) for name in _FROM_LWS.values()):
        return LEADER_WORKER_SET, _values(LEADER_WORKER_SET, _FROM_LWS, environment, given)
    return "", {}


def _values(program: str, names: Mapping[str, str], environment: Mapping[str, str], given: Container[str]) -> dict:
    wanted = {option: name for option, name in names.items() if option not in given}
    missing = [name for name in wanted.values() if not environment.get(name, "").strip()]
    if missing:
        there = [name for name in names.values() if name not in missing and environment.get(name)]
        raise OptionError(
            f"The environment has {', '.join(there) or _MARKS[0]} of {program}, but not {' and '.join(missing)}.",
            f"Start with {program}, unset its variables, or give {_FLAGS}.",
        )
    return {
        option: environment[name].strip() if option == "master_addr" else _number(program, name, environment[name])
        for option, name in wanted.items()
    }


def _number(program: str, name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise OptionError(
            f"{name}, a variable of {program}, is {text[:80]!r}, but it must be a whole number.",
            f"Start with {program}, unset its variables, or give {_FLAGS}.",
        )
    return int(text)


def _check_one_process_per_node(environment: Mapping[str, str]) -> None:
    count = environment.get("LOCAL_WORLD_SIZE", "1").strip()
    if count != "1":
        raise OptionError(
            f"torchrun starts {count[:20]} processes on this host, but one starts all ranks of a host.",
            "Use torchrun --nproc-per-node 1, and give the number of ranks of all hosts by --tensor-parallel-size.",
        )
