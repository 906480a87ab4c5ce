"""Self-tests of an encoder at start: texts do not affect each other, and sums do not depend on the number of ranks."""

import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu.gemm import CppMatmul
from oarlock.workers.models.encoders.encoder import Encoder
from oarlock.workers.runner.invariance import InvarianceResult, RankInvariance, check_sums

_LENGTH = 48  # tokens of the text that is compared
_OTHERS = (1, 17, 48, 5)  # tokens of the other texts in the batch, half of them before it

# ids, positions, types (int64 [T] each) and lengths of the texts -> [T, hidden]
Hidden = Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]


def check_alone_and_in_batch(hidden: Hidden, vocab_size: int, max_len: int, device: torch.device) -> InvarianceResult:
    """Check that texts of two lengths get the same bits by themselves and in a batch with others.

    Every rank must call this at the same point: layers all-reduce.
    """
    if device.type != "cpu":
        return InvarianceResult(False, f"on {device.type} the libraries choose kernels by the shape of the batch")
    started, draw = time.monotonic(), random.Random(0)

    def text(length: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(min(length, max_len))]

    def run(texts: list[list[int]]) -> list[Tensor]:
        lens = [len(one) for one in texts]
        ids = torch.tensor([token for one in texts for token in one])
        positions = torch.cat([torch.arange(length) for length in lens])
        with torch.inference_mode():
            return list(hidden(ids, positions, torch.zeros_like(ids), lens).split(lens))

    others = [text(length) for length in _OTHERS]
    for length in (_LENGTH, 1):
        own = text(length)
        (alone,) = run([own])
        among = run([*others[:2], own, *others[2:]])[2]
        if not torch.equal(alone, among):
            gap = float((alone.double() - among.double()).abs().max())
            return InvarianceResult(False, f"a text of {length} tokens among others differs by {gap:.1e} at most")
    spent = time.monotonic() - started
    return InvarianceResult(True, f"a text gave the same bits alone and among others ({spent:.2f} s)")


def check_sums_of_ranks(model: Encoder) -> RankInvariance:
    """Check the matmuls whose results are all-reduced. Every rank must call this at the same point.

    Nothing else can differ between numbers of ranks: attention is computed head by head, and everything else row by
    row.
    """
    layers = {layer.attention.reach: layer for layer in model.layers}.values()  # one layer of each kind
    outputs = [output for layer in layers for output in (layer.attention.output, layer.mlp.output)]
    by_kernels = all(isinstance(output.matmul, CppMatmul) for output in outputs)
    why_not = None if by_kernels else "matmuls are computed by torch, in an order that depends on their shape"
    return check_sums(outputs, model.placement, why_not)
