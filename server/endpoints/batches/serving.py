"""Serving of `/v1/files` and `/v1/batches`: uploads, lists and downloads of files, and requests about batches.

`multipart/form-data` (RFC 7578, RFC 2046 section 5.1.1) is read piece by piece: a file is never whole in memory.
"""

import asyncio
import errno
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from oarlock.engine.errors import RequestError
from oarlock.server.config.settings import Settings
from oarlock.server.endpoints.batches.batch import Batch, BatchEndpoints
from oarlock.server.endpoints.batches.directory import BatchDirectory, FileStore, StoredFile, new_id, page
from oarlock.server.endpoints.batches.key_shares import KeyNames
from oarlock.server.endpoints.batches.runner import BatchRunner, DirectoryAdoption
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion
from oarlock.server.endpoints.completions import OpenAIServingCompletion
from oarlock.server.endpoints.pooling.serving import OpenAIServingEmbedding
from oarlock.server.endpoints.responses.serving import OpenAIServingResponses
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.errors import ClientGoneError, HttpError
from oarlock.server.http.api_keys import ApiKeys
from oarlock.server.http.api_route import ErrorHandlingRoute, ListQuery
from oarlock.server.http.large_body import LargeBodies
from oarlock.server.http.openapi import describe
from oarlock.server.http.request_record import label_of
from oarlock.server.http.server_state import ServerState
from oarlock.server.json_text import dumps
from oarlock.server.observability.metrics import HttpCounters
from oarlock.server.schemas.batches import MAX_EXPIRY_S, MIN_EXPIRY_S, CreateBatchRequest

MAX_PARTS = 16
MAX_HEADERS = 8 * 1024  # bytes of the headers of one part
_BOUNDARY = re.compile(r"""boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE)
_PARAMETER = re.compile(r"""(?:^|;)\s*(name|filename)="((?:[^"\\]|\\.)*)\"""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FormPart:
    """The beginning of a part of a form."""

    name: str
    filename: str | None  # None: a field, not a file


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a form. Raises `HttpError` (415) if the content is not a form with a boundary."""
    found = _BOUNDARY.search(content_type)
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data" or found is None:
        raise HttpError(415, "The body must be a form: send 'Content-Type: multipart/form-data; boundary=…'.")
    return (found[1] or found[2]).encode("latin-1", "replace")


class MultipartReader:
    """Parser of a form: bytes in, parts and their contents out."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # makes the first delimiter like the others
        self._state = "before"  # then "delimiter", "headers", "content" and, at the end, "after"
        self._num_parts = 0

    @property
    def is_complete(self) -> bool:
        """True if the last delimiter has arrived."""
        return self._state == "after"

    def feed(self, data: bytes) -> Iterator[FormPart | bytes]:
        """Yield a `FormPart` when one begins, and pieces of its content. Raises `RequestError`."""
        self._buffer += data
        while True:
            if self._state in ("before", "content"):
                content, found = self._content()
                if content and self._state == "content":
                    yield content
                if not found:
                    return
                self._state = "delimiter"
            elif self._state == "delimiter":
                if len(self._buffer) < 2:
                    return
                mark = bytes(self._buffer[:2])
                if mark not in (b"--", b"\r\n"):
                    raise _wrong("a delimiter is followed by neither a part nor the end of the form")
                del self._buffer[:2]
                self._state = "after" if mark == b"--" else "headers"
            elif self._state == "headers":
                part = self._headers()
                if part is None:
                    return
                self._state = "content"
                yield part
            else:
                self._buffer.clear()  # data after the end have no meaning (RFC 2046)
                return

    def _content(self) -> tuple[bytes, bool]:
        """Take the bytes that are certainly content from the buffer. Return them, and whether a delimiter follows."""
        at = self._buffer.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        content = bytes(self._buffer[:end])
        del self._buffer[: end + len(self._delimiter) if at >= 0 else end]
        return content, at >= 0

    def _headers(self) -> FormPart | None:
        at = self._buffer.find(b"\r\n\r\n")
        if (at if at >= 0 else len(self._buffer)) > MAX_HEADERS:
            raise _wrong(f"the headers of a part are longer than {MAX_HEADERS} bytes")
        if at < 0:
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _wrong(f"it has more than {MAX_PARTS} parts")
        lines = bytes(self._buffer[:at]).decode("utf-8", "replace").split("\r\n")
        del self._buffer[: at + 4]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "content-transfer-encoding" in headers and headers["content-transfer-encoding"].lower() != "binary":
            raise _wrong("a part has a Content-Transfer-Encoding; send its bytes without one")
        kind, _, rest = headers.get("content-disposition", "").partition(";")
        found = {name.lower(): re.sub(r"\\(.)", r"\1", value) for name, value in _PARAMETER.findall(rest)}
        if kind.strip().lower() != "form-data" or "name" not in found:
            raise _wrong("a part has no 'Content-Disposition: form-data; name=\"…\"'")
        return FormPart(found["name"], found.get("filename"))


def _wrong(problem: str) -> RequestError:
    return RequestError(f"The form cannot be read: {problem}.", None, "invalid_form")


MAX_FILE_BYTES = 200 * 2**20
UPLOAD_TIMEOUT_S = 600.0
_IDLE_S = 30.0  # longest pause between two pieces of an upload
_WRITE_BYTES = 2**20
_MAX_FIELD = 1024  # bytes of a field of the form
_EXPIRY = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", *_EXPIRY)


class OpenAIServingBatches(OpenAIServing):
    """The endpoints of files and batches."""

    state_name = "serving_batches"

    adoption: DirectoryAdoption  # its routes exist only with --batch-dir, which sets it

    async def upload(self, request: Request) -> Response:
        """Keep a file of requests. The batch that uses it checks its content. Raises `HttpError`."""
        boundary = boundary_of(request.headers.get("content-type", ""))
        runner, owner = self._for(request)
        files = runner.files
        files.check_room(owner)
        upload = _Upload(files.directory.new_upload(), partial(files.directory.reserve, owner), files.disk)
        try:
            with self.state.body_memory.open() as held:
                held.add(_WRITE_BYTES)  # bytes held at a time; the rest is in the file
                async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                    await upload.read(request.stream(), MultipartReader(boundary))
            expires_s = upload.checked()
            now = int(time.time())
            file = StoredFile(
                new_id("file-"),
                owner,
                upload.num_bytes,
                now,
                (upload.filename or "")[:255],
                "batch",
                None if expires_s is None else now + expires_s,
            )
            await files.adopt(upload.path, file)
        except BaseException as error:
            await upload.on_disk(upload.discard)
            if isinstance(error, TimeoutError):
                message = (
                    f"The upload took more than {UPLOAD_TIMEOUT_S:.0f} seconds, or paused for more than {_IDLE_S:.0f}."
                )
                raise HttpError(408, message, headers={"Connection": "close"}) from None
            if isinstance(error, ClientDisconnect):
                raise ClientGoneError from None
            if isinstance(error, OSError):
                raise self._no_room(error) from None
            raise
        return _json(file.wire())

    def list_files(self, request: Request) -> Response:
        """List the key's files. Raises `RequestError`."""
        query = ListQuery.of(request.query_params, limit=10_000, max_limit=10_000)
        runner, owner = self._for(request)
        return _json(runner.files.list(owner, query))

    def get_file(self, request: Request, file_id: str) -> Response:
        runner, owner = self._for(request)
        return _json(runner.files.get(owner, file_id).wire())

    def content(self, request: Request, file_id: str) -> Response:
        runner, owner = self._for(request)
        file = runner.files.get(owner, file_id)
        return FileResponse(runner.files.directory.content(file.id), media_type="application/octet-stream")

    async def delete_file(self, request: Request, file_id: str) -> Response:
        runner, owner = self._for(request)
        return _json(await runner.files.delete(owner, file_id))

    async def create(self, request: Request) -> Response:
        """Create a batch and start it. Raises `HttpError` and `RequestError`."""
        body, headers = await self.read(request, CreateBatchRequest)
        runner, owner = self._for(request)
        file = runner.files.get(owner, body.input_file_id)
        if file.purpose != "batch":
            message = f"The file '{file.id}' contains responses, not requests."
            raise RequestError(message, "input_file_id")
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            owner=owner,
            label=label_of(request.scope),
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            window_s=body.window_s,
            model=self.model_names[0],
            created_at=now,
            expires_at=now + body.window_s,
            metadata=body.metadata,
            output_expires_s=body.output_expires_after.seconds if body.output_expires_after else None,
        )
        try:
            await runner.create(batch)
        except OSError as error:
            raise self._no_room(error) from None
        return _json(batch.wire(), headers)

    def list_batches(self, request: Request) -> Response:
        """List the key's batches. Raises `RequestError`."""
        query = ListQuery.of(request.query_params, limit=20, max_limit=100)
        runner, owner = self._for(request)
        return _json(page(runner.all_of(owner), query))

    def get_batch(self, request: Request, batch_id: str) -> Response:
        runner, owner = self._for(request)
        return _json(runner.get(owner, batch_id).wire())

    async def cancel_batch(self, request: Request, batch_id: str) -> Response:
        runner, owner = self._for(request)
        batch = runner.get(owner, batch_id)
        try:
            await runner.cancel(batch)
        except OSError as error:
            raise self._no_room(error) from None
        return _json(batch.wire())

    def _for(self, request: Request) -> tuple[BatchRunner, str | None]:
        """Return the runner, and the request's API key as named on the disk. Raises `HttpError` (503)."""
        runner = self.adoption.runner
        return runner, runner.names.of(request.scope["state"]["key"])

    def _no_room(self, error: OSError) -> HttpError:
        if error.errno == errno.EDQUOT:
            rule = self.adoption.runner.files.directory.bytes.rule
            message = (
                f"'file' exceeds the free part of the {self.settings.batch_dir_size} bytes for all files of "
                f"this server.{rule} Delete files that you do not need, or raise --batch-dir-size."
            )
            return HttpError(413, message, param="file", code="files_too_large", headers={"Connection": "close"})
        message = f"The file cannot be written to --batch-dir: {error.strerror}."
        return HttpError(507, message, code="disk_full", headers={"x-should-retry": "false"})


def open_batches(settings: Settings, state: ServerState, counters: HttpCounters, keys: ApiKeys, servings: Any) -> None:
    """Take over the directory of `--batch-dir`, or wait for it. `servings`: has the endpoints by their `state_name`.

    Raises `StartupError`.
    """
    assert settings.batch_dir is not None
    is_shared = len(keys) > 1
    directory = BatchDirectory(Path(settings.batch_dir), settings.batch_dir_size, is_shared=is_shared)
    # The batches have their own process for large bodies, so that HTTP requests do not wait for lines of batches.
    large_bodies = LargeBodies()
    endpoints = BatchEndpoints(
        *(
            getattr(servings, one.state_name)
            for one in (
                OpenAIServingCompletion,
                OpenAIServingChatCompletion,
                OpenAIServingResponses,
                OpenAIServingEmbedding,
            )
        ),
        large_bodies,
    )

    def open_runner() -> BatchRunner:
        files = FileStore(directory, ThreadPoolExecutor(1, "batch-files"), is_shared=is_shared)
        names = KeyNames(keys, directory.salt())
        return BatchRunner(directory, files, endpoints, state, names, large_bodies, settings.max_body_size)

    adoption = DirectoryAdoption(directory, open_runner)
    getattr(servings, OpenAIServingBatches.state_name).adoption = state.batches = counters.batches = adoption


class _Upload:
    """A form that is being written to the disk: one file and a few fields."""

    def __init__(self, path: Path, reserve: Any, disk: ThreadPoolExecutor) -> None:
        """Prepare an upload to `path`. `reserve` counts bytes, and raises `OSError` if they are too many."""
        self.path = path
        self.num_bytes = 0
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._reserve = reserve
        self._disk = disk
        self._file: IO[bytes] | None = None
        self._unwritten = bytearray()

    async def read(self, stream: AsyncIterator[bytes], reader: MultipartReader) -> None:
        """Read the whole form. Raises `HttpError`, `RequestError`, `OSError` and `TimeoutError`."""
        field: str | None = None
        iterator = stream.__aiter__()
        while True:
            async with asyncio.timeout(_IDLE_S):
                data = await anext(iterator, None)
            if data is None:
                break
            for piece in reader.feed(data):
                if isinstance(piece, FormPart):
                    field = self._begin(piece)
                elif field is None:
                    self._add(piece)
                else:
                    self._extend(field, piece)
            if len(self._unwritten) >= _WRITE_BYTES:
                await self.on_disk(self._write)
        if not reader.is_complete:
            raise RequestError("The form cannot be read: it ends before its last delimiter.", None, "invalid_form")
        if self._file is not None:
            await self.on_disk(self._close)

    async def on_disk(self, function: Callable[[], None]) -> None:
        """Call a function on the only thread for files, after all earlier calls."""
        await asyncio.get_running_loop().run_in_executor(self._disk, function)

    def checked(self) -> int | None:
        """Return the seconds after which the file expires, or None if it stays. Raises `RequestError`."""
        if self.filename is None:
            raise RequestError("'file' is required.", "file")
        if not self.num_bytes:
            raise RequestError("'file' is empty: send JSON lines, one request per line.", "file")
        purpose = self.fields.get("purpose")
        if purpose is None:
            raise RequestError("'purpose' is required.", "purpose")
        if purpose != "batch":
            raise RequestError("'purpose' must be batch: the server has no other use for files.", "purpose")
        anchor, seconds = (self.fields.get(name) for name in _EXPIRY)
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise RequestError("'expires_after[anchor]' must be created_at.", "expires_after")
        if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 9):
            raise RequestError("'expires_after[seconds]' must be an integer.", "expires_after")
        if not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
            message = f"'expires_after[seconds]' must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}."
            raise RequestError(message, "expires_after")
        return int(seconds)

    def discard(self) -> None:
        """Delete the partially uploaded file."""
        if self._file is not None:
            self._file.close()
        if self.path.exists():
            self.path.unlink()
            self._reserve(-self.num_bytes)

    def _begin(self, part: FormPart) -> str | None:
        """Begin a part. Return the name of the field, or None for the file."""
        if part.name == "file" and part.filename is not None:
            if self.filename is not None:
                raise RequestError("There is more than one 'file'. Send one file per upload.", "file")
            self.filename = part.filename
            self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
            return None
        if part.name not in _FIELDS:
            known = ", ".join(("file", *_FIELDS))
            raise RequestError(
                f"The field '{part.name[:64]}' is not supported; the fields are {known}.",
                part.name[:64],
                "unknown_parameter",
            )
        if part.name in self.fields:
            raise RequestError(f"'{part.name}' is given twice.", part.name)
        self.fields[part.name] = ""
        return part.name

    def _extend(self, field: str, piece: bytes) -> None:
        self.fields[field] += piece.decode("utf-8", "replace")
        if len(self.fields[field]) > _MAX_FIELD:
            raise RequestError(f"'{field}' is longer than {_MAX_FIELD} bytes.", field)

    def _add(self, piece: bytes) -> None:
        if self.num_bytes + len(piece) > MAX_FILE_BYTES:
            message = f"The file is larger than {MAX_FILE_BYTES} bytes. Split it into several batches."
            raise HttpError(413, message, param="file", code="file_too_large", headers={"Connection": "close"})
        self._reserve(len(piece))
        self.num_bytes += len(piece)
        self._unwritten += piece

    def _write(self) -> None:
        assert self._file is not None
        view = memoryview(bytes(self._unwritten))
        self._unwritten.clear()
        while view:
            view = view[self._file.write(view) :]

    def _close(self) -> None:
        assert self._file is not None
        self._write()
        os.fsync(self._file.fileno())
        self._file.close()


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), 200, headers, "application/json")


router = APIRouter(route_class=ErrorHandlingRoute)
_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
}
_UPLOAD = describe("Upload file", "File") | {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
}


@router.post("/v1/files", openapi_extra=_UPLOAD)
async def upload_file(request: Request) -> Response:
    """Upload a file of requests for `/v1/batches`."""
    return await OpenAIServingBatches.of(request).upload(request)


@router.get(
    "/v1/files",
    openapi_extra=describe("List files", "FileList", query=("after", "limit", "order", "purpose")),
)
async def list_files(request: Request) -> Response:
    """List the files. `after`, `limit`, `order` and `purpose` choose a part of the list."""
    return OpenAIServingBatches.of(request).list_files(request)


@router.get("/v1/files/{file_id}", openapi_extra=describe("Get file", "File"))
async def get_file(request: Request, file_id: str) -> Response:
    return OpenAIServingBatches.of(request).get_file(request, file_id)


@router.get(
    "/v1/files/{file_id}/content", openapi_extra=describe("Download file", "", media="application/octet-stream")
)
async def get_content(request: Request, file_id: str) -> Response:
    """Download a file as it was uploaded, or as a batch has written it."""
    return OpenAIServingBatches.of(request).content(request, file_id)


@router.delete("/v1/files/{file_id}", openapi_extra=describe("Delete file", "DeletedFile"))
async def delete_file(request: Request, file_id: str) -> Response:
    return await OpenAIServingBatches.of(request).delete_file(request, file_id)


_EXAMPLE = {
    "input_file_id": "file-000000000000000000000000",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
_CREATE = describe("Create batch", "Batch", bodies=("CreateBatchRequest",), examples={"chat": _EXAMPLE})


@router.post("/v1/batches", openapi_extra=_CREATE)
async def create_batch(request: Request) -> Response:
    """Process the requests of an uploaded file, behind all other requests."""
    return await OpenAIServingBatches.of(request).create(request)


@router.get("/v1/batches", openapi_extra=describe("List batches", "BatchList", query=("after", "limit")))
async def list_batches(request: Request) -> Response:
    """List the batches. `after` and `limit` choose a part of the list."""
    return OpenAIServingBatches.of(request).list_batches(request)


@router.get("/v1/batches/{batch_id}", openapi_extra=describe("Get batch", "Batch"))
async def get_batch(request: Request, batch_id: str) -> Response:
    return OpenAIServingBatches.of(request).get_batch(request, batch_id)


@router.post("/v1/batches/{batch_id}/cancel", openapi_extra=describe("Cancel batch", "Batch"))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch. Responses that are already complete are kept."""
    return await OpenAIServingBatches.of(request).cancel_batch(request, batch_id)
