"""Decodes in arrays have the same effect as one by one: equal steps, events, blocks, shares and statistics.

Random scenes of every kind of request run twice, with the arrays and with every sequence scheduled, built and answered
as a separate object.
"""

import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from oarlock.engine.errors import NOT_FINITE
from oarlock.engine.scheduler.decode_state import DecodeState
from oarlock.engine.scheduler.sequence import ScheduledTokens
from oarlock.engine.types import FinishReason, TokenEvent
from oarlock.workers.protocol import StepMetadata
from tests.unit.engine.engine_fakes import Driver, Faults, make_config, make_request
from tests.unit.engine.scheduler.test_pipeline_depth import Scene, make_scene

POISONED_FROM = 13  # position; the token before it fills no block of 3 or 4 tokens, for which it would be looked at
CLIENTS = ("", "", "a", "b")
CHOICES = ("temperature", "top_p", "top_k", "min_p", "seeds")


class Recorder(Driver):
    """A driver that writes down what every step was, by request, and what came of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.record: list[Any] = []
        self.num_plain = self.num_others = 0  # decodes in arrays; other parts of steps
        self._asked: list[int] = []  # the requests of the rows of logits of the step before
        self._mask_rows = np.empty(0, np.int32)  # of that step
        real, send = self.executor.submit, self.executor.send_masks

        def submit(step: StepMetadata, *, masks_follow: bool = False) -> None:
            real(step, masks_follow=masks_follow)
            asked = [item.seq.request_id for item in self.items for _ in range(item.num_scored + item.wants_logits)]
            parts = [self._part(step, s, item, asked) for s, item in enumerate(self.items)]
            self.record.append(dict(parts))
            self._asked, self._mask_rows = asked, step.mask_rows

        def send_masks(bits: np.ndarray) -> None:
            send(bits)
            asked = [self._asked[row] for row in self._mask_rows]
            self.record.append(dict(zip(asked, bits.tolist(), strict=True)))

        self.executor.submit = submit  # type: ignore[method-assign]
        self.executor.send_masks = send_masks  # type: ignore[method-assign]

    def begin(self, num_withdrawn: int = 0):
        output = super().begin(num_withdrawn)
        if output is not None:
            self.num_plain += len(output.decodes.rows)
            self.num_others += len(output.scheduled)
            self.record.append((output.num_preempted, output.num_decodes, output.num_prompt_tokens, output.new_blocks))
        return output

    def finish(self, output=None) -> list[TokenEvent]:
        events = super().finish(output)
        pools, queue = self.scheduler.memory.pools, self.scheduler._waiting
        self.record.append(sorted(events, key=lambda event: event.request_id))
        self.record.append([(list(pool.free), list(pool.cached), dict(pool.block_of_hash)) for pool in pools])
        self.record.append([(seq.request_id, seq.token_ids[:], seq.last_token_s) for seq in self.scheduler._running])
        self.record.append([seq.request_id for seq in queue])
        self.record.append(dict(queue._shares._times))
        return events

    def _part(self, step: StepMetadata, s: int, item: ScheduledTokens, asked: list[int]) -> tuple[int, Any]:
        """The request of `item`, and what `step` says of it: it is sequence `s` there."""
        first, last = step.query_start_loc[s : s + 2].tolist()
        token_ids = step.token_ids[first:last].tolist()
        rows = [row for row, number in enumerate(asked) if number == item.seq.request_id]
        of_logits = ["target_ids", "sample_positions", *CHOICES, "num_logprobs"]
        biased = np.isin(step.bias_rows, rows)
        return item.seq.request_id, (
            item.seq.row,
            # A token that the step before samples is named by its request: rows of logits may be in another order.
            [token if token >= 0 else ("of", self._asked[-1 - token]) for token in token_ids],
            step.positions[first:last].tolist(),
            int(step.seq_lens[s]),
            (step.logits_indices[rows] - first).tolist(),
            [getattr(step, name)[rows].tolist() for name in of_logits],
            (step.bias_ids[biased].tolist(), step.bias_values[biased].tolist()),
            step.mask_bits[np.isin(step.mask_rows, rows)].tolist(),
        )


def scene_of(seed: int) -> Scene:
    """A scene whose requests come from several clients, in several orders."""
    scene, draw = make_scene(seed), random.Random(seed)
    if seed % 3:
        scene.arrivals = [
            (turn, replace(request, client=draw.choice(CLIENTS), priority=draw.choice([0, 0, 1])))
            for turn, request in scene.arrivals
        ]
    return scene


def play(scene: Scene, depth: int) -> Recorder:
    faults = Faults(poisoned_seeds=(666,), poisoned_from=POISONED_FROM)
    driver = Recorder(make_config(**scene.config, pipeline_depth=depth), scene.num_blocks, faults, scene.window)
    coming, turn = sorted(scene.arrivals, key=lambda pair: pair[0]), 0
    while coming or driver.scheduler.has_work or driver.in_flight:
        while coming and coming[0][0] <= turn:
            driver.add(coming.pop(0)[1])
        for number, when in scene.aborts.items():
            if when == turn and number in driver.requests and number not in driver.ends:
                driver.abort(number)
        driver.step()
        turn += 1
    driver.check_idle()
    return driver


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Every sequence is scheduled, built and answered as an object."""
    real = DecodeState.take

    def take(self: DecodeState, seq) -> None:
        seq.decodes_individually = True
        real(self, seq)

    patch.setattr(DecodeState, "take", take)


@pytest.mark.parametrize(
    "seeds", [range(1012, 1015), pytest.param(range(1015, 1040), marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.slow
def test_arrays_match_one_by_one_operations(depth: int, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    num_plain = num_others = preemptions = 0
    for seed in seeds:
        scene = scene_of(seed)
        columns = play(scene, depth)
        with monkeypatch.context() as patch:
            one_by_one(patch)
            objects = play(scene, depth)
        assert objects.num_plain == 0
        for at, (got, expected) in enumerate(zip(columns.record, objects.record, strict=True)):
            assert got == expected, f"seed {seed}, entry {at}"
        _same_stats(asdict(columns.scheduler.stats), asdict(objects.scheduler.stats))
        num_plain, num_others = num_plain + columns.num_plain, num_others + columns.num_others
        preemptions += columns.scheduler.stats.num_preemptions
    assert num_plain > num_others > 0 and preemptions > 0


def test_an_answer_is_not_for_the_next_sequence_in_its_row() -> None:
    """At a depth of 2 a row can have another sequence before the answer for the one that was aborted comes."""
    driver = Driver(make_config(pipeline_depth=2, max_num_seqs=2, enable_prefix_caching=False))
    for number in (1, 2):
        driver.add(make_request(number, [number, 5], max_tokens=9))
    for _ in range(4):
        driver.step()
    (row,) = (item.seq.row for item in driver.items if item.seq.request_id == 1)
    driver.begin()
    assert len(driver.in_flight) == 2 and all(row in output.decodes.rows for output in driver.in_flight)
    driver.abort(1)
    driver.add(make_request(3, [7], max_tokens=9))
    driver.finish()
    assert driver.begin() is not None
    assert [item.seq.row for item in driver.items if item.seq.request_id == 3] == [row]
    assert 3 not in [event.request_id for event in driver.finish()]
    driver.run().check_outputs()


def test_a_decode_whose_logits_are_not_finite_fails_alone() -> None:
    config = make_config(enable_prefix_caching=False)
    driver = Driver(config, faults=Faults(poisoned_seeds=(2,), poisoned_from=7))
    for number in (1, 2, 3):
        driver.add(make_request(number, [number, 5], max_tokens=12))
    driver.run().check_outputs()
    assert driver.ends[2].error == NOT_FINITE and len(driver.tokens[2]) == 5
    assert {driver.ends[number].finish_reason for number in (1, 3)} == {FinishReason.LENGTH}
    assert driver.scheduler.stats.num_nonfinite == 1


def test_a_sequence_with_many_stop_tokens_ends_at_each() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2, 3], max_tokens=9, seed=1))
    driver.run()
    stop = driver.tokens[1][5]
    others = [token for token in range(64) if token not in driver.tokens[1]]
    for number, more in ((2, 0), (3, 7), (4, 8), (5, 20)):
        driver.add(make_request(number, [1, 2, 3], max_tokens=9, seed=1, stop_token_ids=(stop, *others[:more])))
    driver.run().check_outputs()
    assert all(driver.ends[number].stop_token_id == stop for number in (2, 3, 4, 5))


def test_tokens_of_a_sequence_that_has_ended_are_not_counted_to_its_client() -> None:
    driver = Driver(make_config(pipeline_depth=2))
    for number, client in ((1, "a"), (2, "b")):
        driver.add(make_request(number, [number, 5], max_tokens=30, client=client))
    while len(driver.in_flight) < 2:
        driver.begin()
    driver.abort(1)
    before = driver.scheduler._waiting.time_of("a"), driver.scheduler._waiting.time_of("b")
    driver.finish()
    after = driver.scheduler._waiting.time_of("a"), driver.scheduler._waiting.time_of("b")
    assert after[0] == before[0] and after[1] > before[1]


def _same_stats(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict) and "bounds" in value:
            assert got[name]["counts"] == value["counts"], name
            assert got[name]["sum"] == pytest.approx(value["sum"]), name
        else:
            assert got[name] == value, name
