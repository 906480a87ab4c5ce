"""The recording of a server that was killed without warning still replays to the same tokens."""

import contextlib
import subprocess
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.running import DEMO, ROOT, RunningServer, command, environment, free_port


def oarlock(*arguments, cwd=ROOT):
    return subprocess.run(command(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.soak
def test_a_killed_servers_recording_is_replayed_where_foreign_modules_lie(tmp_path, foreign, tp1):
    """The server has two pipeline stages, whose answers are those of one rank; one rank replays them."""
    file = tmp_path / "steps.rec"
    greedy = {"max_tokens": 8, "logprobs": 2, "temperature": 0}
    with RunningServer(DEMO, "--record", file, "--dtype", "float32", "-pp", 2, cwd=foreign) as server:
        with ThreadPoolExecutor(4) as pool:
            prompts = [f"Q: What does {name} do?\nA:" for name in ("os.getcwd", "json.dumps", "re.sub", "math.gcd")]
            sent = [pool.submit(server.complete, prompt, **greedy) for prompt in prompts]
            answers = [answer.result() for answer in sent]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts == [tp1.text(prompt, **greedy) for prompt in prompts]
        used = [answer["usage"] for answer in answers]
        for process in server.processes():  # its engine too, which would otherwise note in time that its server is gone
            with contextlib.suppress(psutil.NoSuchProcess):  # some end with the one before
                process.kill()
        server.process.wait(60)
    result = oarlock("replay", file, "-pp", 1, cwd=foreign)
    assert "recorded with 1 in each of 2 stages, replayed with 1" in result.stdout, result.stdout + result.stderr
    assert not (foreign / "it-ran").exists()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the server was killed" in result.stdout and "the same outputs" in result.stdout
    generated = sum(usage["completion_tokens"] for usage in used)
    row = next(line for line in result.stdout.splitlines() if line.split()[:1] == ["tokens"])
    compared, equal, different = map(int, row.split()[1:4])
    assert different == 0 and compared == equal >= generated


def test_a_recording_is_not_overwritten_at_a_start(tmp_path):
    file = tmp_path / "steps.rec"
    file.write_bytes(b"evidence")
    result = oarlock("serve", DEMO, "--record", file, "--port", free_port())
    assert result.returncode == 3 and "Traceback" not in result.stderr
    causes = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(causes) == 1 and "never overwritten" in causes[0]
    assert file.read_bytes() == b"evidence"


def test_a_file_that_is_not_a_recording_is_refused(tmp_path):
    result = oarlock("replay", DEMO / "config.json")
    assert result.returncode == 3 and "Traceback" not in result.stderr
    assert [line.split(":")[0] for line in result.stderr.strip().splitlines()] == ["error", "fix"]


def test_the_usage_of_replay():
    result = oarlock("replay", "--help")
    assert result.returncode == 0 and "--pipeline-parallel-size" in result.stdout and "--model" in result.stdout
    assert oarlock("replay").returncode == 2
