"""Timing of the model at start with a few steps, from which the cost of any step follows.

A step of the whole model measures the cost of any step, which is mostly reading the weights. The cost of one more
token, or of a longer context, is arithmetic and the same in every layer: it is timed on a few layers and multiplied.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from oarlock.workers.attention.backend import LayerMemory
from oarlock.workers.config import StepCost, WorkerConfig
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.runner.step import StepRunner
from oarlock.workers.runner.trial_steps import ONE_GROUP, TrialMemory, null_step

_COUNTS = (16, 64, 256)  # tokens
_GROWTH_S = 0.4  # a size is not tried if it is likely to take longer
_CONTEXT = 2048  # tokens
_TRIES = 3  # the first may allocate; other processes may disturb any

Execute = Callable[[StepMetadata], object]


def time_steps(
    execute: Execute,
    execute_part: Execute,
    share: float,
    agree: Callable[[float], float],
    *,
    max_tokens: int,
    max_model_len: int,
    block_size: int,
    vocab_size: int = 1,
    expert_share: float = 0.0,
    memory: TrialMemory = ONE_GROUP,
) -> StepCost:
    """Measure the cost of steps. Every rank must call this at the same point.

    `agree` returns the maximum of a value over all ranks, so that all ranks time the same steps. `execute_part` runs a
    step on `share` of the layers, with the whole embedding and head. `max_tokens`: largest step. `expert_share`: share
    of an MoE layer's experts that one token uses; if it is not 0, tokens must differ, so that they choose several
    experts. Reads and writes only the null block, and writes slot 1.
    """

    def seconds(run: Execute, tokens: int, context: int, rows: int = 0) -> float:
        step = null_step(tokens, context, rows, block_size, vocab_size, memory)
        times = []
        for _ in range(_TRIES):
            begun = time.perf_counter()
            run(step)
            times.append(time.perf_counter() - begun)
        return agree(min(times))

    counts = [count for count in _COUNTS if count <= min(max_tokens, max_model_len)] or [1]
    small = counts[0]
    whole_s = seconds(execute, small, small, 1)
    times = {small: seconds(execute_part, small, small)}
    for count in counts[1:]:
        last = max(times)
        if times[last] * count / last > _GROWTH_S:
            break
        times[count] = seconds(execute_part, count, count)
    large = max(times)
    token_s, experts_s = whole_s / small, 0.0
    if expert_share and large > small > 1:
        # A single layer's experts may stay in the caches, so reading them is timed with all layers.
        more_s = whole_s - seconds(execute, 1, 1, 1), (times[large] - times[small]) / share
        of_token, of_experts = _with_experts((1, small, large), more_s, expert_share)
        if of_token:
            token_s, experts_s = of_token, of_experts
    elif large > small and times[large] > times[small]:
        token_s = (times[large] - times[small]) / (large - small) / share
    cost = StepCost(0.0, token_s, 0.0, 0.0, experts_s, expert_share)
    context = min(_CONTEXT, max_model_len)
    context_s = (seconds(execute_part, small, context) - times[small]) / (small * context) / share
    logits_s = (seconds(execute_part, small, small, small) - seconds(execute_part, small, small, 1)) / small
    return replace(
        cost,
        fixed_s=max(0.0, whole_s - cost.seconds(small, context=0)),
        context_s=max(0.0, context_s),
        logits_s=max(0.0, logits_s),
    )


def _with_experts(counts: tuple[int, int, int], more_s: tuple[float, float], share: float) -> tuple[float, float]:
    """Return the seconds of a token, and of reading all experts.

    `counts`: one, few and many tokens. `more_s`: additional seconds of a step of few tokens compared with one token,
    and of a step of many tokens compared with few. A few tokens use few experts and many tokens almost all, so from one
    token to a few the time grows mostly by reading experts.
    """
    reads = [StepCost(0.0, 0.0, 0.0, 0.0, 1.0, share).expert_reads_s(count) for count in counts]
    # Solves more = token * n + experts * r for both differences.
    (n1, r1, t1), (n2, r2, t2) = (
        (counts[place + 1] - counts[place], reads[place + 1] - reads[place], more_s[place]) for place in (0, 1)
    )
    experts_s = (t1 * n2 - t2 * n1) / (r1 * n2 - r2 * n1)
    experts_s = max(0.0, min(experts_s, t1 / r1))  # neither time is negative
    return max(0.0, t2 - experts_s * r2) / n2, experts_s


def time_model(
    runner_of: Callable[[RankModel, list[LayerMemory]], StepRunner],
    model: RankModel,
    memory: list[LayerMemory],
    config: WorkerConfig,
) -> StepCost:
    """Measure the cost of steps of `model` with its `memory`. Every rank of a stage must call this at the same point.

    `runner_of` returns a runner of some layers with their memory.
    """
    assert config.max_model_len is not None, "preflight resolves the context length"
    place = model.placement

    def largest_of_all(value: float) -> float:
        return float(place.tp.all_gather(torch.tensor([value], dtype=torch.float64, device=place.device)).max())

    layers = model.one_of_each_kind()
    return time_steps(
        runner_of(model, memory).execute,
        runner_of(model.with_layers(layers), [memory[layer] for layer in layers]).execute,
        len(layers) / len(model.stage),
        largest_of_all,
        max_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        vocab_size=model.spec.vocab_size,
        expert_share=model.spec.expert_share,
        memory=TrialMemory.of(model.spec),
    )
