"""The process that reads large bodies.

`python -m oarlock.server.http.large_body.process --fd N`, started by `reader.py`. It returns an error, or the
checked body: unknown fields left out, long texts and lists of ids as bytes behind it. Of a line of a batch it returns
the members, and the text of its body, which is sent again to be read. The time and memory that a body takes do not
affect the server. The end of the socket ends the process.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from oarlock.engine.errors import RequestError
from oarlock.server.endpoints.batches.schema import CreateBatchRequest, WrongBatchError, read_line
from oarlock.server.endpoints.chat.schema import ChatRequest
from oarlock.server.endpoints.completions.schema import CompletionRequest
from oarlock.server.endpoints.messages.schema import CountTokensRequest, MessagesRequest
from oarlock.server.endpoints.operations.schema import AbortRequest
from oarlock.server.endpoints.pooling.schema import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from oarlock.server.endpoints.responses.schema import ResponsesRequest
from oarlock.server.endpoints.tokenize.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from oarlock.server.http.large_body.detached import Leaf, detach
from oarlock.server.http.request_body import parse_any, unknown_parameters
from oarlock.server.strict_model import StrictModel

SCHEMAS: dict[str, type[StrictModel]] = {
    schema.__name__: schema
    for schema in (
        AbortRequest,
        ChatRequest,
        CompletionRequest,
        CountTokensRequest,
        CreateBatchRequest,
        DetokenizeRequest,
        EmbeddingRequest,
        MessagesRequest,
        PoolingRequest,
        RerankRequest,
        ResponsesRequest,
        ScoreRequest,
        TokenizeChatRequest,
        TokenizeRequest,
    )
}
MAX_REST_BYTES = 2**20  # of a body without its long texts and ids: the server parses that at once
_MAX_NAME = 65  # characters of an unknown name; longer ones are never repeated
_NICENESS = 5  # the server's own work has priority
_MIN_MEMORY_BYTES = 2 << 30
_MEMORY_PER_BYTE = 128  # what `[[],[],…` becomes, twice


def main(argv: Sequence[str]) -> int:
    """Read bodies from the socket `--fd` until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which may be sent to all processes at once; the parent decides
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="oarlock.server.http.large_body.process")
    parser.add_argument("--fd", type=int, required=True)
    os.nice(_NICENESS)
    gc.disable()  # a body has no cycles, and looking for them takes longer than parsing
    with socket.socket(fileno=parser.parse_args(argv).fd) as sock, sock.makefile("rwb") as stream:
        while line := stream.readline():
            header = json.loads(line)
            _limit_memory(header["size"])
            body = stream.read(header["size"])
            try:
                if "line" in header:
                    _read_line(stream, body, header["line"], header["name"])
                else:
                    _read(stream, [SCHEMAS[name] for name in header["schemas"]], body, header["strict"])
            except RequestError as error:
                _send(stream, problem=error.message, param=error.param, code=error.code)
            except WrongBatchError as error:
                _send(stream, wrong=[error.cause, error.fix, error.line, error.code])
            except MemoryError:
                _send(stream, problem="The body has more objects and lists than this server reads.")
            stream.flush()
            gc.collect()
    return 0


def _read(stream: io.BufferedIOBase, schemas: list[type[StrictModel]], body: bytes, is_strict: bool) -> None:
    """Parse one body and send the result. Raises `RequestError`."""
    parsed = parse_any(schemas, body)
    unknown = unknown_parameters(parsed, is_strict)
    schema = type(parsed)
    value: dict[str, Any] = {name: item for name, item in from_json(body).items() if name in schema.model_fields}
    leaves: list[Leaf] = detach(value, parsed)
    rest = json.dumps(value, ensure_ascii=False).encode()
    if len(rest) > MAX_REST_BYTES:
        raise RequestError(
            f"Without its texts and token ids the body has {len(rest)} bytes, at most {MAX_REST_BYTES} are read. "
            "Send fewer messages, parts or tools."
        )
    described = [leaf.described() for leaf in leaves]
    names = [name[:_MAX_NAME] for name in unknown]
    _send(stream, schema=schema.__name__, unknown=names, rest=len(rest), leaves=described)
    stream.write(rest)
    for leaf in leaves:
        stream.write(leaf.data)


def _read_line(stream: io.BufferedIOBase, line: bytes, number: int, name: str) -> None:
    """Parse one line of a batch and send the result. Raises `WrongBatchError`."""
    request = read_line(line, number, name)
    _send(stream, custom_id=request.custom_id, url=request.url, body=len(request.body))
    stream.write(request.body)


def _send(stream: io.BufferedIOBase, **message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")


def _limit_memory(size: int) -> None:
    if sys.platform != "linux":
        return
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = taken + max(_MIN_MEMORY_BYTES, size * _MEMORY_PER_BYTE)
    resource.setrlimit(resource.RLIMIT_AS, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
