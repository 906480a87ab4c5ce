"""Selection of the expert matmul kernel on a CUDA device for each number of tokens, by timing at start.

The candidates are three tile shapes of our kernel, and torch's grouped matmul if it is supported. The fastest depends
on the device, the sizes of the model and the number of tokens per expert. Each is timed in a graph, as decode steps
launch it. Ranks may choose differently, since every kernel adds up the same rows.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import AllReduce, seconds_on_device
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.quantization.expert_weights import ExpertsShape
from oarlock.workers.quantization.triton_experts import GROUPED, TritonExpertMatmul

logger = logging.getLogger("oarlock.runner")

TOKENS = (1, 16, 64, 256, 1024, 4096)  # tokens of a step: powers of 2, at which steps are warmed up
_TRIED = 64  # tokens of the trial that checks a kernel's results
_TOLERANCE = 2e-2  # relative tolerance for kernels that round to bfloat16 at different points

Routed = tuple[Tensor, Tensor, Tensor]


def select_expert_kernels(model: RankModel, max_tokens: int) -> None:
    """Time the kernels for every shape of experts in `model`, and set the fastest. `max_tokens`: largest step."""
    measured: dict[tuple[ExpertsShape, bool, int], list[tuple[int, str]]] = {}
    for experts in model.mixtures():
        total, top_k = experts.router.experts, experts.router.spec.top_k
        for stack, wanted in ((experts.routed, top_k), (experts.shared, 1)):
            if stack is None or not isinstance(matmul := stack.matmul, TritonExpertMatmul):
                continue
            shape = matmul.shape
            per_token = wanted if stack is experts.shared else max(1, round(wanted * shape.count / total))
            key = replace(shape, first=0), matmul.is_packed, per_token
            if len(matmul.kernels()) > 1 and shape.count:
                if key not in measured:
                    measured[key], line = fastest_kernels(matmul, per_token, max_tokens)
                    logger.info("event=expert_kernels count=%d width=%d chosen=%r", shape.count, shape.width, line)
                matmul.chosen = measured[key]


def fastest_kernels(
    matmul: TritonExpertMatmul,
    per_token: int,
    max_tokens: int,
    seconds_of: Callable[[AllReduce, Tensor], float] = seconds_on_device,
) -> tuple[list[tuple[int, str]], str]:
    """Return the fastest kernel up to each number of tokens, and a log line of the timings.

    `per_token`: experts of a token on this rank. `max_tokens`: largest step. `seconds_of`: the timer.
    """
    before, names, why_not = matmul.chosen, matmul.kernels(), matmul.why_not_grouped()
    if why_not is None:
        why_not = _grouped_fault(matmul, names[0], _random_inputs(matmul, min(_TRIED, max_tokens), per_token))
    if why_not is None:
        names.append(GROUPED)
    fastest: list[tuple[int, str]] = []
    timings = []
    for count in [*(count for count in TOKENS if count < max_tokens), max_tokens]:
        x, ids, weights = _random_inputs(matmul, count, per_token)
        seconds = {}
        for name in names:
            matmul.chosen = [(count, name)]
            seconds[name] = seconds_of(lambda x, ids=ids, weights=weights: matmul(x, ids, weights), x)
        fastest.append((count, min(seconds, key=seconds.__getitem__)))
        each = ", ".join(f"{name} {taken * 1e6:.0f}" for name, taken in seconds.items())
        timings.append(f"{count} tokens by {fastest[-1][1]} ({each} us)")
    matmul.chosen = before
    return fastest, "; ".join(timings if why_not is None else [*timings, f"no {GROUPED}: {why_not}"])


def _grouped_fault(matmul: TritonExpertMatmul, reference: str, inputs: Routed) -> str | None:
    """Return the reason why torch's grouped matmul may not be used, or None if its results in a trial are right."""
    matmul.chosen = [(1, reference)]
    expected = matmul(*inputs)
    matmul.chosen = [(1, GROUPED)]
    try:
        found = matmul(*inputs)
    except RuntimeError as error:
        return f"it fails: {error}".splitlines()[0]
    return None if (found - expected).norm() <= _TOLERANCE * expected.norm() else "its results are wrong"


def _random_inputs(matmul: TritonExpertMatmul, tokens: int, per_token: int) -> Routed:
    """Return random rows, the experts of each, and their weights."""
    shape, device = matmul.shape, matmul.weights()[0].device
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, shape.hidden), generator=draw).to(shape.dtype)
    ids = torch.rand((tokens, shape.count), generator=draw).topk(min(per_token, shape.count), 1).indices.sort(1).values
    weights = torch.full(ids.shape, 1.0 / ids.shape[1])
    return x.to(device), (ids + shape.first).int().to(device), weights.to(device)
