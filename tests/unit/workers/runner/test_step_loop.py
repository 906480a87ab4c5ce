"""The loop of a rank, with a device that computes meanwhile, and with one whose steps are over when launched."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from oarlock.workers.adapters import AdapterCommand, AdapterReport, CommandKind, command_fields, read_reports
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.rank_groups import RankGroups
from oarlock.workers.distributed.shm_ring import RingLayout, RingReader, RingWriter, anonymous_memory
from oarlock.workers.protocol import (
    StepMetadata,
    StepOutput,
    max_output_bytes,
    max_step_bytes,
    pack_step,
    unpack_output,
    unpack_step,
)
from oarlock.workers.ranks.spawn_ranks import RankRings
from oarlock.workers.runner.pending_output import Launched
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from oarlock.workers.runner.worker_process import serve

CONFIG = WorkerConfig("none", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=16, max_loras=2)
WAIT_S = 60.0


class Gated:
    """The output of a device that has computed when `done` is set."""

    def __init__(self, step_id: int, tokens: list[int]) -> None:
        self.done = threading.Event()
        self.fails = False
        self._output = StepOutput(step_id, np.array(tokens, np.int32), np.ones(len(tokens), np.uint8))

    def wait(self) -> StepOutput:
        assert self.done.wait(WAIT_S)
        if self.fails:
            raise RuntimeError("the device has lost an address")
        return self._output


class AdaptersAtOnce:
    """LoRA adapters that are loaded when they are prepared, but for those in `/broken`."""

    def __init__(self) -> None:
        self.ended: dict[str, str | None] = {}
        self.slots: dict[int, str] = {}

    def prepare(self, digest: str, directory: str) -> None:
        self.ended[digest] = "it is broken" if directory == "/broken" else None

    def put(self, digest: str, slot: int) -> None:
        self.slots[slot] = digest

    def drop(self, digest: str) -> None:
        self.ended.pop(digest, None)

    def ready(self) -> dict[str, str | None]:
        ended, self.ended = self.ended, {}
        return ended


class FakeRunner:
    """Launches steps on a device that the test holds back; the token of a step is 100 + its number."""

    def __init__(self, *, runs_ahead: bool) -> None:
        self.config = CONFIG
        self.device = torch.device("cpu")
        self.runs_ahead = runs_ahead
        self.kv_offload = None
        self.adapters = AdaptersAtOnce()
        self.slots: dict[int, dict[int, str]] = {}  # step -> adapters in slots when it was launched
        self.outputs: dict[int, Gated] = {}
        self.masks: dict[int, list[int]] = {}
        self.launched = threading.Semaphore(0)

    def bytes_of(self, step: StepMetadata) -> int:
        return 0

    def launch(self, step: StepMetadata, await_masks: Callable[[], None]) -> Launched:
        pending = self.outputs[step.step_id] = Gated(step.step_id, [100 + step.step_id])
        self.slots[step.step_id] = dict(self.adapters.slots)
        self.launched.release()
        await_masks()
        self.masks[step.step_id] = step.mask_bits.ravel().tolist()
        return pending if self.runs_ahead else pending._output


@dataclass
class Loop:
    """A rank's loop in a thread, and the executor's ends of its rings."""

    runner: FakeRunner
    steps: RingWriter
    answers: RingReader
    messages: list[dict[str, Any]] = field(default_factory=list)
    reported: threading.Event = field(default_factory=threading.Event)

    def submit(self, step_id: int, commands: list[AdapterCommand] | None = None, *, masks_follow: bool = False) -> None:
        step = greedy_step([SequenceChunk([5], 3, [1])], 16, [0], step_id=step_id)
        step = replace(step, **command_fields(commands or []))
        if masks_follow:
            step.mask_rows, step.mask_bits = np.zeros(1, np.int32), np.zeros((1, 2), np.uint32)
        with self.steps.send(rest_follows=masks_follow) as slot:
            pack_step(step, slot, without_masks=masks_follow)

    def send_masks(self, bits: list[int]) -> None:
        with self.steps.send_rest() as slot:
            unpack_step(slot).mask_bits[:] = np.array([bits], np.uint32)

    def collect(self) -> tuple[int, list[int]]:
        with self.answers.recv(WAIT_S) as slot:
            output = unpack_output(slot)
        return output.step_id, output.token_ids.tolist()

    def send(self, kind: str, **values: Any) -> None:
        """Record a message, in place of the rank's control channel."""
        self.messages.append({"kind": kind, **values})
        self.reported.set()

    def wait_for_launch(self) -> None:
        assert self.runner.launched.acquire(timeout=WAIT_S)


@pytest.fixture(params=[True, False], ids=["device", "host"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    yield from running(FakeRunner(runs_ahead=request.param))


@pytest.fixture
def on_device() -> Iterator[Loop]:
    yield from running(FakeRunner(runs_ahead=True))


def running(runner: FakeRunner) -> Iterator[Loop]:
    layouts = RingLayout.holding(max_step_bytes(CONFIG), 1), RingLayout.holding(max_output_bytes(CONFIG), 1)
    memory = [anonymous_memory(layout.total_bytes) for layout in layouts]
    (step_read, step_write), (answer_read, answer_write) = os.pipe(), os.pipe()
    rings = RankRings(memory[0], step_read, layouts[0].to_fields(), memory[1], answer_write, layouts[1].to_fields())
    made = Loop(
        runner, RingWriter(memory[0], [step_write], layouts[0]), RingReader(memory[1], answer_read, 0, layouts[1])
    )
    arguments = SimpleNamespace(rank=0, local_rank=0, extra=asdict(rings), rendezvous=SimpleNamespace(size=1))
    thread = threading.Thread(
        target=serve, args=(cast("Any", arguments), cast("Any", made), cast("Any", runner), RankGroups.solo())
    )
    thread.start()
    yield made
    made.steps.close()
    for pending in runner.outputs.values():
        pending.done.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    made.answers.close()


def test_the_next_step_is_launched_while_the_device_computes(on_device: Loop) -> None:
    for step_id in (1, 2):
        on_device.submit(step_id)
        on_device.wait_for_launch()  # of step 2, though the output of step 1 is not there
    on_device.runner.outputs[2].done.set()
    on_device.runner.outputs[1].done.set()
    assert [on_device.collect() for _ in range(2)] == [(1, [101]), (2, [102])]


def test_an_output_that_is_there_is_answered_at_once(loop: Loop) -> None:
    for step_id in range(1, 6):  # more than a ring has slots
        loop.submit(step_id)
        loop.wait_for_launch()
        loop.runner.outputs[step_id].done.set()
        assert loop.collect() == (step_id, [100 + step_id])


def test_masks_that_wait_for_an_answer_get_it(on_device: Loop) -> None:
    """The masks of step 2 follow from the output of step 1, which comes when step 2 has been launched."""
    on_device.submit(1)
    on_device.wait_for_launch()
    on_device.submit(2, masks_follow=True)
    on_device.wait_for_launch()
    on_device.runner.outputs[1].done.set()
    assert on_device.collect() == (1, [101])
    on_device.send_masks([7, 9])
    on_device.runner.outputs[2].done.set()
    assert on_device.collect() == (2, [102])
    assert on_device.runner.masks == {1: [], 2: [7, 9]}


def test_a_device_that_fails_is_reported_with_its_step(on_device: Loop) -> None:
    for step_id in (1, 2):
        on_device.submit(step_id)
        on_device.wait_for_launch()
    on_device.runner.outputs[1].done.set()
    assert on_device.collect() == (1, [101])
    on_device.runner.outputs[2].fails = True
    on_device.runner.outputs[2].done.set()
    assert on_device.reported.wait(WAIT_S)
    assert on_device.messages == [
        {"kind": "raised", "step_id": 2, "cause": "RuntimeError: the device has lost an address", "of_peer": False}
    ]


def test_commands_for_adapters_run_before_their_step(loop: Loop) -> None:
    """The output of the step that asks has the reports, also if the device is still computing when they are known."""
    digests = [bytes([number] * 16).hex() for number in (1, 2)]
    prepare = [
        AdapterCommand(CommandKind.PREPARE, digest, directory=directory)
        for digest, directory in zip(digests, ("/fine", "/broken"), strict=True)
    ]
    commands = [prepare, [AdapterCommand(CommandKind.REPORT)], [AdapterCommand(CommandKind.PUT, digests[0], 2)]]
    reports = []
    for step_id, some in enumerate(commands, 1):
        loop.submit(step_id, some)
        loop.wait_for_launch()
        loop.runner.outputs[step_id].done.set()
        with loop.answers.recv(WAIT_S) as slot:
            output = unpack_output(slot)
        assert output.token_ids.tolist() == [100 + step_id]
        reports.append(read_reports(output.adapter_digests, output.adapter_failures, output.adapter_reasons))
    assert reports == [[], [AdapterReport(digests[0], None), AdapterReport(digests[1], "it is broken")], []]
    assert loop.runner.slots == {1: {}, 2: {}, 3: {2: digests[0]}}
