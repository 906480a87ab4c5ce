"""`GET /metrics`: Prometheus text. Needs no key when the server listens on loopback only."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.observability.metrics import CONTENT_TYPE
from oarlock.server.serving.base import OpenAIServing

router = APIRouter(route_class=ErrorHandlingRoute)


@router.get("/metrics", openapi_extra=describe("Show metrics", "", media="text/plain", any_query=True))
async def metrics(request: Request) -> Response:
    return Response(await OpenAIServing.of(request).metrics_page(), media_type=CONTENT_TYPE)
