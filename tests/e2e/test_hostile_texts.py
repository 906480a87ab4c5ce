"""Texts that cost far more than their size: refused by name, within the memory of a server that answers others."""

from __future__ import annotations

import threading
import time

import httpx
import psutil
import pytest

from tests.e2e.running import DEMO, RunningServer

SIZE = 15_000_000  # bytes of a text
MOVED_BYTES = 300 << 20  # at most, of all processes of the server, for each text
CUT = {"truncate_prompt_tokens": 10, "max_tokens": 1}
RENDERED = {"prompt": ["a"] * 1024, "stop": ["x" * 1024] * 16, "logit_bias": {str(token): 1 for token in range(1024)}}
ATTACKS = {  # path, body, and the field that the refusal names
    "letters": ("/tokenize", {"prompt": "a" * SIZE}, "prompt"),
    "digits": ("/tokenize", {"prompt": "1" * SIZE}, "prompt"),
    "accents": ("/tokenize", {"prompt": "\u0301" * (SIZE // 2)}, "prompt"),
    "letters that are cut": ("/v1/completions", {"prompt": "a" * SIZE, **CUT}, "prompt"),
    "accents that are cut": ("/v1/completions", {"prompt": "\u0301" * (SIZE // 2), **CUT}, "prompt"),
    "spaces": ("/tokenize", {"prompt": " " * 10_500_000 + "x"}, "prompt"),
    "words": ("/tokenize", {"prompt": "a 1 " * (SIZE // 4)}, "prompt"),
    "a conversation": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * SIZE}]}, "messages"),
    "ids": ("/detokenize", {"tokens": [3859] * 1_000_000}, "tokens"),
    "many prompts": ("/v1/completions/render", RENDERED, "prompt"),
}


def _memory(server: RunningServer) -> int:
    total = 0
    for process in server.processes():
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.mark.soak
def test_texts_that_cost_too_much_are_refused_and_others_are_answered():
    with RunningServer(DEMO) as server:
        server.complete("import ", max_tokens=4)
        waits, most = [], 0
        for name, (path, body, field) in ATTACKS.items():
            answers: list[httpx.Response] = []
            before = peak = _memory(server)

            def attack(path=path, body=body, answers=answers):
                answers.append(httpx.post(server.url + path, json=body, timeout=120))

            thread = threading.Thread(target=attack)
            thread.start()
            while thread.is_alive():
                begun = time.monotonic()
                server.complete("import ", max_tokens=4)
                waits.append(time.monotonic() - begun)
                peak = max(peak, _memory(server))
            assert answers[0].status_code == 400, (name, answers[0].text[:200])
            assert answers[0].json()["error"]["param"] == field, name
            most = max(most, peak - before)
            assert most < MOVED_BYTES, name
        last = threading.Thread(target=lambda: _ignoring(server.url, ATTACKS["letters"]))
        last.start()
        time.sleep(0.3)
        begun = time.monotonic()
        assert server.stop(within_s=8) == 0, "no thread holds up the end"
        waited_s = time.monotonic() - begun
        last.join()
        assert "Traceback" not in server.log and "panicked" not in server.log
    print(f"others: {max(waits):.2f} s at most; memory: {most >> 20} MiB more; end: {waited_s:.1f} s")


def _ignoring(url: str, attack: tuple) -> None:
    try:
        httpx.post(url + attack[0], json=attack[1], timeout=60)
    except httpx.HTTPError:
        return  # the server has ended
