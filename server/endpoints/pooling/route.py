"""Vectors and scores: `/v1/embeddings`, `/pooling`, `/v1/rerank`, `/v1/score`, and the paths of other servers."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.endpoints.pooling.scoring import OpenAIServingScoring
from oarlock.server.endpoints.pooling.serving import OpenAIServingEmbedding
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe
from oarlock.server.schemas.pooling import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest

router = APIRouter(route_class=ErrorHandlingRoute)
_EMBED = describe(
    "Create embeddings",
    "Embeddings",
    bodies=("EmbeddingRequest",),
    examples={
        "text": {"input": "The sea is blue"},
        "texts": {"input": ["The sea is blue", "Grass is green"], "encoding_format": "base64"},
    },
)
_POOL = describe(
    "Create vectors of tokens",
    "PooledVectors",
    bodies=("PoolingRequest",),
    examples={"tokens": {"input": "The sea is blue"}, "text": {"input": "The sea is blue", "task": "embed"}},
)
_RERANK = describe(
    "Rank documents",
    "Reranking",
    bodies=("RerankRequest",),
    examples={"two": {"query": "What is blue?", "documents": ["The sea is blue", "Grass is green"], "top_n": 1}},
)
_SCORE = describe(
    "Score pairs of texts",
    "Scores",
    bodies=("ScoreRequest",),
    examples={"two": {"text_1": "What is blue?", "text_2": ["The sea is blue", "Grass is green"]}},
)


@router.post("/v1/embeddings", openapi_extra=_EMBED)
async def create_embeddings(request: Request) -> Response:
    serving = OpenAIServingEmbedding.of(request)
    body, headers = await serving.read(request, EmbeddingRequest)
    return await serving.embed(request, body, headers)


@router.post("/pooling", openapi_extra=_POOL)
async def create_vectors(request: Request) -> Response:
    serving = OpenAIServingEmbedding.of(request)
    body, headers = await serving.read(request, PoolingRequest)
    return await serving.pool_tokens(request, body, headers)


@router.post("/v1/rerank", openapi_extra=_RERANK)
@router.post("/v2/rerank", openapi_extra=_RERANK)
@router.post("/rerank", openapi_extra=_RERANK)
async def rerank(request: Request) -> Response:
    serving = OpenAIServingScoring.of(request)
    body, headers = await serving.read(request, RerankRequest)
    return await serving.rerank(request, body, headers)


@router.post("/v1/score", openapi_extra=_SCORE)
@router.post("/score", openapi_extra=_SCORE)
async def score(request: Request) -> Response:
    serving = OpenAIServingScoring.of(request)
    body, headers = await serving.read(request, ScoreRequest)
    return await serving.score(request, body, headers)
