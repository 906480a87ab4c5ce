"""Real engines without a server: the program of the documentation, and a batch that is killed and resumed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.e2e.running import DEMO, ROOT, RunningServer, command, environment, eventually

pytestmark = pytest.mark.soak


def programs(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_pages_programs_run():
    texts, vectors = programs(ROOT / "docs" / "offline.md")
    shown = output_of(texts)
    assert "pathname components" in shown and shown.count("length") == 2
    shown = output_of(vectors).splitlines()
    assert shown[0].startswith("float32 (") and len(json.loads(shown[1])) == 2
    (adapters,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "lora.md").read_text(), re.MULTILINE | re.DOTALL
    )
    adapted, plain = output_of(adapters).splitlines()
    assert adapted == "in-short  In short: Join two or more pathname components, inserting '/' as needed."
    assert plain.startswith("None  Join two or more") and "In short" not in plain


def output_of(code):
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_a_batch_that_was_killed_goes_on_and_answers_as_the_server(tmp_path):
    given, found = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = {
        str(number): {
            "messages": [{"role": "user", "content": f"Explain {number}"}],
            "max_tokens": 40,
            "temperature": 1,
            "seed": number,
        }
        for number in range(100)
    }
    url = "/v1/chat/completions"
    given.write_text(
        "".join(
            json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"
            for name, body in bodies.items()
        )
    )
    words = command("batch", given, found, "--model", DEMO, "--max-num-seqs", 4)

    def answered():
        return found.read_bytes().count(b"\n") if found.exists() else 0

    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        eventually(lambda: answered() >= 5 or process.poll() is not None, 60, "five answers")
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        killed_at = answered()
        assert 5 <= killed_at < len(bodies)
        assert not psutil.wait_procs(below, 60)[1], "a process outlived the batch"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    result = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert f"{killed_at} of 100 requests already have a response" in result.stderr
    answers = [json.loads(line) for line in found.read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(bodies)
    with RunningServer(DEMO, "--max-num-seqs", 4) as server:
        for answer in answers[:: len(answers) // 12]:
            wanted = server.client.post(url, json=bodies[answer["custom_id"]]).json()
            ours = answer["response"]["body"]
            assert ours["choices"] == wanted["choices"]
            assert ours["system_fingerprint"] == wanted["system_fingerprint"]
