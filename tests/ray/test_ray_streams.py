"""Events, errors and the number of replicas, without Ray: what is sent when a replica is gone, and what is not."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from oarlock_ray import policy
from oarlock_ray.lost_replica import CODE, LostReplica, WholeEvents, error_event, middlewares
from starlette.middleware import Middleware

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
JSON_START = {**START, "headers": [(b"content-type", b"application/json")]}
EVENT = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b""}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_events_come_out_whole_and_unchanged(size):
    stream = b'data: {"a": 1}\n\n: ping\n\ndata: two\ndata: lines\n\nhalf of o'
    cut = WholeEvents()
    out = [cut.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert all(piece.endswith(b"\n\n") for piece in out if piece)
    assert b"".join(out) + cut.rest() == stream and cut.rest() == b"half of o"


def through(*messages, scope="http", path="/v1/completions"):
    """Messages that the client gets when these come through the proxy, and then no more."""
    got = []

    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    async def send(message):
        got.append(message)

    asyncio.run(LostReplica(app)({"type": scope, "path": path}, None, send))
    return got


@pytest.mark.parametrize(
    "messages",
    [(START, EVENT, END), (JSON_START, END), (JSON_START, EVENT)],
    ids=["events", "plain", "plain, broken off"],
)
def test_complete_streams_and_plain_bodies_pass_unchanged(messages):
    assert through(*messages) == list(messages)


def test_events_that_break_off_end_in_an_error_event_and_the_end_mark():
    *before, last = through(START, EVENT)
    assert before == [START, EVENT] and not last.get("more_body")
    assert last["body"] == error_event(json.loads(last["body"].split(b"\n")[0][6:])["error"]["message"], CODE)
    assert last["body"].endswith(b"\n\ndata: [DONE]\n\n")
    error = json.loads(last["body"].split(b"\n")[0][6:])["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == "replica_lost"


def test_a_request_without_any_answer_is_a_503_that_clients_send_again():
    start, body = through()
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["type"] == "server_error"


def own_error(status, text, *headers):
    start = {"type": "http.response.start", "status": status, "headers": [[b"content-type", b"text/plain"], *headers]}
    return start, {"type": "http.response.body", "body": text}


@pytest.mark.parametrize(
    ("status", "headers", "kind", "code", "wait"),
    [
        (404, [], "invalid_request_error", "route_not_found", None),
        (408, [], "invalid_request_error", "timeout", None),
        (429, [[b"retry-after", b"7"]], "rate_limit_error", "queue_full", b"7"),
        (503, [], "server_error", "no_replica", b"1"),
    ],
)
def test_plain_text_errors_of_ray_get_the_error_format(status, headers, kind, code, wait):
    start, body = through(*own_error(status, b"Words of Ray's.", *headers))
    found = dict(start["headers"])
    assert start["status"] == status and found.get(b"retry-after") == wait
    assert found[b"content-type"] == b"application/json" and int(found[b"content-length"]) == len(body["body"])
    error = {"message": "Words of Ray's.", "type": kind, "param": None, "code": code}
    assert json.loads(body["body"]) == {"error": error}


def test_rays_own_routes_and_json_errors_of_replicas_are_not_changed():
    draining = own_error(503, b"This node is being drained.")
    assert through(*draining, path="/-/healthz") == list(draining)
    refused = {**JSON_START, "status": 429}
    assert through(refused, END) == [refused, END]


def test_other_protocols_are_not_changed():
    assert through(scope="websocket") == []


def test_the_callback_is_what_ray_asks_for():
    assert [type(one) for one in middlewares()] == [Middleware, Middleware]


@pytest.mark.parametrize(
    ("current", "waiting", "running", "wanted"),
    [
        (1, 0, 8, 1),  # full, and none waits
        (1, 1, 8, 1),
        (1, 2, 8, 2),
        (1, 20, 8, 4),
        (2, 2, 16, 2),
        (2, 3, 4, 3),  # waiting for something else than a slot: one more
        (3, 0, 12, 2),
        (3, 0, 13, 3),  # two would be more than 3/4 full
        (3, 0, 0, 0),  # Serve keeps min_replicas
    ],
)
def test_the_number_of_replicas_follows_the_queues(current, waiting, running, wanted):
    assert policy.desired_replicas(current, waiting, running, 8, waiting_per_replica=1, fill=0.75) == wanted


def context(current, queued=0, **metrics):
    by_replica = {name: dict(enumerate(values)) for name, values in metrics.items()}
    return SimpleNamespace(
        current_num_replicas=current, target_num_replicas=7, total_queued_requests=queued, aggregated_metrics=by_replica
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (context(2, slots=[8, 8], waiting=[3, 1], running=[8, 8]), 3),
        (context(2, queued=30, slots=[8, 8], waiting=[0, 0], running=[8, 8]), 6),
        (context(2, slots=[8, 8], waiting=[0, 0], running=[1, 0]), 1),
        (context(2), 7),  # no replica has said anything yet
        (context(0, slots=[]), 7),
    ],
)
def test_serves_context_is_summed_up(given, wanted):
    assert policy.QueueLength()(given) == (wanted, {})


@pytest.mark.parametrize("given", [{"fill": 0}, {"fill": 1.5}, {"waiting_per_replica": -1}])
def test_numbers_of_the_policy_that_mean_nothing_are_refused(given):
    with pytest.raises(ValueError, match=r"error: policy_kwargs: .*\nfix: For example: "):
        policy.QueueLength(**given)


def test_the_load_is_summed_over_engines():
    text = (
        "# HELP vllm:num_requests_waiting w\n"
        'vllm:num_requests_waiting{engine="0",model_name="a"} 2.0\nvllm:num_requests_waiting{engine="1"} 3.0\n'
        'vllm:num_requests_running{engine="0"} 4.0\nvllm:num_requests_running_other 9.0\n'
    )
    assert policy.load_of(text) == {"waiting": 5.0, "running": 4.0}
