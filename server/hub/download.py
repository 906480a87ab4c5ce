"""Starts the process that fetches a model from the hub, and follows it: threads cannot be cancelled, a process can.

The process is `oarlock.server.launch.fetch_model`; messages are lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields

from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import StartupError
from oarlock.engine.python_child import start_python

OnDetailedProgress = Callable[[str, float, str], object]  # phase, fraction, detail


@dataclass(frozen=True, slots=True)
class HubModel:
    """The model to fetch, and the configuration it is checked against before its weights are fetched."""

    model: str
    revision: str
    download_dir: str | None  # None: the cache of `huggingface_hub`
    offline: bool
    engine: EngineConfig  # its `model_path` is still unknown
    tokenizer: str | None = None  # directory of the tokenizer that is used; None: the model's own
    chat_template: str | None = None  # file of the one that is used; None: that of the tokenizer
    check_digests: bool = False  # of what is here already, too; what is damaged is fetched again
    runner: str = "auto"  # what it is to be served for
    tokenizer_only: bool = False  # the small files of the model are all that is wanted

    def to_json(self) -> str:
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "engine"}
        return json.dumps(plain | {"engine": self.engine.to_json()})

    @staticmethod
    def from_json(text: str | bytes) -> HubModel:
        plain = json.loads(text)
        return HubModel(**plain | {"engine": EngineConfig.from_json(plain["engine"])})


async def download(request: HubModel, on_progress: OnDetailedProgress) -> str:
    """The directory of the model. Raises `StartupError`. Cancelling ends the process and keeps partial files."""
    ours, theirs = socket.socketpair()  # end-of-file on it ends the process, however this one ends
    with theirs:
        process = start_python(
            ["-m", "oarlock.server.launch.fetch_model", "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(request.to_json().encode() + b"\n")
        async for line in reader:
            message = json.loads(line)
            if message["kind"] == "progress":
                on_progress(message["phase"], message["fraction"], message["detail"])
            elif message["kind"] == "failed":
                raise StartupError(message["cause"], message["fix"], message["exit_code"])
            elif message["kind"] == "done":
                return message["directory"]
        raise _unexpected_end(request.model, process.wait())
    finally:
        process.kill()
        process.wait()
        (writer or ours).close()


def _unexpected_end(model: str, status: int) -> StartupError:
    how = f"exit code {status}" if status >= 0 else f"it was ended by {signal.Signals(-status).name}"
    return StartupError(
        f"The process that fetches {model} ended unexpectedly ({how}).",
        "The lines above say why, if any. Start again: what has arrived is kept.",
    )
