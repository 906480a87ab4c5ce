"""Division of threads and CPUs among the ranks. Torch-free, except for `use_cpus`.

Without pinning, the system moves threads between cores as other programs come and go. A rank of one NUMA node then
reads its weights from the memory of another, and two threads of a rank may share a core while the rest wait.

A rank is pinned to a set of CPUs, one for each of its physical cores, and all its threads to the same set. A thread
bound to one CPU could not move away if the engine or the server needs that core.

Pages belong to the node of the thread that first writes to them. The pinned threads are the first to write the rank's
weights and KV memory, so these are in local memory.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.platform.processor import (
    Core,
    allowed_cpus,
    available_cores,
    fast_cores,
    format_cpu_list,
    is_present,
    parse_cpu_list,
    physical_cores,
    within_quota,
)

logger = logging.getLogger("oarlock.runner")

AUTO, NONE = "auto", "none"
_CAN_PIN = hasattr(os, "sched_setaffinity")  # not on macOS
# The OpenMP library binds threads itself if any of these is set.
_OF_OPENMP = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Threads and CPUs of all ranks."""

    threads: int  # threads of each rank
    cpus: tuple[tuple[int, ...], ...] = ()  # CPUs of each rank; empty if ranks are not pinned
    reason: str = ""  # why they are not pinned

    @property
    def affinity(self) -> str:
        """The CPUs of all ranks in the syntax of `--cpu-affinity`."""
        return "|".join(map(format_cpu_list, self.cpus)) or NONE


def plan_cpus(cores: Sequence[Core], ranks: int, num_threads: int | None = None, paid: int | None = None) -> CpuPlan:
    """Give each of `ranks` an equal share of a NUMA node's cores, and one thread per core unless `num_threads` is
    given.

    `cores`: the cores that this process may use. `paid`: how many of them a container's quota pays for; None: all.

    If that leaves no CPU free, not even the second thread of a core, the ranks of a node share all its cores instead.
    Other programs can only run on the ranks' CPUs, and a rank that is kept from its own CPU makes all others wait.
    """
    num_cpus = sum(len(core.cpus) for core in cores)
    cores = fast_cores(list(cores))
    paid = len(cores) if paid is None else paid
    shares = _shares(cores, ranks)
    most = min(map(len, shares))
    if paid < len(cores):
        reason = f"a CPU quota allows {paid} of {len(cores)} cores, which other programs use as well"
    elif most == 0:
        reason = f"{ranks} ranks share {len(cores)} cores"
    elif num_threads is not None and num_threads > most:
        reason = f"a rank has {num_threads} threads, and its share of one NUMA node is {most} cores"
    else:
        threads = num_threads or most
        if num_cpus <= ranks * threads:
            shares = [[core for core in cores if core.node == share[0].node] for share in shares]
        return CpuPlan(threads, tuple(tuple(core.cpus[0] for core in share) for share in shares))
    return CpuPlan(num_threads or max(1, paid // ranks), reason=reason)


def _shares(cores: Sequence[Core], ranks: int) -> list[list[Core]]:
    """Give each rank cores of one node. Ranks of one node follow each other and have equal shares."""
    left = Counter(core.node for core in cores)
    placed: Counter[int] = Counter()
    for _ in range(ranks):  # each rank goes to the node where its share will be largest
        placed[max(sorted(left), key=lambda node: left[node] / (placed[node] + 1))] += 1
    shares = []
    for node, count in sorted(placed.items()):
        own = [core for core in cores if core.node == node]
        size = len(own) // count
        shares += [own[size * position : size * (position + 1)] for position in range(count)]
    return shares


def check_affinity(config: WorkerConfig) -> None:
    """Check `--cpu-affinity`. Raises `StartupError` for CPUs that the ranks cannot be pinned to."""
    parts = cpus_of_ranks(config)
    if parts is None:
        return
    if not _CAN_PIN:
        raise StartupError("--cpu-affinity: this system cannot pin threads to CPUs.", "Leave --cpu-affinity out.")
    allowed = allowed_cpus()
    for cpu in sorted(set().union(*parts) - allowed):
        here = is_present(cpu)
        why = "this process may not use" if here else "this machine does not have"
        more = ", or allow it more (taskset, the cpuset of its container)" if here else ""
        raise StartupError(
            f"--cpu-affinity names CPU {cpu}, which {why}.", f"Choose among {format_cpu_list(allowed)}{more}."
        )
    fewest = min(map(len, parts))
    if config.num_threads is not None and config.num_threads > fewest:
        raise StartupError(
            f"--num-threads {config.num_threads} is more than the {fewest} CPU(s) that --cpu-affinity gives to a rank.",
            f"Use at most {fewest} threads, or name more CPUs.",
        )


def with_cpus(config: WorkerConfig, device: str) -> WorkerConfig:
    """Return `config` with threads and CPUs decided, for ranks on `device`. `config` has passed `check_affinity`."""
    ranks, parts = config.ranks_on_host, cpus_of_ranks(config)
    if parts is not None:
        return config.with_(num_threads=config.num_threads or min(map(len, parts)))
    bound = next((name for name in _OF_OPENMP if os.environ.get(name)), None)
    if config.cpu_affinity == NONE or device != "cpu" or not _CAN_PIN or bound is not None:
        plan = CpuPlan(config.num_threads or max(1, available_cores() // ranks))
        if bound is not None:
            plan = replace(plan, reason=f"{bound} is set")
    else:
        cores = physical_cores(allowed_cpus())
        plan = plan_cpus(cores, ranks, config.num_threads, within_quota(len(fast_cores(cores))))
    if plan.reason:
        logger.info("event=not_pinned reason=%r", plan.reason)
    return config.with_(num_threads=plan.threads, cpu_affinity=plan.affinity)


def cpus_of_ranks(config: WorkerConfig) -> list[set[int]] | None:
    """Return the CPUs that `cpu_affinity` lists for each rank of each replica; None for `auto` and `none`. Raises
    `StartupError` if the list is wrong."""
    text, ranks = config.cpu_affinity, config.ranks_on_host
    if text in (AUTO, NONE):
        return None
    try:
        parts = [parse_cpu_list(part) for part in text.split("|")]
    except ValueError:
        parts = []
    if not parts or not all(parts):
        raise StartupError(
            f"--cpu-affinity is {text[:80]!r}, which is not a list of CPUs.",
            "Give auto, none, or a list for each rank, such as 0-7 for one and 0-7|8-15 for two.",
        )
    if len(parts) != ranks:
        alone = config.data_parallel_size == 1
        other = f"or --tensor-parallel-size {len(parts)}" if alone else "the lists of a replica next to each other"
        raise StartupError(
            f"--cpu-affinity has {len(parts)} list(s) of CPUs, and there are {ranks} rank(s).",
            f"Give one list for each rank, with | between them, {other}.",
        )
    return parts


def ranks_share_cores(config: WorkerConfig) -> bool:
    """Return whether there are fewer cores than ranks, so that a waiting rank takes time from another."""
    parts = cpus_of_ranks(config)
    return config.ranks_on_host > (available_cores() if parts is None else len(set().union(*parts)))


def use_cpus(config: WorkerConfig, rank: int) -> None:
    """Pin the calling thread according to `config`, which is resolved, and set torch's number of threads. `rank`: index
    among the replica's ranks of this host.

    The threads that it starts afterwards inherit the pinning, including OpenMP's. Call this before the first torch
    operation that uses several threads.
    """
    import torch

    parts, position = cpus_of_ranks(config), config.first_on_host + rank
    if parts is not None:
        os.sched_setaffinity(0, parts[position])
    if config.device == "cpu" and config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    cpus = allowed_cpus() if parts is None else parts[position]
    nodes = format_cpu_list({core.node for core in physical_cores(cpus)})
    pinned = "false" if parts is None else "true"
    threads = torch.get_num_threads()
    logger.info(
        "event=cpu_affinity pinned=%s cpus=%s numa_nodes=%s threads=%d", pinned, format_cpu_list(cpus), nodes, threads
    )
