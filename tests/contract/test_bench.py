"""`oarlock bench serve` against our server in this process, and against one that fails in every way a server can."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.bench import metrics
from oarlock.server.bench.serve import ServePlan, measure
from oarlock.server.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MODELS = b'{"data": [{"id": "m", "vocab_size": 4096}]}'
TEXT = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
END = (
    b'data: {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


def ids(request):
    """Answer with as many tokens as are asked for, one id per event."""
    return [300 + number for number in range(request.params.max_tokens)]


# ---------------------------------------------------------------------- ours
@pytest.fixture
def ours(make_server):
    return make_server(ids, eos=False)


def test_ids_in_a_closed_loop(ours):
    plan = ServePlan(ours.url, concurrency=4, num_requests=20, input_tokens=33, output_tokens=7)
    result = measure(plan)
    found = result.summary
    assert (found["completed"], found["failed"], found["peak_concurrency"]) == (20, 0, 4)
    assert (found["input_tokens"], found["output_tokens"]) == (20 * 33, 20 * 7)
    assert all(len(sample.itl_s) == 6 and sample.ttft_s > 0 for sample in result.samples)
    assert "token ids" in result.settings["prompts"] and result.settings["model"] == "demo"
    asked = ours.stage.engine.requests
    assert len(asked) == 1 + 1 + 20  # the probe, the warm-up, the run
    assert all(len(request.prompt_token_ids) == 33 for request in asked[1:])
    assert len({request.prompt_token_ids for request in asked}) == 22
    assert {request.params.eos_token_ids for request in asked} == {()}


def test_text_of_exact_length_on_both_endpoints(ours):
    for endpoint in ("completions", "chat"):
        plan = ServePlan(ours.url, endpoint=endpoint, prompt_form="text", num_requests=3, input_tokens=90)
        result = measure(ServePlan(**(plan_fields(plan) | {"output_tokens": 5})))
        assert {sample.input_tokens for sample in result.samples} == {90}
        assert result.summary["output_tokens"] == 15 and "words" in result.settings["prompts"]


def plan_fields(plan):
    return {name: getattr(plan, name) for name in plan.__slots__}


@pytest.mark.slow
def test_an_open_loop_sends_at_its_times(ours):
    plan = ServePlan(
        ours.url, request_rate=100, num_requests=40, input_tokens=8, output_tokens=2, goodput={"ttft": 1e9}
    )
    result = measure(plan)
    assert result.summary["completed"] == 40
    assert max(sample.scheduled_s for sample in result.samples) == pytest.approx(0.4)
    assert all(sample.sent_s >= sample.scheduled_s - 1e-3 for sample in result.samples)
    assert result.summary["goodput"] == result.summary["request_throughput"]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_turns_carry_the_conversation(ours, tokenizer, endpoint):
    plan = ServePlan(
        ours.url, endpoint=endpoint, workload="multi-turn", turns=3, num_requests=2, input_tokens=40, output_tokens=4,
        concurrency=1, warmup=0,
    )  # fmt: skip
    result = measure(plan)
    assert result.summary["completed"] == 6
    asked = [tokenizer.decode(request.prompt_token_ids) for request in ours.stage.engine.requests[-3:]]
    answer = tokenizer.decode([300, 301, 302, 303])
    assert asked[0].strip()[-20:] in asked[1] and answer in asked[1]
    assert asked[2].count(answer) == 2
    lengths = [sample.input_tokens for sample in result.samples[:3]]
    assert lengths[0] < lengths[1] < lengths[2]


def test_a_shared_prefix_and_a_trace(ours, tmp_path):
    plan = ServePlan(ours.url, workload="shared-prefix", prefix_tokens=64, num_requests=4, input_tokens=9, warmup=0)
    measure(plan)
    prompts = [request.prompt_token_ids for request in ours.stage.engine.requests[-4:]]
    assert len({prompt[:64] for prompt in prompts}) == 1 and {len(prompt) for prompt in prompts} == {73}
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 50 * n, "input_length": 20 + n, "output_length": 1 + n} for n in range(4)]
    file.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.json"
    arguments = ["--workload", "trace", "--trace", str(file), "--trace-speed", "5", "--output", str(out)]
    assert main(["bench", "serve", ours.url, *arguments]) == 0
    requests = json.loads(out.read_text())["requests"]
    assert sorted((each["input_tokens"], each["output_tokens"]) for each in requests) == [
        (20, 1), (21, 2), (22, 3), (23, 4),
    ]  # fmt: skip
    assert max(each["scheduled_s"] for each in requests) == pytest.approx(0.03)


def test_the_whole_command_with_its_files(ours, tmp_path, capsys):
    out, page = tmp_path / "a.json", tmp_path / "a.html"
    arguments = ["--concurrency", "2", "--num-requests", "12", "--input-tokens", "8", "--output-tokens", "4"]
    assert main(["bench", "serve", ours.url, *arguments, "--output", str(out), "--html", str(page)]) == 0
    printed = capsys.readouterr()
    assert "12 completed, 0 failed" in printed.out and "TPOT" in printed.out
    assert printed.err == ""  # no bar where there is no terminal
    assert page.read_text().startswith("<!doctype html>")
    assert main(["bench", "compare", str(out), str(out), "--output", str(tmp_path / "c.json")]) == 0
    assert "no significant difference" in capsys.readouterr().out
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert {row["ratio"] for row in rows} <= {1, None}


def test_a_command_line_of_vllm_bench_runs_as_it_is(ours, tmp_path, capsys):
    line = (
        f"--backend openai-chat --endpoint /v1/chat/completions --base-url {ours.url} --dataset-name random "
        "--random-input-len 40 --random-output-len 4 --num-prompts 6 --max-concurrency 2 --request-rate inf --seed 1 "
        f"--ignore-eos --percentile-metrics ttft,tpot --save-result --result-dir {tmp_path} --result-filename r.json"
    )
    assert main(["bench", "serve", *line.split()]) == 0
    printed = capsys.readouterr()
    assert "6 completed, 0 failed" in printed.out and "note: --save-result: " in printed.err
    found = json.loads((tmp_path / "r.json").read_text())
    assert {(each["input_tokens"], each["output_tokens"]) for each in found["requests"]} == {(40, 4)}


# ---------------------------------------------------------------------- one that fails
class Failing:
    """A server on a loopback port: `/v1/models` is right, and `answer(socket, number)` does the rest."""

    def __init__(self, answer, models=MODELS):
        self.numbers = iter(range(10**6))
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                while True:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        piece = self.request.recv(65536)
                        if not piece:
                            return
                        head += piece
                    begin, _, body = head.partition(b"\r\n\r\n")
                    length = next(int(x.split(b":")[1]) for x in begin.split(b"\r\n") if x[:15] == b"Content-Length:")
                    while len(body) < length:
                        body += self.request.recv(65536)
                    if b"/v1/models" in begin:
                        self.request.sendall(whole(models))
                    elif answer(self.request, next(outer.numbers)) is False:
                        return

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, block_on_close = True, False

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def failing():
    opened = []

    def make(*args, **options):
        opened.append(Failing(*args, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def whole(body, status=b"200 OK"):
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def begin(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")


def chunk(connection, data):
    connection.sendall(b"%x\r\n%b\r\n" % (len(data), data))


def good(connection):
    begin(connection)
    chunk(connection, TEXT)
    chunk(connection, END)
    connection.sendall(b"0\r\n\r\n")


def cut_off(connection):
    begin(connection)
    chunk(connection, TEXT)
    return False


def ends_without_end(connection):
    connection.sendall(whole(TEXT))


def error_event(connection):
    connection.sendall(whole(TEXT + b'data: {"error": {"message": "rank 1 was killed"}}\n\ndata: [DONE]\n\n'))


def refuses(connection):
    connection.sendall(whole(b'{"error": {"message": "the queue is full"}}', b"429 Too Many Requests"))


def nothing(connection):
    connection.sendall(whole(b"data: [DONE]\n\n"))


def not_http(connection):
    connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")
    return False


def not_json(connection):
    connection.sendall(whole(b"data: oops\n\ndata: [DONE]\n\n"))


def wait_until_left(connection):
    with contextlib.suppress(OSError):
        connection.recv(1)


def hangs(connection):
    begin(connection)
    chunk(connection, TEXT)
    wait_until_left(connection)
    return False


FAULTS = {
    cut_off: ("stream ended early", "after 1 chunks: the server closed the connection"),
    ends_without_end: ("stream ended early", "without finish_reason"),
    error_event: ("error event", "rank 1 was killed"),
    refuses: ("HTTP 429", "the queue is full"),
    nothing: ("no chunk", "no chunk"),
    not_http: ("malformed response", ""),
    not_json: ("malformed response", "oops"),
    hangs: ("timed out", "4 s"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.slow
def test_every_failure_is_counted_by_its_cause(failing, capsys, fault):
    # The first two are the probe and the warm-up; then every third fails.
    server = failing(lambda connection, n: fault(connection) if n > 1 and n % 3 == 0 else good(connection))
    limit = "4" if fault is hangs else "60"
    arguments = ["--num-requests", "9", "--output-tokens", "2", "--input-tokens", "16"]
    arguments += ["--timeout", limit, "--concurrency", "9"]
    assert main(["bench", "serve", server.url, *arguments]) == 1
    printed = capsys.readouterr().out
    cause, detail = FAULTS[fault]
    assert "6 completed, 3 failed" in printed
    line = next(line for line in printed.splitlines() if line.startswith("     3  "))
    assert cause in line and detail in line


@pytest.mark.slow
def test_a_server_that_goes_away_is_not_asked_without_a_pause(failing):
    def answer(connection, number):
        good(connection)
        if number == 4:
            server.close()
            return False
        return None

    server = failing(answer)
    result = measure(ServePlan(server.url, concurrency=1, duration=1.0, output_tokens=2, input_tokens=16))
    assert set(result.failures) == {"connection failed"}
    assert 1 <= result.failures["connection failed"]["count"] <= 20
    assert result.summary["completed"] == 3


@pytest.mark.slow
def test_a_kept_connection_that_the_server_closed_is_no_failure(failing):
    def answer(connection, number):
        good(connection)
        return False  # closed without saying so

    result = measure(ServePlan(failing(answer).url, num_requests=5, output_tokens=2, input_tokens=16))
    assert result.summary["completed"] == 5


@pytest.mark.slow
def test_a_failed_turn_ends_its_conversation(failing):
    server = failing(lambda connection, n: refuses(connection) if n == 4 else good(connection))
    plan = ServePlan(server.url, workload="multi-turn", turns=4, num_requests=2, output_tokens=2, warmup=0)
    result = measure(plan)  # two requests measure the words; of the first conversation, turn 3 fails
    assert {cause: found["count"] for cause, found in result.failures.items()} == {
        "HTTP 429": 1, "previous turn failed": 1,
    }  # fmt: skip
    assert result.summary["completed"] == 6


@pytest.mark.slow
def test_a_server_without_usage_is_noted(failing, capsys):
    answer = whole(TEXT + TEXT + b"data: [DONE]\n\n")
    server = failing(lambda connection, n: connection.sendall(answer))
    assert main(["bench", "serve", server.url, "--num-requests", "2", "--output-tokens", "2"]) == 0
    assert "does not report token counts" in capsys.readouterr().out


@pytest.mark.slow
def test_token_ids_that_are_refused_become_words(failing):
    def answer(connection, number):
        if number == 0:
            connection.sendall(whole(b'{"error": {"message": "prompt must be a string"}}', b"400 Bad Request"))
        else:
            good(connection)

    result = measure(ServePlan(failing(answer).url, num_requests=2, output_tokens=2))
    assert result.summary["completed"] == 2 and "words" in result.settings["prompts"]


@pytest.mark.parametrize(
    ("answer", "models", "cause", "fix"),
    [
        (refuses, MODELS, "the queue is full", "log"),
        (hangs, MODELS, "timed out", "--timeout"),
        (good, b"[]", "not the list", "URL"),
        (good, b'{"data": []}', "has no model 'm'", "Load a model"),
        (good, b'{"data": [{"id": "other"}]}', "has no model 'm'", "other"),
        (lambda c: c.sendall(whole(b"no key", b"401 Unauthorized")), MODELS, "no key", "OPENAI_API_KEY"),
        (lambda c: c.sendall(whole(b"ignore_eos?", b"400 Bad Request")), MODELS, "ignore_eos?", "--no-ignore-eos"),
        (lambda c: c.sendall(whole(b"no route", b"404 Not Found")), MODELS, "no route", "--endpoint"),
    ],
)
@pytest.mark.slow
def test_a_server_that_cannot_be_measured_is_explained(failing, answer, models, cause, fix):
    server = failing(lambda connection, n: answer(connection), models=models)
    with pytest.raises(StartupError) as error:
        measure(ServePlan(server.url, model="m", timeout=1 if answer is hangs else 60, num_requests=1))
    assert cause in error.value.cause and fix in error.value.fix


def test_no_server_at_all():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(StartupError, match="No server responds"):
            measure(ServePlan(f"http://127.0.0.1:{closed.getsockname()[1]}"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_ctrl_c_prints_the_figures_so_far(failing, tmp_path, number):
    def answer(connection, at):
        if at < 6:
            good(connection)
            return None
        reached.release()
        wait_until_left(connection)
        return False

    reached = threading.Semaphore(0)
    server, out = failing(answer), tmp_path / "out.json"
    command = [sys.executable, "-P", "-m", "oarlock", "bench", "serve", server.url, "--concurrency", "2"]
    command += ["--num-requests", "50", "--output-tokens", "2", "--output", str(out)]
    child = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert reached.acquire(timeout=60) and reached.acquire(timeout=60)  # both users wait, so the others have answers
    child.send_signal(number)
    printed, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "4 completed, 2 failed" in printed and "2  interrupted" in printed and "was interrupted" in printed
    assert errors == ""
    assert json.loads(out.read_text())["interrupted"] is True


@pytest.mark.slow
def test_a_terminal_gets_a_bar(failing):
    server = failing(lambda connection, n: refuses(connection) if n == 5 else good(connection))
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    command = [sys.executable, "-P", "-m", "oarlock", "bench", "serve", server.url, "--num-requests", "8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--output-tokens", "2"], env=environment, stdout=subprocess.PIPE, stderr=terminal, timeout=60
    )
    shown = os.read(master, 65536).decode()
    os.close(master)
    os.close(terminal)
    assert done.returncode == 1 and b"7 completed, 1 failed" in done.stdout
    assert "/8" in shown and "requests" in shown


def test_it_can_run_in_any_thread(ours):
    found = []
    plan = ServePlan(ours.url, num_requests=2, output_tokens=2, input_tokens=8)
    thread = threading.Thread(target=lambda: found.append(measure(plan)))
    thread.start()
    thread.join(60)
    assert found[0].summary["completed"] == 2


@pytest.mark.slow
def test_a_busy_client_is_noticed(ours):
    def block(sample):
        time.sleep(0.05)

    result = measure(ServePlan(ours.url, num_requests=10, output_tokens=2, input_tokens=8), block)
    assert result.client["lag_ms"]["max"] > 30
    assert metrics.summarize(result.samples, 1.0)["completed"] == 10
