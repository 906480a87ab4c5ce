"""Greedy text of a GGUF file by Oarlock and by llama.cpp's server, prompt by prompt: how many tokens are the same.

    python -m benchmarks.gguf_text MODEL.gguf --llama-server PATH [--tokens 32] [--dtype float32]

Both round inputs of products to 8 bits, each in its own way, so texts of quantised files may part at near-ties; texts
of F32 and F16 files should not. Needs a build of llama.cpp; `make test` does not run it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.e2e.conftest import PROMPTS
from tests.e2e.running import command, environment, free_port

_READY_WITHIN_S = 120.0


@contextmanager
def served(arguments: list[str], port: int, env: dict[str, str] | None) -> Generator[str]:
    """The address of a server while it runs."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _READY_WITHIN_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"did not start: {' '.join(arguments)}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def texts(url: str, prompts: list[list[int]], tokens: int) -> list[str]:
    """Greedy continuations of prompts of token ids."""
    body = {"temperature": 0, "max_tokens": tokens, "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"]}
    found = []
    for prompt in prompts:
        answer = httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=120)
        answer.raise_for_status()
        found.append(answer.json()["choices"][0]["text"])
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_text")
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="auto", help="Oarlock's; llama.cpp computes in float32")
    given = parser.parse_args(arguments)
    port = free_port()
    with served(command("serve", given.model, "--port", port, "--dtype", given.dtype), port, environment()) as url:
        prompts = [httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"] for text in PROMPTS]
        ours = texts(url, prompts, given.tokens)
    port = free_port()
    theirs_command = [str(given.llama_server), "-m", str(given.model), "--port", str(port), "-c", "2048", "-np", "1"]
    with served(theirs_command, port, None) as url:
        own = [httpx.post(f"{url}/tokenize", json={"content": text}).json()["tokens"] for text in PROMPTS]
        theirs = texts(url, prompts, given.tokens)
    same = [one == other for one, other in zip(ours, theirs, strict=True)]
    alike = sum(_alike(one, other) for one, other in zip(ours, theirs, strict=True))
    print(f"{given.model.name}: {sum(same)} of {len(same)} texts are the same, {alike / len(same):.0%} of characters")
    print(f"prompts with the same ids: {sum(a == b for a, b in zip(prompts, own, strict=True))} of {len(prompts)}")
    return 0


def _alike(one: str, other: str) -> float:
    """The share of characters before the first that differs."""
    length = max(len(one), len(other), 1)
    first = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    return 1.0 if one == other else first / length


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
