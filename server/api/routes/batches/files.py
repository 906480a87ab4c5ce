"""`/v1/files`: upload, list, read and delete the files of batches."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.serving.batches.serving import OpenAIServingBatches

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
