"""The engine's loop and LoRA adapters: replies to their messages, in the order of events, and an idle loop that
loads."""

import pytest

from oarlock.engine.core import event_loop
from oarlock.engine.errors import RequestError
from oarlock.engine.ipc.messages import AdapterDone, Adapters, AddAdapter, AskAdapters, Events, Refused, RemoveAdapter
from oarlock.engine.lora.registry import FAILED, IN_USE, UNKNOWN, UNLOADED
from oarlock.engine.types import AdapterInfo, FinishReason
from tests.unit.engine.core.test_event_loop import Harness
from tests.unit.engine.engine_fakes import expected_tokens, make_request, root_of

A, B = (bytes([number] * 16).hex() for number in (1, 2))


@pytest.fixture(params=[1, 2])
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setattr(Harness, "depth", request.param)
    monkeypatch.setattr(event_loop, "POLL_S", 0.001)
    return Harness(max_loras=2)


def run_until_replies(harness: Harness, count: int) -> list[AdapterDone]:
    """Run the loop as `run` does, until `count` replies about adapters have come."""
    for _ in range(1000):
        is_idle = not harness.loop.tick()
        replies = [message for message in harness.receive() if isinstance(message, AdapterDone)]
        if len(replies) >= count:
            return replies
        if is_idle:
            harness.loop._wait()
    raise AssertionError("no reply")


def test_an_idle_engine_loads_and_replies(harness: Harness) -> None:
    harness.send(AddAdapter(1, "a", A, "/a"), AddAdapter(2, "b", B, "/broken"), AddAdapter(3, "a", B, "/b"))
    replies = {reply.number: reply for reply in run_until_replies(harness, 3)}
    assert replies[1].read() == 0
    for number, code in ((2, FAILED), (3, IN_USE)):
        with pytest.raises(RequestError) as caught:
            replies[number].read()
        assert caught.value.code == code
    harness.send(AddAdapter(4, "a", A, "/a"), AskAdapters(5))
    assert run_until_replies(harness, 4)[-1] == AdapterDone(4)
    (listed,) = [message for message in harness.receive() if isinstance(message, Adapters)]
    assert listed.adapters == [AdapterInfo("a", A, "/a", "ready", 0, 0)]
    harness.check_idle()


def test_unloading_ends_requests_before_the_reply(harness: Harness) -> None:
    harness.send(AddAdapter(1, "a", A, "/a"))
    requests = [make_request(number, [number, 2], max_tokens=30, adapter="a") for number in (1, 2)]
    harness.ask(*requests)
    run_until_replies(harness, 1)
    harness.ask(make_request(3, [1], max_tokens=30))
    for _ in range(8):
        harness.loop.tick()
    harness.send(RemoveAdapter(2, "a"), RemoveAdapter(3, "a"))
    harness.ask(make_request(4, [1], adapter="a"))
    harness.run_until_idle()
    removed, unknown = run_until_replies(harness, 3)[1:]
    assert removed.read() == 2 and unknown.code == UNKNOWN
    received = harness.receive()
    place = received.index(removed)
    ends = {1: UNLOADED, 2: UNLOADED}
    before = [event for message in received[:place] if isinstance(message, Events) for event in message.read()]
    assert {event.request_id: event.error_code for event in before if event.finish_reason} == ends
    assert harness.ends()[3].finish_reason is FinishReason.LENGTH
    for request in requests:
        tokens = harness.tokens(request.request_id)
        assert tokens and tokens == expected_tokens(request, root=root_of(A))[: len(tokens)]
    (refused,) = [message for message in received if isinstance(message, Refused)]
    assert (refused.request_id, refused.code) == (4, UNKNOWN)
    harness.check_idle()


def test_unloading_ends_a_load_that_is_awaited(harness: Harness) -> None:
    harness.send(AddAdapter(1, "a", A, "/a"), RemoveAdapter(2, "a"), AddAdapter(3, "a", B, "/b"))
    replies = {reply.number: reply for reply in run_until_replies(harness, 3)}
    assert replies[1].code == FAILED and replies[2] == AdapterDone(2) and replies[3] == AdapterDone(3)
    harness.ask(make_request(1, [1, 2], adapter="a"))
    harness.run_until_idle()
    assert harness.tokens(1) == expected_tokens(make_request(1, [1, 2]), root=root_of(B))


def test_an_engine_without_adapters_says_so() -> None:
    harness = Harness()
    harness.send(AddAdapter(1, "a", A, "/a"), AskAdapters(2))
    harness.run_until_idle()
    refused, listed = harness.receive()
    assert isinstance(refused, AdapterDone) and refused.param == "lora_name" and listed == Adapters(2, [])
