"""Merges the reports of all ranks into one for the engine: the number that limits, or the sum over stages.

Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oarlock.workers.config import WorkerInfo
from oarlock.workers.kv_offload import KVOffloadInfo
from oarlock.workers.step_cost import StepCost


def joint_info(infos: Mapping[int, WorkerInfo]) -> WorkerInfo:
    """Merges reports, by rank. Bytes and seconds are those of the rank with the most. Invariant only if every rank is,
    else with the reason of the first that is not."""
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
        weight_bytes_per_rank=max(info.weight_bytes_per_rank for info in everyone),
        kv_bytes_per_token_per_rank=max(info.kv_bytes_per_token_per_rank for info in everyone),
        load_seconds=max(info.load_seconds for info in everyone),
        kv_offload=_smallest([info.kv_offload for info in everyone]),
        step_cost=_through_all([info.step_cost for info in everyone[:: joint.tensor_parallel_size]]),
    )


def _smallest(tiers: Sequence[KVOffloadInfo | None]) -> KVOffloadInfo | None:
    """Slots that every rank has, and the time of the rank that takes longest for a block."""
    known = [tier for tier in tiers if tier is not None]
    if not known:
        return None
    speeds = [tier.read_bytes_per_s / tier.bytes_per_block for tier in known if tier.read_bytes_per_s is not None]
    speed = min(speeds) * known[0].bytes_per_block if speeds else None
    return replace(known[0], num_slots=min(tier.num_slots for tier in known), read_bytes_per_s=speed)


def _through_all(costs: Sequence[StepCost | None]) -> StepCost | None:
    """Cost of a step that passes through stages with these costs; the last one computes the logits."""
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return None
    return StepCost(
        fixed_s=sum(cost.fixed_s for cost in known),
        token_s=sum(cost.token_s for cost in known),
        context_s=sum(cost.context_s for cost in known),
        logits_s=known[-1].logits_s,
    )
