"""guidellm: its load on both endpoints; every request must succeed, with the token counts that it asked for.

Its figures are not looked at here: they are the business of the load tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from reporter import Report, arguments, expect

PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS = 48, 12, 12


def run(given: Any, endpoint: str, profile: str, requests: int) -> list[dict[str, Any]]:
    """The benchmarks of one run of the command, as its JSON file has them."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
        command += ["--backend", f"kind=openai_http,target={given.url},model={given.model},request_format={endpoint}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={given.tokenizer}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
        command += ["--profile", profile, "--constraint", f"kind=max_requests,count={requests}"]
        command += ["--output", f"kind=json,path={out}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1000)
        expect(done.returncode == 0 and out.is_file(), (done.stdout + done.stderr)[-2000:])
        return json.loads(out.read_text())["benchmarks"]


def check(benchmarks: list[dict[str, Any]], requests: int) -> None:
    """Everything succeeded, with exactly the tokens that were asked for."""
    for benchmark in benchmarks:
        totals = benchmark["metrics"]["request_totals"]
        expect(totals["errored"] == 0 and totals["successful"] >= requests, totals)
        expect(benchmark["requests"]["successful"], "no requests are listed")
        for request in benchmark["requests"]["successful"]:
            seen = request["output_metrics"]["text_tokens"]
            expect(seen == OUTPUT_TOKENS, request["output_metrics"])


def main() -> int:
    given = arguments()
    report = Report()
    for endpoint in ("/v1/completions", "/v1/chat/completions"):
        with report.exercise(f"{endpoint}, 4 streams at once, {REQUESTS} requests, none failed"):
            check(run(given, endpoint, "kind=concurrent,streams=4", REQUESTS), REQUESTS)
    with report.exercise("/v1/completions, a sweep from one at a time to as many as go, none failed"):
        check(run(given, "/v1/completions", "kind=sweep,sweep_size=3", 6), 6)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
