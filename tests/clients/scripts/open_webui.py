"""Open WebUI with the variables of its container: it lists the model, and streamed chats equal whole answers.

Prints the answer. Its first account is the administrator's, which is made here; nothing of it is kept but its data
directory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

STARTS_S = 240


def ask(url: str, body: dict[str, Any] | None = None, token: str = "") -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
        return response.read()


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTS_S
    while True:
        try:
            ask(f"{url}/health")
            return
        except (OSError, urllib.error.URLError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("error: Open WebUI does not start") from None
            time.sleep(0.5)


def pieces(stream: bytes) -> str:
    """The text of a stream of chunks."""
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line).get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = str(Path(sys.executable).with_name("open-webui"))
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [program, "serve", "--host", "127.0.0.1", "--port", port],
            env={**os.environ, "DATA_DIR": data, "WEBUI_SECRET_KEY": "secret", "OFFLINE_MODE": "true"},
            stdout=log,
            stderr=log,
        )
        try:
            wait_until_it_answers(url, process)
            account = {"name": "first", "email": "first@example.org", "password": "A-long-enough-1"}
            token = json.loads(ask(f"{url}/api/v1/auths/signup", account))["token"]
            (model,) = (each["id"] for each in json.loads(ask(f"{url}/api/models", token=token))["data"])
            question = {"role": "user", "content": "What does os.path.join do?"}
            body = {"model": model, "messages": [question], "temperature": 0, "max_tokens": 48}
            whole = json.loads(ask(f"{url}/api/chat/completions", body, token))["choices"][0]["message"]["content"]
            streamed = pieces(ask(f"{url}/api/chat/completions", {**body, "stream": True}, token))
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            process.terminate()
            process.wait(60)
    if whole != streamed:
        raise SystemExit(f"error: streamed {streamed!r}, whole {whole!r}")
    print(whole)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
