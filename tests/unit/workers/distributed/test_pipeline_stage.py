"""Hidden states from stage to stage: whole and in order at every number of ranks, refused steps among them."""

import queue
import threading

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.pipeline_stage import PipelineStage, StepRefusedError
from tests.golden.paged_run import RankThreads, ThreadRank

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 5, 64, 1, 7)  # tokens of each step
REFUSED, DROPPED = 2, 4  # steps that the first stage refuses, and that the second does
WIDTH = 6


class QueueChannel:
    """A channel between threads."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()

    def send(self, rows: Tensor) -> None:
        self._messages.put(rows.clone())

    def receive(self, rows: Tensor) -> bool:
        sent = self._messages.get(timeout=60)
        if sent is not None:
            assert sent.shape == rows.shape
            rows.copy_(sent)
        return sent is not None

    def refuse(self, num_bytes: int) -> None:
        self._messages.put(None)

    def discard(self, num_bytes: int) -> None:
        self._messages.get(timeout=60)


def hidden_of(step: int) -> Tensor:
    return torch.randn((SIZES[step], WIDTH), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_rows_arrive_whole_and_in_order_and_refused_steps_keep_their_place(tp: int) -> None:
    stages = 3
    channels = [[QueueChannel() for _ in range(tp)] for _ in range(stages - 1)]
    groups = [RankThreads(tp) for _ in range(stages)]
    arrived: dict[tuple[int, int], list[Tensor | None]] = {}

    def run(number: int, rank: int) -> None:
        before = channels[number - 1][rank] if number else None
        after = channels[number][rank] if number < stages - 1 else None
        stage = PipelineStage(number, stages, ThreadRank(rank, groups[number]), before, after)
        assert (stage.is_first, stage.is_last) == (number == 0, number == 2)
        got = arrived[number, rank] = []
        for step, tokens in enumerate(SIZES):
            hidden = None
            if number == 1 and step == DROPPED:
                stage.drop(tokens)
            elif stage.is_first:
                hidden = hidden_of(step) if step != REFUSED else None
            else:
                try:
                    hidden = stage.receive(tokens, WIDTH, torch.float32, CPU) + 1
                except StepRefusedError:
                    assert step in (REFUSED, DROPPED)
            if hidden is None:
                stage.refuse(tokens)
            elif not stage.is_last:
                stage.send(hidden)
                got.append(hidden.clone())
                hidden.zero_()
                continue
            got.append(hidden)

    threads = [threading.Thread(target=run, args=(number, rank)) for number in range(stages) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(tp):
        for step in range(len(SIZES)):
            last = arrived[stages - 1, rank][step]
            if step in (REFUSED, DROPPED):
                assert last is None
            else:
                assert last is not None and torch.equal(last, hidden_of(step) + 1 + 1)


def test_one_stage_is_both_ends() -> None:
    stage = PipelineStage.solo()
    assert stage.is_first and stage.is_last and stage.size == 1
    stage.drop(1)  # a refused step passes nobody
    stage.refuse(1)
