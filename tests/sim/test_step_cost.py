"""What one step costs the engine itself, printed (run with `-s`); what is asserted is that the step is right."""

import time
from itertools import pairwise

import numpy as np
import pytest

from engine import messages
from engine.config import EngineConfig, WorkerConfig
from engine.frames import FrameReader
from engine.scheduler import Scheduler
from engine.sequence import StepResult
from engine.step_builder import StepBuilder
from engine.types import Request, SamplingParams
from workers.config import WorkerInfo

BLOCK_SIZE, PROMPT, MAX_LEN = 32, 500, 1024


def _info(num_blocks: int) -> WorkerInfo:
    return WorkerInfo(num_blocks, BLOCK_SIZE, MAX_LEN, 1000, 1, "cpu", "float32", "none", "None", 0, 0, 0, 0.0)


@pytest.mark.parametrize("num_seqs", [32, 256, 1000])
def test_a_decode_step_of_many_sequences(num_seqs: int, capsys: pytest.CaptureFixture[str]) -> None:
    worker = WorkerConfig("none", max_num_seqs=num_seqs, max_num_batched_tokens=8192, block_size=BLOCK_SIZE)
    scheduler = Scheduler(EngineConfig(worker, max_waiting_requests=num_seqs), _info(num_seqs * 32 + 1))
    builder = StepBuilder(max_num_seqs=num_seqs, max_model_len=MAX_LEN, block_size=BLOCK_SIZE)
    for number in range(num_seqs):
        prompt = tuple((number * 7 + index) % 1000 for index in range(PROMPT))
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=500)), 0.0)
    reader, times = FrameReader(), []
    while len(times) < 20:
        began = time.thread_time()
        output = scheduler.schedule(1.0)
        assert output is not None
        scheduled = time.thread_time()
        step = builder.build(output)
        built = time.thread_time()
        rows = len(step.logits_indices)
        events = scheduler.commit(output, StepResult([5] * rows, [True] * rows), 1.0)
        committed = time.thread_time()
        frame = messages.events(events)
        encoded = time.thread_time()
        assert messages.read_events(reader.feed(frame)[0]) == events
        decoded = time.thread_time()
        if rows == num_seqs and step.num_tokens == num_seqs:
            marks = (began, scheduled, built, committed, encoded, decoded)
            times.append([later - earlier for earlier, later in pairwise(marks)])
    seqs = [work.seq for work in output.work]
    at = np.array([work.start for work in output.work])
    expected = [
        seq.block_ids[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
        for seq, start in zip(seqs, at, strict=True)
    ]
    assert step.slot_mapping.tolist() == expected
    assert step.seq_lens.tolist() == (at + 1).tolist()
    names = ("schedule", "build", "commit", "encode", "decode")
    medians = dict(zip(names, (np.median(times, axis=0) * 1e3).round(3).tolist(), strict=True))
    with capsys.disabled():
        print(f"\n{num_seqs} sequences, processor milliseconds per step: {medians}")
