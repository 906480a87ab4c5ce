"""schemathesis over the server's OpenAPI document, from a separate environment.

Starts its command line and reads its JSON report; schemathesis itself chooses what it sends.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.clients.environments import prepare
from tests.clients.matrix import FUZZER

# What a schema can promise. Left out: that every valid body is accepted (a name that is not served is valid), and
# that every invalid one is refused (unknown fields are reported in a header instead).
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
# One thread: in CPython 3.11 two that parse sources at the same time end in a SystemError.
WORKERS, REQUEST_TIMEOUT_S, ENDS_WITHIN_S = 1, 60, 600


def run_schemathesis(url: str, seed: int, examples: int) -> list[str]:
    """The failures it reports, one line each. Bounded by examples for each operation, so a seed means a run."""
    interpreter, _ = prepare(FUZZER)
    with tempfile.TemporaryDirectory() as directory:
        command = [str(Path(interpreter[0]).with_name("st")), "run", f"{url}/openapi.json", "--no-color"]
        command += ["--checks", ",".join(CHECKS), "--workers", str(WORKERS), "--seed", str(seed)]
        command += ["--max-examples", str(examples), "--no-shrink"]
        command += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all", "--warnings", "off"]
        command += ["--request-timeout", str(REQUEST_TIMEOUT_S), "--generation-database", "none"]
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, check=False, timeout=ENDS_WITHIN_S
        )
    if done.returncode == 0:
        return []
    output = done.stdout + done.stderr
    print("".join(f"    | {line}\n" for line in output.splitlines() if line.strip()), flush=True)
    kinds = [line.strip() for line in output.splitlines() if line.startswith("- ")]
    return [f"schemathesis: {kind}" for kind in kinds] or [f"schemathesis exited with status {done.returncode}"]
