"""curl, as people paste it: each line goes through a shell, and its answer is checked."""

from __future__ import annotations

import json
import subprocess

from reporter import Report, arguments, expect

JSON = "-H 'Content-Type: application/json'"
CHAT = '"messages": [{"role": "user", "content": "What does os.path.join do?"}]'


def curl(line: str) -> str:
    """Run `curl LINE` in a shell and return its output."""
    done = subprocess.run(f"curl -sS --max-time 60 {line}", shell=True, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stderr)
    return done.stdout


def answers(report: Report, url: str) -> None:
    with report.exercise("a completion"):
        answer = json.loads(curl(f"""{url}/v1/completions {JSON} -d '{{"prompt": "import ", "max_tokens": 5}}'"""))
        expect(answer["choices"][0]["text"], answer)
    with report.exercise("a conversation, streamed with -N, ending in [DONE]"):
        body = f'{{{CHAT}, "stream": true, "max_completion_tokens": 9}}'
        lines = [line for line in curl(f"-N {url}/v1/chat/completions {JSON} -d '{body}'").splitlines() if line]
        expect(lines[-1] == "data: [DONE]" and lines[0].startswith("data: {"), lines)
    with report.exercise("a body from a file, HTTP/1.0 and chunked"):
        body = """printf '{"prompt": "import ", "max_tokens": 2}'"""
        for extra in ("--http1.0", "-H 'Transfer-Encoding: chunked'", "-H 'Expect: 100-continue'"):
            line = f"{extra} {url}/v1/completions {JSON} --data-binary @-"
            answer = subprocess.run(f"{body} | curl -sS {line}", shell=True, capture_output=True, text=True, check=True)
            expect(json.loads(answer.stdout)["usage"]["completion_tokens"] <= 2, answer.stdout)
    with report.exercise("tokenize and detokenize there and back, with and without /v1"):
        for prefix in ("", "/v1"):
            answer = json.loads(curl(f"""{url}{prefix}/tokenize {JSON} -d '{{"prompt": "import os"}}'"""))
            body = json.dumps({"tokens": answer["tokens"]})
            back = json.loads(curl(f"{url}{prefix}/detokenize {JSON} -d '{body}'"))
            expect(back["prompt"] == "import os" and answer["count"] == len(answer["tokens"]), (answer, back))


def about(report: Report, url: str) -> None:
    with report.exercise("probes, version, models, capabilities, load, metrics, OpenAPI and its page"):
        for path in ("/health", "/health/live", "/health/ready", "/version", "/metrics", "/load", "/docs"):
            status = curl(f"-o /dev/null -w '%{{http_code}}' {url}{path}")
            expect(status == "200", f"{path}: {status}")
        for path in ("/v1/models", "/v1/capabilities", "/openapi.json"):
            expect(isinstance(json.loads(curl(f"{url}{path}")), dict), path)
    with report.exercise("--fail on errors, four keys in the body, a request id back"):
        done = subprocess.run(["curl", "-sSf", f"{url}/v1/nothing"], capture_output=True, text=True, check=False)
        expect(done.returncode == 22, done)
        body = """'{"prompt": "x", "temperature": 3}'"""
        answer = curl(f"-i -H 'X-Request-Id: mine-2' {url}/v1/completions {JSON} -d {body}")
        expect(" 400 " in answer.splitlines()[0] and "x-request-id: mine-2" in answer.lower(), answer)
        error = json.loads(answer[answer.index("{") :])
        expect(set(error) == {"error"} and set(error["error"]) == {"message", "type", "param", "code"}, error)
    with report.exercise("without a content type of JSON: refused"):
        answer = curl(f"""-o /dev/null -w '%{{http_code}}' {url}/v1/completions -d '{{"prompt": "x"}}'""")
        expect(answer == "415", answer)


def main() -> int:
    given = arguments()
    report = Report()
    answers(report, given.url)
    about(report, given.url)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
