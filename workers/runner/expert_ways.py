"""Choice of the expert matmul kernel on a CUDA device for each number of tokens, measured at start.

The candidates are three tile shapes of our kernel, and torch's grouped matmul if it is supported. The fastest depends
on the device, the sizes of the model and the number of tokens per expert. Each is timed in a graph, as decode steps
launch it. Ranks may choose differently, since every kernel adds up the same rows.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import Sum, seconds_on_device
from oarlock.workers.models.decoder import Decoder, mixtures_of
from oarlock.workers.quantization.expert_weights import ExpertsShape
from oarlock.workers.quantization.triton_experts import GROUPED, TritonExpertMatmul

logger = logging.getLogger("oarlock.runner")

TOKENS = (1, 16, 64, 256, 1024, 4096)  # tokens of a step: powers of 2, at which steps are warmed up
_TRIED = 64  # tokens of the trial that checks a kernel's results
_NEAR = 2e-2  # relative tolerance for kernels that round to bfloat16 at different points

Routed = tuple[Tensor, Tensor, Tensor]


def choose_expert_ways(model: Decoder, most: int) -> None:
    """Time the kernels for every shape of experts in `model`, and set the fastest. `most`: largest step, in tokens."""
    known: dict[tuple[ExpertsShape, bool, int], list[tuple[int, str]]] = {}
    for experts in mixtures_of(model.layers):
        total, top_k = experts.router.experts, experts.router.spec.top_k
        for stack, wanted in ((experts.routed, top_k), (experts.shared, 1)):
            if stack is None or not isinstance(product := stack.product, TritonExpertMatmul):
                continue
            shape = product.shape
            of_each = wanted if stack is experts.shared else max(1, round(wanted * shape.count / total))
            key = replace(shape, first=0), product.is_packed, of_each
            if len(product.ways()) > 1 and shape.count:
                if key not in known:
                    known[key], line = measured_ways(product, of_each, most)
                    logger.info("event=experts count=%d width=%d chosen=%r", shape.count, shape.width, line)
                product.chosen = known[key]


def measured_ways(
    product: TritonExpertMatmul, of_each: int, most: int, seconds_of: Callable[[Sum, Tensor], float] | None = None
) -> tuple[list[tuple[int, str]], str]:
    """Return the fastest kernel up to each number of tokens, and a log line of the timings.

    `of_each`: experts per token on this rank. `seconds_of`: timer, by default `seconds_on_device`.
    """
    time, before = seconds_of or seconds_on_device, product.chosen
    names, missing = product.ways(), product.why_not_grouped()
    if missing is None and (missing := _fault(product, names[0], _routed(product, min(_TRIED, most), of_each))) is None:
        names.append(GROUPED)
    chosen: list[tuple[int, str]] = []
    said = []
    for count in [*(count for count in TOKENS if count < most), most]:
        x, ids, weights = _routed(product, count, of_each)
        seconds = {}
        for name in names:
            product.chosen = [(count, name)]
            seconds[name] = time(lambda x, ids=ids, weights=weights: product(x, ids, weights), x)
        chosen.append((count, min(seconds, key=seconds.__getitem__)))
        each = ", ".join(f"{name} {taken * 1e6:.0f}" for name, taken in seconds.items())
        said.append(f"{count} tokens by {chosen[-1][1]} ({each} us)")
    product.chosen = before
    return chosen, "; ".join(said if missing is None else [*said, f"no {GROUPED}: {missing}"])


def _fault(product: TritonExpertMatmul, judge: str, inputs: Routed) -> str | None:
    """Return the reason why torch's grouped matmul may not be used, or None if its results in a trial are right."""
    product.chosen = [(1, judge)]
    wanted = product(*inputs)
    product.chosen = [(1, GROUPED)]
    try:
        found = product(*inputs)
    except RuntimeError as error:
        return f"it fails: {error}".splitlines()[0]
    return None if (found - wanted).norm() <= _NEAR * wanted.norm() else "its results are wrong"


def _routed(product: TritonExpertMatmul, tokens: int, of_each: int) -> Routed:
    """Return random rows, the experts of each, and their weights."""
    shape, device = product.shape, product.weights()[0].device
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, shape.hidden), generator=draw).to(shape.dtype)
    ids = torch.rand((tokens, shape.count), generator=draw).topk(min(of_each, shape.count), 1).indices.sort(1).values
    weights = torch.full(ids.shape, 1.0 / ids.shape[1])
    return x.to(device), (ids + shape.first).int().to(device), weights.to(device)
