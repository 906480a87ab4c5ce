"""Retries of the official client when it is asked to wait: 429 from a full server, 503 from one that is leaving.

Needs a server with room for one sequence of `LONG` tokens and 16 waiting ones, and permission to end it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import openai
from reporter import Report, answers_with_status, expect

NUM_WAITING = 16  # waiting sequences that the small server has room for, beside one that runs
LONG = 64_000  # tokens: more than are decoded while the server is filled


def exercise_retries(report: Report, url: str, pid: int, model: str) -> None:
    """Exercise a full server and then one that is leaving: after the second the server is gone."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        with report.exercise("a full server: RateLimitError with Retry-After, then the client's retries succeed"):
            _full(client, url, model)
        with report.exercise("a leaving server: 503 is retried, and open streams are finished"):
            _leaving(client, url, pid, model)


def _occupy(client: openai.OpenAI, model: str, choices: int, tokens: int) -> openai.Stream:
    """Open a stream whose choices fill the server; return it when the first token has come."""
    stream = client.completions.create(
        model=model, prompt="import ", n=choices, max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    return stream


def _fill(client: openai.OpenAI, model: str) -> list[openai.Stream]:
    """Open one stream that runs and as many as may wait, each a separate request: one alone leaves room for others."""
    streams = [_occupy(client, model, 1, LONG)]

    def wait_for_a_place() -> None:
        streams.append(client.completions.create(model=model, prompt="x", max_tokens=LONG, stream=True))

    threads = [threading.Thread(target=wait_for_a_place) for _ in range(NUM_WAITING)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expect(len(streams) == 1 + NUM_WAITING, f"{len(streams)} streams are open")
    return streams


def _full(client: openai.OpenAI, url: str, model: str) -> None:
    streams = _fill(client, model)
    try:
        client.completions.create(model=model, prompt="x", max_tokens=1)
    except openai.RateLimitError as error:
        expect(error.code == "queue_full", error)
        expect(int(error.response.headers["retry-after"]) >= 1, error.response.headers)
    else:
        raise AssertionError("a full server accepted a request")
    before = answers_with_status(url, 429)
    found: list[object] = []

    def patient() -> None:
        calls = client.with_options(max_retries=9).completions.with_raw_response
        found.append(calls.create(model=model, prompt="x", max_tokens=1))

    thread = threading.Thread(target=patient)
    thread.start()
    while answers_with_status(url, 429) == before and thread.is_alive():
        time.sleep(0.05)
    for stream in streams:
        stream.close()
    thread.join(120)
    expect(found, "the patient request did not succeed")
    expect(found[0].retries_taken >= 1, "the client was never asked to wait")  # type: ignore[attr-defined]


def _leaving(client: openai.OpenAI, url: str, pid: int, model: str) -> None:
    stream = _occupy(client, model, 12, LONG)
    os.kill(pid, signal.SIGTERM)
    while client_is_served(client):
        time.sleep(0.05)
    before = answers_with_status(url, 503)
    try:
        client.with_options(max_retries=1).completions.create(model=model, prompt="x", max_tokens=1)
    except openai.InternalServerError as error:
        expect(error.status_code == 503 and error.code == "server_draining", error)
        expect(int(error.response.headers["retry-after"]) >= 1, error.response.headers)
    else:
        raise AssertionError("a leaving server accepted a request")
    expect(answers_with_status(url, 503) - before == 2, "503 was not retried")
    expect(next(stream).choices, "the open stream was cut")
    stream.close()


def client_is_served(client: openai.OpenAI) -> bool:
    """Whether the server still answers other requests than those it has."""
    try:
        client.models.list()
    except openai.InternalServerError:
        return False
    return True
