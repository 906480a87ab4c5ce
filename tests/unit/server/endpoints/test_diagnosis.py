"""One sentence on a request: which rule speaks, and that the options it names exist."""

from __future__ import annotations

import inspect
import re
import time

import pytest

from oarlock.engine.stats import AdapterHistory, AdapterWait, Chunk, DecodeSteps, Preemption, RequestHistory, StallState
from oarlock.server.config.settings import OPTIONS
from oarlock.server.endpoints.operations import explain
from oarlock.server.endpoints.operations.explain import Findings, diagnose, report
from oarlock.server.http.request_record import ChoiceRecord, RequestRecord


def record(total_s: float = 10.0, reason: str | None = "stop", grammar: bool = False, **fields) -> RequestRecord:
    made = RequestRecord("abc", "/v1/completions", received_s=100.0)
    made.parsed_s, made.started_s, made.ended_s = 100.0, 100.01, 100.0 + total_s
    made.status, made.completion_tokens, made.response_id = 200, 100, "cmpl-abc"
    made.choices = [ChoiceRecord(7, 0, reason, grammar)]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def engine(queued: float = 0.0, prefill: float = 0.1, total: float = 9.9, **fields) -> RequestHistory:
    """A choice that arrives at 100.01, of which `total` seconds pass in the engine."""
    made = RequestHistory(
        request_id=7,
        prompt_tokens=50,
        cached_tokens=16,
        output_tokens=100,
        arrival_s=100.01,
        num_running=4,
        num_waiting=2,
        queue_position=None,
        ahead=[5],
        without_row=0,
        without_blocks=0,
        adapter=None,
        first_scheduled_s=100.01 + queued,
        num_chunks=1,
        computed_tokens=34,
        chunks=[Chunk(at_s=100.01 + queued, step=3, tokens=34, beside=4)],
        first_token_s=100.01 + queued + prefill,
        decode=DecodeSteps(steps=99, mean_sequences=2.0, prompt_tokens=0, seconds=9.0, by_sequences={"2-3": 99}),
        num_preemptions=0,
        preemptions=[],
        stalls=[],
        end_s=100.01 + total,
        reason="stop",
    )
    made.update(fields)  # ty: ignore[no-matching-overload]
    return made


def stall(kind: str, seconds: float = 6.0, tokens: int = 0) -> StallState:
    return StallState(kind=kind, begun_s=102.0, seconds=seconds, num_sequences=4, num_prompt_tokens=tokens)


def waits_since(at_s: float) -> AdapterHistory:
    """A wait for a slot that has not ended, after half a second of loading."""
    waits = [AdapterWait(awaited="slot", at_s=at_s, end_s=None)]
    return AdapterHistory(name="sql", load_s=0.5, slot_s=0.0, waits=waits)


def told(one: RequestRecord, history: RequestHistory | None, *, prefix_caching: bool = True) -> tuple[str, str | None]:
    answer = report(one, [] if history is None else [history], {5: "cmpl-first"}, prefix_caching)
    return answer["diagnosis"], answer["flag"]


BUSY = {"mean_sequences": 20.0, "steps": 99, "prompt_tokens": 0, "seconds": 9.0, "by_sequences": {}}
CROWDED = {"mean_sequences": 2.0, "steps": 99, "prompt_tokens": 9000, "seconds": 9.0, "by_sequences": {}}
LOADED = AdapterHistory(
    name="sql", load_s=4.0, slot_s=1.0, waits=[AdapterWait(awaited="load", at_s=100.01, end_s=104.01)]
)
NONE = AdapterHistory(name="sql", load_s=0.0, slot_s=0.0, waits=[])
SHORT = [Preemption(at_s=102.0, back_s=105.0, is_short=True)]
SHARED = [Preemption(at_s=102.0, back_s=105.0, is_short=False)]
REFUSED = {"choices": [], "started_s": None, "completion_tokens": 0}


@pytest.mark.parametrize(
    ("one", "history", "words", "flag"),
    [
        (record(0.1, error_status=429, **REFUSED), None, "the queue was full", "--max-waiting-requests"),
        (record(9.0, error_status=408, **REFUSED), None, "time limit", "--request-timeout"),
        (record(0.1, error_status=413, **REFUSED), None, "body was larger", "--max-body-size"),
        (
            record(0.1, error_status=400, error_code="context_length_exceeded", **REFUSED),
            None,
            "do not fit into the context",
            "--max-model-len",
        ),
        (record(0.1, error_status=400, error_param="top_p", **REFUSED), None, "field `top_p`", None),
        (record(error_status=400, error_code="adapter_unloaded", adapter="sql"), engine(), "'sql' was unloaded", None),
        (record(error_status=400, error_code="adapter_failed", adapter="sql"), None, "could not be loaded", None),
        (record(error_status=503, error_code="replica_lost"), None, "has stopped", None),
        (record(error_status=503, error_code="out_of_memory"), engine(), "memory", "--max-num-batched-tokens"),
        (record(error_status=500), engine(), "failed on it with status 500", None),
        (record(reason=None, status=0), engine(), "100 tokens: the client disconnected", None),
        (
            record(reason=None, status=499, completion_tokens=0),
            engine(first_scheduled_s=None, first_token_s=None, decode=None),
            "waited in the queue",
            "--max-num-seqs",
        ),
        (record(reason="timeout"), engine(), "ended the completion early", "--request-timeout"),
        (record(sending_s=5.0), engine(), "read slowly: 5.0 s of 10.0 s", None),
        (record(), engine(num_preemptions=1, preemptions=SHORT), "was preempted once", "--kv-cache-memory"),
        (record(), engine(num_preemptions=1, preemptions=SHARED), "clients below their share", "--max-num-seqs"),
        (record(), engine(stalls=[stall("memory")]), "refused steps", "--max-num-batched-tokens"),
        (record(), engine(stalls=[stall("pause")]), "the engine paused", None),
        (record(), engine(stalls=[stall("step", tokens=900)]), "900 prompt tokens", "--max-step-ms"),
        (record(), engine(stalls=[stall("step")]), "machine was busy", None),
        (record(adapter="sql"), engine(6.0, adapter=LOADED, without_row=50),
         "5.0 s of 10.0 s until its adapter 'sql' was loaded into host memory again", "--max-cpu-loras"),
        (record(adapter="sql", adapter_awaited_s=100.0, adapter_ready_s=105.0, started_s=105.0), engine(adapter=NONE),
         "5.0 s of 10.0 s until its adapter 'sql' was loaded, which its first use began", "--lora-modules"),
        (record(adapter="sql", received_s=time.monotonic() - 9, ended_s=None), engine(
            adapter=waits_since(time.monotonic() - 8), first_scheduled_s=None, first_token_s=None, end_s=None),
         "for a slot for its adapter 'sql'", "--max-loras"),
        (record(), engine(6.0, without_row=50), "6.0 s of 10.0 s for a row in the batch", "--max-num-seqs"),
        (record(), engine(6.0, without_row=1, without_blocks=50), "for KV memory", "--kv-cache-memory"),
        (record(grammar=True), engine(6.0, num_waiting=0), "grammar was compiled", None),
        (record(), engine(6.0), "prompts of other requests", "--data-parallel-size"),
        (record(), engine(prefill=7.0), "50 tokens took 7.0 s, 16 of them cached", "--tensor-parallel-size"),
        (record(), engine(prefill=7.0, num_chunks=3), "3 steps that were kept short", "--max-step-ms"),
        (record(started_s=109.0), None, "tokenized", None),
        (record(), engine(), "99 ms each, in steps with 2.0 sequences", "--speculative-config"),
        (record(), engine(decode=BUSY), "20.0 sequences", "--data-parallel-size"),
        (record(), engine(decode=CROWDED), "9000 prompt tokens of other requests", "--max-step-ms"),
        (record(), None, "has no history of it", None),
        (record(0.02, choices=[ChoiceRecord(7, 0, "stop", False)]), engine(total=0.01, prefill=0.005, decode=None),
         "No stage was slow", None),
    ],
)  # fmt: skip
def test_the_diagnosis_names_the_option_that_would_help(one, history, words, flag) -> None:
    sentence, option = told(one, history)
    assert words in sentence
    assert option == flag


def test_without_a_prefix_cache_it_is_named() -> None:
    assert told(record(), engine(prefill=7.0), prefix_caching=False)[1] == "--enable-prefix-caching"


def test_a_request_that_has_not_ended_is_reported_as_such() -> None:
    one = record(ended_s=None, completion_tokens=0, status=0)
    one.received_s = one.received_s + 0.0
    found = Findings(one, None, {"total": 2.0, "before_engine": 0.1}, prefix_caching=True)
    assert (found.state, diagnose(found)[0]) == ("processing", "It is processing, for 2.0 s now.")


def test_every_option_that_is_named_exists() -> None:
    named = set(re.findall(r'"(--[a-z-]+)"', inspect.getsource(explain)))
    assert len(named) > 8
    assert named <= {option.flag for option in OPTIONS.values()}


def test_the_timeline_is_in_order_and_names_answers_and_not_numbers() -> None:
    history = engine(1.0, num_preemptions=1, preemptions=SHORT, stalls=[stall("step")], adapter=LOADED)
    answer = report(record(adapter="sql"), [history], {5: "cmpl-first"}, True)
    times = [event["at_s"] for event in answer["timeline"]]
    assert times == sorted(times) and times[0] == 0.0
    names = [event["event"] for event in answer["timeline"]]
    assert names == [
        "received", "validated", "sent to the engine", "queued", "waits for adapter", "began to run", "prefill",
        "first token", "preempted", "stall", "runs again", "ended", "answered",
    ]  # fmt: skip
    assert answer["timeline"][3] == {
        "at_s": 0.01, "event": "queued", "running": 4, "waiting": 2, "behind": ["cmpl-first"],
    }  # fmt: skip
    assert answer["timeline"][4] == {
        "at_s": 0.01, "event": "waits for adapter", "adapter": "sql", "awaits": "its load", "seconds": 4.0,
    }  # fmt: skip
    assert (answer["seconds"]["adapter"], answer["seconds"]["adapter_load"]) == (5.0, 4.0)
    assert answer["engine"][0]["adapter"]["waits"] == [{"awaited": "load", "at_s": 0.01, "end_s": 4.01}]
    assert answer["seconds"]["queued"] == 1.0 and answer["seconds"]["preempted"] == 3.0
    assert answer["engine"][0]["began_s"] == 1.01
