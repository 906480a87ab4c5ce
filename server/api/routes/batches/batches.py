"""`/v1/batches`: create, list, read and cancel batches."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.serving.batches.serving import OpenAIServingBatches

router = APIRouter(route_class=ErrorHandlingRoute)
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
    """What is answered already stays."""
    return await OpenAIServingBatches.of(request).cancel_batch(request, batch_id)
