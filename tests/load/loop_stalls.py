"""How long one large body, or one large answer, keeps everyone else waiting: /health is asked all the while.

    python -m tests.load.loop_stalls [--rounds N] [--only NAME ...]

The demo model is served with a context of 400,000 tokens, so that large requests are not refused early. The
first row is the machine's own share: /health beside two processes that only compute. A wait that is longer than that
row's is caused by the server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.e2e.running import DEMO, ROOT, RunningServer

CONTEXT = 400_000  # tokens
MEGABYTE = 10**6
BUSY = "(two busy processes)"
_COMPUTE = "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
_SEND = (
    "import sys, httpx\n"
    "body = open(sys.argv[2], 'rb').read()\n"
    "answer = httpx.post(sys.argv[1], content=body, headers={'Content-Type': 'application/json'}, timeout=300)\n"
    "print(answer.status_code, len(answer.content))"
)
_IDS = [(i * 7) % 4000 for i in range(MEGABYTE)]


def cases() -> dict[str, tuple[str, bytes]]:
    """Cases by name: route and body."""
    chat = {"messages": [{"role": "user", "content": "word " * 60}] * 4000}
    return {
        "body: numbers of 299 digits": (
            "/v1/completions",
            b'{"prompt":"x","max_tokens":1,"y":[' + b",".join([b"1" * 299] * 50_000) + b"]}",
        ),
        "body: 15 MB of text": ("/v1/completions", b'{"prompt":"' + b"word " * (3 * MEGABYTE) + b'"}'),
        "body: a million ids": ("/v1/completions", json.dumps({"prompt": _IDS}).encode()),
        "body: a million empty lists": (
            "/v1/completions",
            b'{"prompt":"x","max_tokens":1,"y":[' + b",".join([b"[]"] * MEGABYTE) + b"]}",
        ),
        "body: 300,000 unknown fields": (
            "/v1/completions",
            b'{"prompt":"x","max_tokens":1,' + b",".join(b'"k%d":0' % i for i in range(300_000)) + b"}",
        ),
        "answer: tokens with their texts": (
            "/tokenize",
            json.dumps({"prompt": "a b c " * 60_000, "return_token_strs": True}).encode(),
        ),
        "answer: text of a million ids": ("/detokenize", json.dumps({"tokens": _IDS}).encode()),
        "answer: 500 prompts of 2,000 ids": (
            "/v1/completions/render",
            json.dumps({"prompt": [_IDS[:2000]] * 500}).encode(),
        ),
        "answer: chat of 4,000 messages": ("/v1/chat/completions/render", json.dumps(chat).encode()),
    }


def with_long_context(folder: Path) -> Path:
    """The demo model as one that was trained for `CONTEXT` tokens."""
    for file in DEMO.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


def longest_wait_ms(server: RunningServer, processes: list[subprocess.Popen[str]]) -> float:
    """Longest wait for /health, asked again two milliseconds after each answer until the processes have ended."""
    longest = 0.0
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        while any(process.poll() is None for process in processes):
            begun = time.perf_counter()
            client.get("/health").raise_for_status()
            longest = max(longest, time.perf_counter() - begun)
            time.sleep(0.002)
    return 1e3 * longest


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def measure(server: RunningServer, name: str, folder: Path, rounds: int) -> str:
    """One row: the longest wait of each round, and what was answered."""
    waits, answer = [], ""
    for _ in range(rounds):
        if name == BUSY:
            processes = [start(_COMPUTE), start(_COMPUTE)]
        else:
            path, body = cases()[name]
            (folder / "body.json").write_bytes(body)
            processes = [start(_SEND, server.url + path, str(folder / "body.json"))]
        waits.append(longest_wait_ms(server, processes))
        answer = "; ".join(filter(None, (process.communicate()[0].strip() for process in processes)))
    return f"{name:<34} {sorted(waits)[len(waits) // 2]:7.0f} {max(waits):7.0f}  {answer}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names hold one of these")
    args = parser.parse_args(argv)
    names = [name for name in [BUSY, *cases()] if not args.only or any(part in name for part in args.only)]
    with tempfile.TemporaryDirectory(prefix="oarlock-stalls-") as made:
        folder = Path(made)
        (folder / "model").mkdir()
        model = with_long_context(folder / "model")
        flags = ("--max-model-len", CONTEXT, "--kv-cache-memory", "2GiB", "--dtype", "float32")
        with RunningServer(model, *flags) as server:
            print(f"{'longest wait of /health, ms':<34} {'median':>7} {'most':>7}  status and bytes of the answer")
            for name in names:
                print(measure(server, name, folder, args.rounds), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
