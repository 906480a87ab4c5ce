"""The `llm` command and library: a model from its YAML file, whole and streamed, and a tool that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from reporter import Report, arguments, expect

QUESTION = "What does os.path.join do?"
ANSWER = "The numbers are in the file."
TOOL = """
def shell(command: str) -> str:
    "Run a command."
    import subprocess

    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
"""


def run(directory: Path, *words: str) -> str:
    """Run `llm` with its own directory of settings and return its output; fail with its complaint."""
    command = [sys.executable, "-m", "llm", *words]
    env = os.environ | {"LLM_USER_PATH": str(directory)}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120, check=False)
    expect(done.returncode == 0, done.stderr[-300:])
    return done.stdout.strip()


def main() -> int:
    report, given = Report(), arguments()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        models = [
            {"model_id": name, "model_name": given.model, "api_base": f"{url}/v1", "supports_tools": True}
            for name, url in (("demo", given.url), ("scripted", given.scripted_url))
        ]
        (directory / "extra-openai-models.yaml").write_text(json.dumps(models))
        options = ("-o", "temperature", "0", "-o", "max_tokens", "120")
        with report.exercise("a prompt, whole and streamed alike"):
            whole = run(directory, "-m", "demo", "--no-stream", *options, QUESTION)
            expect(whole and whole == run(directory, "-m", "demo", *options, QUESTION), whole)
        with report.exercise("the conversation goes on"):
            expect(run(directory, "-m", "demo", "--continue", *options, "And on Windows?"), "no answer")
        with report.exercise("a tool runs, and its result is answered"):
            answer = run(directory, "-m", "scripted", "--functions", TOOL, "Write the numbers.")
            expect(answer == ANSWER, answer)
            expect((directory / "shell.txt").read_text() == "41\n42\n43\n", "the file is not there")
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
