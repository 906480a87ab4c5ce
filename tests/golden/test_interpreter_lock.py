"""Ranks that are threads: one of them parses a kernel, whichever comes first, while the others wait."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction

from oarlock.workers.distributed.parallel_state import TensorParallel
from tests.golden.device_products import INTERPRETED
from tests.golden.interpreter_lock import one_kernel_at_a_time
from tests.golden.paged_run import on_ranks

pytestmark = INTERPRETED
RANKS = 8


@triton.jit
def _doubled(x):
    """A function that a kernel calls."""
    return x + x


@triton.jit
def _double(x, out):
    """Writes twice the first number of `x` to `out`."""
    tl.store(out, _doubled(tl.load(x)))


def test_a_kernel_is_parsed_once_and_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel_at_a_time(monkeypatch)
    monkeypatch.setattr(InterpretedFunction, "rewritten_fn", {})
    started, parsing, parsed, most = threading.Barrier(RANKS), set(), [], 0
    rewrite = FunctionRewriter.rewrite_ast

    def watched(rewriter: FunctionRewriter) -> Any:
        nonlocal most
        parsing.add(threading.get_ident())
        for _ in range(50):  # turns for the other threads, which would parse too
            time.sleep(0)
            most = max(most, len(parsing))
        try:
            return rewrite(rewriter)
        finally:
            parsed.append(rewriter.fn.__name__)
            parsing.discard(threading.get_ident())

    monkeypatch.setattr(FunctionRewriter, "rewrite_ast", watched)

    def work(tp: TensorParallel) -> Tensor:
        x, out = torch.tensor([float(tp.rank)]), torch.empty(1)
        started.wait(60)
        _double[(1,)](x, out)
        return out

    results = on_ranks(RANKS, work)
    assert [float(out) for out in results] == [2.0 * rank for rank in range(RANKS)]
    assert most == 1 and sorted(parsed) == ["_double", "_doubled"]
