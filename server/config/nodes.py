"""Options with which this host finds the other hosts that serve the same model, checked together.

The options may come from the launcher that starts a process on each host: torchrun and LeaderWorkerSet set variables,
Ray is named by a flag. torchrun sets its variables for every process that it starts (torch.distributed.run,
"Environment Variables"). Kubernetes' LeaderWorkerSet sets `LWS_*` in every container of a group. One process starts all
ranks of a host. If torchrun starts several processes on a host (`--nproc-per-node`), the others wait for the first.
This module does not touch the network.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.server.config.option_groups import RAY
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import Settings
from oarlock.workers.config import NodesConfig

TORCHRUN, LEADER_WORKER_SET = "torchrun", "LeaderWorkerSet"
# MASTER_ADDR by itself may belong to another program.
_MARKS = ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "GROUP_WORLD_SIZE")
# Oarlock's options, and the variables that they are read from.
_FROM_TORCHRUN = {
    "nnodes": "GROUP_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
_FROM_LWS = {"nnodes": "LWS_GROUP_SIZE", "node_rank": "LWS_WORKER_INDEX", "master_addr": "LWS_LEADER_ADDRESS"}
_FLAGS = "--nnodes, --node-rank, --master-addr and --master-port"


def launched(environment: Mapping[str, str], given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Find the launcher that started this process, and its values for the options that are not `given`.

    Ray, which is named by a flag, is checked first, then torchrun. Raises `OptionError` if variables are missing or
    invalid.
    """
    if given.get("distributed_executor_backend") == RAY:
        return RAY, {} if "nnodes" in given else {"nnodes": given.get("pipeline_parallel_size", 1)}
    if is_torchrun(environment):
        return TORCHRUN, _values(TORCHRUN, _FROM_TORCHRUN, environment, given)
    if any(environment.get(name) for name in _FROM_LWS.values()):
        return LEADER_WORKER_SET, _values(LEADER_WORKER_SET, _FROM_LWS, environment, given)
    return "", {}


def _values(program: str, names: Mapping[str, str], environment: Mapping[str, str], given: Mapping[str, Any]) -> dict:
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
            f"{name}, a variable of {program}, is {text[:80]!r}, but it must be an integer.",
            f"Start with {program}, unset its variables, or give {_FLAGS}.",
        )
    return int(text)


def is_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun started this process."""
    return any(environment.get(name) for name in _MARKS)


def launcher_store(environment: Mapping[str, str], address: str, port: int) -> str | None:
    """Return a prefix for Oarlock's keys in torchrun's store, unique to this attempt. Return None if torchrun keeps no
    store at that address.
    """
    where = environment.get("MASTER_ADDR", "").strip(), environment.get("MASTER_PORT", "").strip()
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or where != (address, str(port)):
        return None
    return f"{environment.get('TORCHELASTIC_RUN_ID', '')}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def first_on_host(environment: Mapping[str, str], num_ranks: int) -> bool:
    """Return whether this process is the one that serves, among the processes that torchrun starts on this host.

    `num_ranks`: ranks of the whole group. Raises `OptionError` unless torchrun starts 1 process per host, or 1 per
    rank.
    """
    if not is_torchrun(environment):
        return True
    on_host, everywhere = (environment.get(name, "1").strip() for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if on_host != "1" and everywhere != str(num_ranks):
        raise OptionError(
            f"torchrun starts {everywhere[:20]} processes, but --tensor-parallel-size times --pipeline-parallel-size "
            f"is {num_ranks}.",
            "Use torchrun --nproc-per-node 1, or as many processes as there are ranks.",
        )
    return environment.get("LOCAL_RANK", "0").strip() == "0"


def nodes_config(settings: Settings, environment: Mapping[str, str]) -> NodesConfig | None:
    """Return the configuration of the hosts, or None if this host serves by itself or Ray finds the others.

    Raises `StartupError`.
    """
    nnodes, rank = settings.nnodes, settings.node_rank
    if settings.distributed_executor_backend == RAY:
        _check_ray(settings)
        return None
    if nnodes == 1 and not rank:
        return None
    if nnodes == 1:
        raise StartupError(f"--node-rank is {rank}, but --nnodes is 1.", "Give every host the same --nnodes.")
    if settings.data_parallel_size > 1:
        raise StartupError(
            f"--data-parallel-size {settings.data_parallel_size} with --nnodes {nnodes}: replicas share one host.",
            "Start one server for each group of hosts, without --data-parallel-size, behind a proxy.",
        )
    if rank is None:
        raise StartupError(
            f"--nnodes is {nnodes}, but the rank of this host is not known.",
            f"Give each host its own --node-rank, from 0 to {nnodes - 1}; the host with 0 serves HTTP.",
        )
    if rank >= nnodes:
        raise StartupError(
            f"--node-rank is {rank}, but with {nnodes} hosts it is at most {nnodes - 1}.",
            f"Give each host its own --node-rank from 0 to {nnodes - 1}, or raise --nnodes.",
        )
    if settings.master_addr is None:
        raise StartupError(
            f"--nnodes is {nnodes}, but the address of the head node is not known.",
            "Give --master-addr the name or address of the host with --node-rank 0, the same on every host.",
        )
    return NodesConfig(
        node_rank=rank,
        nnodes=nnodes,
        address=settings.master_addr,
        port=settings.master_port,
        interface=settings.node_interface,
        timeout_s=settings.node_timeout,
        launcher_store=launcher_store(environment, settings.master_addr, settings.master_port),
    )


def ray_resources(settings: Settings) -> dict[str, float]:
    """Return the resources that Ray reserves on each host: a GPU for each rank, or the cores of its threads."""
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size // settings.nnodes
    if settings.device == "cpu":
        return {"CPU": float(ranks * (settings.num_threads or 1))}
    return {"CPU": float(ranks), "GPU": float(ranks)}


def _check_ray(settings: Settings) -> None:
    flag, ranks = "--distributed-executor-backend ray", settings.tensor_parallel_size * settings.pipeline_parallel_size
    given = [
        f"--{name}" for name in ("node-rank", "master-addr") if getattr(settings, name.replace("-", "_")) is not None
    ]
    if given:
        raise StartupError(
            f"{given[0]} is given together with {flag}, which numbers and finds the hosts itself.",
            f"Leave {given[0]} out, and start the command on one host only.",
        )
    if settings.data_parallel_size > 1:
        raise StartupError(
            f"--data-parallel-size {settings.data_parallel_size} is given together with {flag}: replicas "
            "share one host.",
            "Let Ray Serve start the replicas (docs/replicas.md).",
        )
    if settings.device == "auto":
        raise StartupError(
            f"{flag} needs to know the device: it reserves the resources of each rank.",
            "Add --device cuda or --device cpu.",
        )
    if ranks % settings.nnodes:
        raise StartupError(
            f"{ranks} ranks cannot be distributed evenly over {settings.nnodes} hosts.",
            "Choose an --nnodes that divides --tensor-parallel-size times --pipeline-parallel-size.",
        )
    if importlib.util.find_spec("ray") is None:
        raise StartupError(
            f"{flag} needs the Python package ray, which is missing.",
            "Run: pip install 'oarlock[ray]' (in a checkout: pip install --editable '.[ray]')",
        )
