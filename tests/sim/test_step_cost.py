"""Large decode steps are right; the cost of building those with more fields is printed (run with `-s`)."""

import time

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.input_batch.input_batch import InputBatch
from oarlock.engine.ipc import messages
from oarlock.engine.ipc.frames import FrameReader
from oarlock.engine.scheduler.scheduler import Scheduler
from oarlock.engine.scheduler.sequence import ModelRunnerOutput
from oarlock.engine.simulated_ranks import replica_info
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.protocol import StepOutput

BLOCK_SIZE, PROMPT, MAX_LEN, VOCAB = 32, 500, 1024, 151_936


def _worker(num_seqs: int, most_tokens: int) -> WorkerConfig:
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": MAX_LEN}
    return WorkerConfig("none", max_num_seqs=num_seqs, max_num_batched_tokens=most_tokens, **sizes)


def _answer(step_id: int, rows: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(StepOutput(step_id, np.full(rows, 5, np.int32), np.ones(rows, np.uint8)))


CHOICES = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": tuple((token * 100, 1.0) for token in range(1024))},
    "bad_words": {"bad_words": tuple((5, 5, token) for token in range(1024))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(0, VOCAB, 2))},
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_decode_step_of_32_sequences_that_ask_for_more(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    num_seqs = 32
    worker = _worker(num_seqs, 32_768)
    info = replica_info(worker, num_seqs * 32 + 1, VOCAB)
    scheduler = Scheduler(EngineConfig(worker, max_waiting_requests=num_seqs), info)
    builder = InputBatch(max_num_seqs=num_seqs, vocab_size=VOCAB)
    for number in range(num_seqs):
        prompt = tuple(number * 1000 + index for index in range(10, PROMPT + 10))
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=500, **CHOICES[name])), 0.0)
    times = []
    for count in range(20):
        output = scheduler.schedule(1.0)
        assert output is not None
        began = time.thread_time()
        step, masks = builder.build(output)
        bits = step.mask_bits if masks is None else masks.compute()
        times.append(time.thread_time() - began)
        scheduler.update_from_output(output, _answer(output.step_id, num_seqs), 1.0)
        sizes = {
            "penalties": len(step.penalty_rows) if len(step.history_rows) == (count == 0) * num_seqs else -1,
            "logit_bias": len(step.bias_ids) / 1024,
            "bad_words": np.bitwise_count(~bits).sum() / 1024 if count > 1 else num_seqs,
            "allowed_token_ids": len(step.mask_bits),
        }
        assert sizes[name] == num_seqs
    with capsys.disabled():
        print(f"\n{num_seqs} sequences with {name}, processor milliseconds to build: {np.median(times) * 1e3:.3f}")


@pytest.mark.parametrize("num_seqs", [32, 1000])
@pytest.mark.slow
def test_a_decode_step_of_many_sequences(num_seqs: int) -> None:
    """`benchmarks/engine_step.py` measures the cost of such a step."""
    worker = _worker(num_seqs, 8192)
    info = replica_info(worker, num_seqs * 32 + 1, 1000)
    scheduler = Scheduler(EngineConfig(worker, max_waiting_requests=num_seqs), info)
    builder = InputBatch(max_num_seqs=num_seqs, vocab_size=1000)
    for number in range(num_seqs):
        prompt = tuple((number * 7 + index) % 1000 for index in range(PROMPT))
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=500)), 0.0)
    reader, num_decodes = FrameReader(), 0
    while num_decodes < 3:
        output = scheduler.schedule(1.0)
        assert output is not None
        step = builder.build(output).step
        rows = len(step.logits_indices)
        events = scheduler.update_from_output(output, _answer(output.step_id, rows), 1.0)
        (payload,) = reader.feed(messages.encode(messages.Events.of(events)))
        message = messages.read_from_engine(payload)
        assert isinstance(message, messages.Events) and message.read() == events
        num_decodes += rows == num_seqs and step.num_tokens == num_seqs
    items = output.items()
    at = np.array([item.start for item in items])
    assert step.positions.tolist() == at.tolist()
    assert step.seq_lens.tolist() == (at + 1).tolist()
