"""A grammar whose masks take long delays no other client, and its own request ends with one clear error."""

import threading
import time

import httpx
import pytest

from tests.e2e.running import DEMO, RunningServer

HOSTILE = {
    "lark": "start: s\ns: s s | /./ | ",
    "ebnf": 'root ::= s\ns ::= s s | . | ""',
}


@pytest.mark.soak
@pytest.mark.parametrize("notation", HOSTILE)
def test_a_slow_grammar_delays_nobody_else(notation: str) -> None:
    """Another client waited for over a minute."""
    with RunningServer(DEMO) as server:
        body = {"prompt": "x", "max_tokens": 400, "n": 64, "temperature": 1.5, "seed": 1}
        body["structured_outputs"] = {"grammar": HOSTILE[notation]}
        answers: list[httpx.Response] = []
        attack = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)),
            daemon=True,
        )
        attack.start()
        waits = []
        while attack.is_alive():
            begun_s = time.monotonic()
            answer = server.client.post("/v1/completions", json={"prompt": "Q: What is it?\nA:", "max_tokens": 8})
            assert answer.status_code == 200
            waits.append(time.monotonic() - begun_s)
        error = answers[0].json()["error"]
        assert answers[0].status_code == 400 and error["code"] == "grammar_failed"
        assert error["param"] == "structured_outputs" and "\n" not in error["message"]
        assert len(waits) > 3 and max(waits) < 5.0, waits
        assert "Traceback" not in server.log
