"""`--batch-dir` with a real server that is killed in the middle of a batch, and the official client."""

from __future__ import annotations

import json
import signal

import openai
import pytest

from tests.e2e.running import DEMO, RunningServer, eventually

URL = "/v1/chat/completions"
BODIES = {
    f"r{number}": {
        "messages": [{"role": "user", "content": f"Explain {number}"}],
        "max_tokens": 24,
        "temperature": 1,
        "seed": number,
    }
    for number in range(60)
}


@pytest.mark.soak
def test_a_killed_server_goes_on_with_its_batch(tmp_path):
    flags = ("--max-num-seqs", 4, "--dtype", "float32", "--batch-dir", tmp_path)
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body}) + "\n"
        for name, body in BODIES.items()
    ]
    with RunningServer(DEMO, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        file = client.files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 10, 60, "ten answers")
        server.send(signal.SIGKILL)
        server.process.wait(60)
        eventually(lambda: not server.left_behind(), 60, "no process outlives the server")
    work = tmp_path / "work" / f"{batch.id}.output"
    before = work.read_bytes()
    assert 10 <= before.count(b"\n") < len(BODIES)
    with RunningServer(DEMO, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        ended = eventually(
            lambda: found if (found := client.batches.retrieve(batch.id)).status == "completed" else None,
            120,
            "its end",
        )
        assert ended.request_counts.completed == len(BODIES) and ended.error_file_id is None
        content = client.files.content(ended.output_file_id).content
        assert content.startswith(before[: before.rfind(b"\n") + 1]), "what was answered stays as it was"
        answers = {}
        for line in content.splitlines():
            answer = json.loads(line)
            assert answers.setdefault(answer["custom_id"], answer["response"]["body"]) is answer["response"]["body"]
        assert answers.keys() == BODIES.keys()
        for name in ("r0", "r30", "r59"):
            wanted = server.client.post(URL, json=BODIES[name]).json()
            assert answers[name]["choices"] == wanted["choices"]
        generated = sum(body["usage"]["completion_tokens"] for body in answers.values())
        assert ended.usage.output_tokens == generated
        client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        assert server.stop() == 0, "a batch does not hold up the end of a server"
