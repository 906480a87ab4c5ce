"""The executor for ranks in processes, on this host and possibly others: it loads them, and runs steps on them.

Merges the reports of all ranks into one for the engine, and adapts the limits of a step to measured costs. Torch-free.
"""

import logging
import math
import select
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from oarlock.base.errors import StartupError
from oarlock.workers.config import (
    LOADING_TIMEOUT_S,
    NO_ATTENTION,
    GroupInfo,
    OnProgress,
    StepCost,
    WorkerConfig,
    WorkerInfo,
)
from oarlock.workers.distributed.shm_layout import last_of
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.errors import WorkerError
from oarlock.workers.kv_offload import KVOffloadInfo
from oarlock.workers.platform.processor import available_cores
from oarlock.workers.protocol import StepMetadata, StepOutput, empty_step, pack_step, unpack_output, unpack_step
from oarlock.workers.ranks.host_ranks import HostRanks, RankProgress

HUNG = 6  # exit code

# Phases in the order in which every rank passes them. A rank's message has one as its kind or as its name.
PHASES = ("starting", "joining", "loading", "loaded", "allocating", "timing", "ready")
_DOING = {
    "starting": "importing its libraries",
    "joining": "waiting for the other ranks to join",
    "loading": "reading the weights",
    "loaded": "waiting for the other ranks",
    "allocating": "allocating KV memory and running trial steps",
    "timing": "timing a few steps",
    "ready": "waiting for the other ranks",
}


class LoadProgress:
    """The state of all ranks, updated by `handle`."""

    def __init__(self, size: int) -> None:
        self._phases = ["starting"] * size
        self._fractions = [0.0] * size
        self._blocks: dict[int, list[int]] = {}
        self.infos: dict[int, WorkerInfo] = {}

    def handle(self, rank: int, message: dict) -> None:
        """Handle a message of a loading rank. Raises `StartupError` if the rank has failed or ended."""
        kind = message["kind"]
        if kind == "failed":
            raise StartupError(message["cause"], message["fix"], int(message["exit_code"]))
        if kind == "ended":
            raise StartupError(
                f"rank {rank} ended while loading ({message['cause']}).",
                "If it was killed, the machine ran out of memory: use a smaller model or more ranks.",
                4,
            )
        if kind == "phase":
            self._phases[rank] = message["name"]
        elif kind == "progress":
            self._fractions[rank] = float(message["fraction"])
        elif kind == "loaded":
            self._phases[rank] = kind
            self._blocks[rank] = [int(count) for count in message["num_blocks"]]
        elif kind == "ready":
            self._phases[rank] = kind
            self.infos[rank] = WorkerInfo.from_json(message["info"])

    @property
    def fraction(self) -> float:
        """The fraction of its weights that the slowest rank has read, 0 to 1."""
        return min(self._fractions)

    @property
    def num_blocks(self) -> list[int] | None:
        """The smallest numbers of KV blocks and slots of each group that any rank has memory for; None until all have
        reported."""
        if len(self._blocks) < len(self._phases):
            return None
        return [min(counts) for counts in zip(*self._blocks.values(), strict=True)]

    @property
    def is_done(self) -> bool:
        return len(self.infos) == len(self._phases)

    def no_progress_error(self, collectives: Sequence[int], timeout_s: float) -> StartupError:
        """Return the error after `timeout_s` without a message. `collectives`: the latest collective of each rank."""
        phases = [PHASES.index(phase) for phase in self._phases]
        last = last_of(phases, collectives)
        rank = phases.index(min(phases)) if last is None else last
        phase = self._phases[rank]
        share = f" ({self._fractions[rank]:.0%} read)" if phase == "loading" else ""
        others = "" if last is not None else "; other ranks are at the same point"
        return StartupError(
            f"rank {rank} has made no progress for {timeout_s:g} s while {_DOING[phase]}{share}{others}.",
            "If the model or Python's packages are on a network file system, check that it responds; then start again.",
            HUNG,
        )


def joint_info(infos: Mapping[int, WorkerInfo]) -> WorkerInfo:
    """Merge reports, by rank. Bytes and seconds are the maximum over all ranks. The result is invariant only if every
    rank is; otherwise it has the reason of the first rank that is not."""
    joint = infos[0]
    everyone = [info for _, info in sorted(infos.items())]
    for rank, info in enumerate(everyone):
        if joint.batch_invariant and not info.batch_invariant:
            reason = f"rank {rank}: {info.batch_invariant_reason}"
            joint = replace(joint, batch_invariant=False, batch_invariant_reason=reason)
        if joint.rank_invariant and not info.rank_invariant:
            reason = f"rank {rank}: {info.rank_invariant_reason}"
            joint = replace(joint, rank_invariant=False, rank_invariant_reason=reason)
    return replace(
        joint,
        num_blocks=min(info.num_blocks for info in everyone),
        groups=_joint_groups([info.groups for info in everyone]),
        attention_backend=_joint_names([info.attention_backend for info in everyone]),
        weight_bytes_per_rank=max(info.weight_bytes_per_rank for info in everyone),
        kv_bytes_per_token_per_rank=max(info.kv_bytes_per_token_per_rank for info in everyone),
        load_seconds=max(info.load_seconds for info in everyone),
        kv_offload=_smallest([info.kv_offload for info in everyone]),
        step_cost=_through_all([info.step_cost for info in everyone[:: joint.tensor_parallel_size]]),
    )


def _joint_groups(of_ranks: Sequence[tuple[GroupInfo, ...]]) -> tuple[GroupInfo, ...]:
    """Return the groups with the blocks that every rank has, and the bytes of the rank with the most."""
    return tuple(
        replace(
            groups[0],
            num_blocks=min(group.num_blocks for group in groups),
            bytes_per_block=max(group.bytes_per_block for group in groups),
        )
        for groups in zip(*of_ranks, strict=True)
    )


def _joint_names(backends: Sequence[str]) -> str:
    """Return the names of all attention backends. Stages without attention report `NO_ATTENTION`."""
    names = dict.fromkeys(name for names in backends for name in names.split(", ") if name != NO_ATTENTION)
    return ", ".join(names) or NO_ATTENTION


def _smallest(tiers: Sequence[KVOffloadInfo | None]) -> KVOffloadInfo | None:
    """Return the tier with the slots that every rank has, and the speed of the slowest rank per block."""
    known = [tier for tier in tiers if tier is not None]
    if not known:
        return None
    speeds = [tier.read_bytes_per_s / tier.bytes_per_block for tier in known if tier.read_bytes_per_s is not None]
    speed = min(speeds) * known[0].bytes_per_block if speeds else None
    return replace(known[0], num_slots=min(tier.num_slots for tier in known), read_bytes_per_s=speed)


def _through_all(costs: Sequence[StepCost | None]) -> StepCost | None:
    """Return the cost of a step that passes through stages with these costs. The last stage computes the logits."""
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return None
    return StepCost(
        fixed_s=sum(cost.fixed_s for cost in known),
        token_s=sum(cost.token_s for cost in known),
        context_s=sum(cost.context_s for cost in known),
        logits_s=known[-1].logits_s,
        experts_s=sum(cost.experts_s for cost in known),
        expert_share=max(cost.expert_share for cost in known),
    )


FEWEST_TOKENS = 64  # minimum tokens of a step; with fewer, reading the weights takes most of the time
PATIENCE = 4.0  # factor of the worst step, so that load on the machine does not look like a hung rank


def step_tokens(config: WorkerConfig, cost: StepCost) -> int:
    """Return the number of tokens of the largest step."""
    tokens = config.max_num_batched_tokens
    if not config.lower_step_size:
        return tokens
    return min(tokens, cost.largest_step(max(FEWEST_TOKENS, config.max_num_seqs), tokens))


def adapted(config: WorkerConfig, cost: StepCost) -> WorkerConfig:
    """Return `config` with the limits that it leaves to the measurement. Logs them, and warns if the operator's step
    timeout is shorter than a legitimate step."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    tokens = step_tokens(config, cost)
    worst = cost.worst_step_s(tokens, config.max_model_len)
    timeout = config.step_timeout_s
    if config.raise_step_timeout:
        timeout = max(timeout, float(math.ceil(PATIENCE * worst)))
    logger.info(
        "event=step_limits max_num_batched_tokens=%d%s step_timeout_s=%g%s usual_step_s=%.3g worst_step_s=%.3g",
        tokens,
        " (measured)" if tokens < config.max_num_batched_tokens else "",
        timeout,
        " (measured)" if timeout > config.step_timeout_s else "",
        cost.seconds(tokens, context=tokens // 2),
        worst,
    )
    if worst > timeout:
        logger.warning(
            'event=step_timeout_too_short step_timeout_s=%g worst_step_s=%.3g fix="%s"',
            timeout,
            worst,
            "leave --step-timeout out, raise it, or lower --max-num-batched-tokens",
        )
    return config.with_(max_num_batched_tokens=tokens, step_timeout_s=timeout)


logger = logging.getLogger("oarlock.executor")


class MultiprocExecutor:
    """Executor that owns `ranks`. The constructor loads them. If a rank cannot load, it cleans up and raises
    `StartupError`."""

    def __init__(
        self,
        config: WorkerConfig,
        ranks: HostRanks,
        on_progress: OnProgress,
        *,
        loading_timeout_s: float = LOADING_TIMEOUT_S,
    ) -> None:
        """Load the ranks. `ranks`: started with `config`. `loading_timeout_s`: the longest time without a message."""
        self.config = config
        self.max_in_flight = max(2, config.pipeline_parallel_size)  # fewer than a ring has slots
        self._ranks = ranks
        self.kv_reports = ranks.kv_reports
        self._loading_timeout_s = loading_timeout_s
        self._step_id = 0
        self._failure: Exception | None = None
        self._num_timed = len(ranks.numbers)  # ranks of this host, the first ranks of the group
        try:
            self.info = self._load(on_progress)
            if self.info.step_cost is not None:
                self.config = adapted(config, self.info.step_cost)
            assert ranks.outputs is not None, "answers come to the host of the engine"
            self._steps, self._outputs = ranks.steps, ranks.outputs
            # Descriptors that become readable with an output, or when a rank has ended or raised an error.
            self._awaited = [ranks.outputs.wake_fd, *ranks.filenos]
        except BaseException as error:
            self._ranks.close(error if isinstance(error, Exception) else None)
            raise
        logger.info("event=ranks_ready size=%d pids=%s", len(self.rank_pids), ",".join(map(str, self.rank_pids)))

    @property
    def best_in_flight(self) -> int:
        """One step for each pipeline stage. With one stage, 2 if the engine has a core to schedule on while the ranks
        compute. Otherwise scheduling would take a core from a rank that the others wait for, and nothing would be
        gained."""
        config = self.config
        if config.pipeline_parallel_size > 1:
            return config.pipeline_parallel_size
        leaves_core = config.device == "cuda" or available_cores() > config.ranks_on_host * (config.num_threads or 1)
        return self.max_in_flight if leaves_core else 1

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return self._ranks.pids

    @property
    def step_times_ns(self) -> Sequence[int]:
        return self._steps.durations()[: self._num_timed]

    def _load(self, on_progress: OnProgress) -> WorkerInfo:
        """Follow all ranks through loading. They agree on the smallest number of blocks that any of them has memory
        for."""
        loading = LoadProgress(self.config.ranks_per_node * self.config.nnodes)
        while not loading.is_done:
            messages = self._ranks.messages(self._loading_timeout_s)
            if not messages:
                self._ranks.log_stacks()
                collectives = [rank.collective for rank in self._ranks.progress()]
                raise loading.no_progress_error(collectives, self._loading_timeout_s)
            for rank, message in messages:
                loading.handle(rank, message)
                if message["kind"] == "progress":
                    on_progress("loading", loading.fraction)
                elif message["kind"] == "loaded" and loading.num_blocks is not None:
                    self._ranks.send_to_all("allocate", num_blocks=loading.num_blocks)
        return joint_info(loading.infos)

    # -- steps

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        self._step_id = step.step_id
        pack_step(step, self._steps.next_slot(), without_masks=masks_follow)
        try:
            self._steps.publish(rest_follows=masks_follow)
        except ChannelClosedError:
            self._fail()

    def send_masks(self, bits: np.ndarray) -> None:
        try:
            with self._steps.send_rest() as slot:
                unpack_step(slot).mask_bits[:] = bits
        except ChannelClosedError:
            self._fail()

    def collect(self) -> StepOutput:
        ready = select.select(self._awaited, (), (), self.config.step_timeout_s)[0]
        if not ready:
            self._fail_hung()
        if ready[0] != self._outputs.wake_fd:  # a rank or a node has sent a message, or has ended
            self._fail()
        try:
            output = unpack_output(self._outputs.receive())
        except ChannelClosedError:
            self._fail()
        self._outputs.finish()
        return output

    def ping(self) -> None:
        self.submit(empty_step(self._step_id))
        self.collect()
        try:
            if not self._ranks.wait_until_finished(self.config.step_timeout_s):
                self._fail_hung()
        except ChannelClosedError:
            self._fail()

    def fileno_for_death(self) -> list[int]:
        return self._ranks.filenos

    # -- end

    def _fail(self) -> NoReturn:
        """Raise the first cause, after a rank has ended or raised an error."""
        self._failure = self._ranks.failure(self._step_id)
        raise self._failure from None

    def _fail_hung(self) -> NoReturn:
        """Raise that no output came in time, and name the rank that is behind: the others wait for it in a
        collective."""
        progress = self._ranks.progress()
        stage = first_stage_behind(progress, self.config.tensor_parallel_size)
        last = last_of(*zip(*progress[stage.start : stage.stop], strict=True))
        cause = f"no output within {self.config.step_timeout_s:g} s"
        if last is None:
            last = min(range(len(stage)), key=lambda rank: progress[stage[rank]].finished)
            latest = min(progress[rank].collective for rank in stage)
            cause += f"; all ranks without output are at collective {latest}"
        self._ranks.log_stacks()
        self._failure = WorkerError(stage[last], self._step_id, cause, hung=True)
        raise self._failure

    def close(self, failure: Exception | None = None) -> None:
        self._ranks.close(self._failure or failure)


def first_stage_behind(progress: Sequence[RankProgress], num_ranks: int) -> range:
    """Return the ranks of the first pipeline stage, each with `num_ranks`, that has finished the fewest steps. Later
    stages wait for it."""
    last = min(range(len(progress)), key=lambda rank: progress[rank].finished)
    first = last - last % num_ranks
    return range(first, first + num_ranks)
