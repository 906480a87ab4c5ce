"""`/v1/files`: upload, list, read and delete files of batches; `/v1/batches`: create, list, read and cancel batches."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.endpoints.batches.serving import OpenAIServingBatches
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe

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
    """A file of requests for `/v1/batches`."""
    return await OpenAIServingBatches.of(request).upload(request)


@router.get(
    "/v1/files",
    openapi_extra=describe("List files", "FileList", query=("after", "limit", "order", "purpose")),
)
async def list_files(request: Request) -> Response:
    """`after`, `limit`, `order` and `purpose` choose a part of it."""
    return OpenAIServingBatches.of(request).list_files(request)


@router.get("/v1/files/{file_id}", openapi_extra=describe("Get file", "File"))
async def get_file(request: Request, file_id: str) -> Response:
    return OpenAIServingBatches.of(request).get_file(request, file_id)


@router.get(
    "/v1/files/{file_id}/content", openapi_extra=describe("Download file", "", media="application/octet-stream")
)
async def get_content(request: Request, file_id: str) -> Response:
    """As it was uploaded, or as a batch has written it."""
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
    """Answer the requests of an uploaded file, behind all other requests."""
    return await OpenAIServingBatches.of(request).create(request)


@router.get("/v1/batches", openapi_extra=describe("List batches", "BatchList", query=("after", "limit")))
async def list_batches(request: Request) -> Response:
    """`after` and `limit` choose a part of it."""
    return OpenAIServingBatches.of(request).list_batches(request)


@router.get("/v1/batches/{batch_id}", openapi_extra=describe("Get batch", "Batch"))
async def get_batch(request: Request, batch_id: str) -> Response:
    return OpenAIServingBatches.of(request).get_batch(request, batch_id)


@router.post("/v1/batches/{batch_id}/cancel", openapi_extra=describe("Cancel batch", "Batch"))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancels a batch; answers that are there already stay."""
    return await OpenAIServingBatches.of(request).cancel_batch(request, batch_id)
