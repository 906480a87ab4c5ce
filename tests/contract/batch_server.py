"""A server with a directory of batches, on a socket, with OpenAI's client before it."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

import openai

from oarlock.server.http.listeners import bind, url_of
from oarlock.server.http.uvicorn_server import HttpServer
from tests.contract.conftest import wait_for

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    COMPLETION: {"prompt": "abc", "max_tokens": 3},
    RESPONSE: {"input": "x", "max_output_tokens": 3},
}


def request_line(custom_id, url=COMPLETION, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or BODIES[url]}


def jsonl(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class Server:
    """A stage with a directory of batches on a socket; `kill` stops it as abruptly as the process allows."""

    def __init__(self, make_stage, directory, **options):
        self.stage = make_stage(batch_dir=str(directory), **options)
        self.batches = self.stage.state.batches
        self._listener = bind("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self._http = HttpServer(self.stage.app, self._listener)
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self._thread.start()
        wait_for(lambda: self._http.started)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self.batches.start()
        await self._http.run_until_stopped()
        await self.batches.close()

    @property
    def runner(self):
        return self.batches.runner

    def stop(self):
        self._http.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def upload(self, lines, **options):
        content = lines if isinstance(lines, bytes) else jsonl(lines)
        return self.client.files.create(file=("../../etc/in.jsonl", content), purpose="batch", **options)

    def batch(self, lines, url=COMPLETION, window="24h", **options):
        file = self.upload(lines)
        return self.client.batches.create(input_file_id=file.id, endpoint=url, completion_window=window, **options)

    def ended(self, batch):
        found = []

        def has_ended():
            found[:] = [self.client.batches.retrieve(batch.id)]
            return found[0].status in ("completed", "failed", "expired", "cancelled")

        wait_for(has_ended)
        return found[0]

    def lines(self, file_id):
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]


@contextmanager
def serving(make_stage, directory):
    """`serve(**options)`: a server on this directory; the options are a stage's. All are stopped in the end."""
    running = []

    def serve(reply=lambda request: list(request.prompt_token_ids), **options):
        running.append(Server(lambda **given: make_stage(reply, **given), directory, **options))
        return running[-1]

    yield serve
    for server in running:
        server.stage.engine.resume.set()
        server.stop()
