"""`/v1/responses`: create, read, delete and cancel responses, list what they answered, count a prompt's tokens."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.endpoints.responses.schema import ResponsesRequest
from oarlock.server.endpoints.responses.serving import OpenAIServingResponses
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe

router = APIRouter(route_class=ErrorHandlingRoute)
_CREATE = describe(
    "Create response",
    "Response",
    bodies=("ResponsesRequest",),
    examples={
        "plain": {"input": "Hi", "max_output_tokens": 20},
        "stream": {"input": [{"role": "user", "content": "Hi"}], "stream": True},
    },
    streams=True,
)
_COUNT = describe(
    "Count the tokens of a response's prompt",
    "InputTokens",
    bodies=("ResponsesRequest",),
    examples={"hi": {"input": "Hi"}},
)


@router.post("/v1/responses", openapi_extra=_CREATE)
async def create_response(request: Request) -> Response:
    serving = OpenAIServingResponses.of(request)
    body, headers = await serving.read(request, ResponsesRequest)
    return await serving.respond(request, body, headers)


@router.post("/v1/responses/input_tokens", openapi_extra=_COUNT)
async def count_input_tokens(request: Request) -> Response:
    serving = OpenAIServingResponses.of(request)
    body, headers = await serving.read(request, ResponsesRequest)
    return await serving.count(request, body, headers)


@router.get("/v1/responses/{response_id}", openapi_extra=describe("Get response", "Response"))
async def get_response(request: Request, response_id: str) -> Response:
    return OpenAIServingResponses.of(request).read_stored(request, response_id)


@router.post("/v1/responses/{response_id}/cancel", openapi_extra=describe("Cancel response", "Response"))
async def cancel_response(request: Request, response_id: str) -> Response:
    """The text so far is the answer; a stream of it ends."""
    return OpenAIServingResponses.of(request).cancel(request, response_id)


@router.get(
    "/v1/responses/{response_id}/input_items",
    openapi_extra=describe("List input items", "InputItems", query=("after", "limit", "order")),
)
async def list_input_items(request: Request, response_id: str) -> Response:
    return OpenAIServingResponses.of(request).input_items(request, response_id)


@router.delete("/v1/responses/{response_id}", openapi_extra=describe("Delete response", "DeletedResponse"))
async def delete_response(request: Request, response_id: str) -> Response:
    return OpenAIServingResponses.of(request).delete(request, response_id)
