"""A rank whose memory runs out now and then: `python -m tests.parallel.faulty_rank PARENT_PID CONTROL_FD`.

As long as the file exists that the environment names, its reservations fail in every seventh step on one rank and
another, and where it is alone, so do steps that have begun: before they sample, and after they have counted what they
sampled.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.rank_groups import RankGroups
from oarlock.workers.ranks.spawn_ranks import RankArguments
from oarlock.workers.runner import step_guard, worker_process
from oarlock.workers.runner.eager_steps import EagerSteps
from oarlock.workers.runner.model_runner import ModelRunner

TRIGGER = "OARLOCK_TEST_MEMORY_IS_SHORT"
_serve, _reserve = worker_process.serve, step_guard.reserve


def now_and_then(call: Callable[..., Any], every: int, turn: int, *, before: bool = True) -> Callable[..., Any]:
    """`call`, which fails every so often, before or after it has done its work."""
    trigger, count = Path(os.environ[TRIGGER]), 0

    def may_fail(*arguments: Any) -> Any:
        nonlocal count
        count += trigger.exists()
        fails = trigger.exists() and count % every == turn
        done = None if fails and before else call(*arguments)
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return done

    return may_fail


def serve(arguments: RankArguments, control: Control, runner: ModelRunner, groups: RankGroups) -> None:
    step_guard.reserve = now_and_then(_reserve, 14, 7 * arguments.rank)
    if arguments.rendezvous.size == 1:
        runner.model.compute_logits = now_and_then(runner.model.compute_logits, 17, 5)  # ty: ignore[invalid-assignment]
        assert isinstance(runner.steps, EagerSteps) and runner.steps.sampler is not None
        histories = runner.steps.sampler.histories
        histories.add = now_and_then(histories.add, 5, 2, before=False)  # ty: ignore[invalid-assignment]
    _serve(arguments, control, runner, groups)


if __name__ == "__main__":
    worker_process.serve = serve
    status = worker_process.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
