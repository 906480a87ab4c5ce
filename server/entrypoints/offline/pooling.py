"""Vectors and scores for the Python interface: texts in groups, each group asked of the server's own endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from server.entrypoints.offline.outputs import Answer, Done
from server.json_text import dumps
from server.protocol.pooling.embedding import EmbeddingRequest
from server.protocol.pooling.scoring import ScoreRequest
from server.protocol.request_body import parse
from server.serving.pooling.embedding import OpenAIServingEmbedding
from server.serving.pooling.scoring import OpenAIServingScoring

if TYPE_CHECKING:
    import numpy as np

_PAIRS = 32  # of a group: a text that is in all of them is embedded once for each group


class EmbedFields(TypedDict, total=False):
    """What a request for vectors has beside its input. `docs/api.md` describes each field."""

    dimensions: int
    normalize: bool
    prompt_name: str
    input_type: str
    add_special_tokens: bool
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str


class ScoreFields(TypedDict, total=False):
    """What a request for scores has beside its texts."""

    instruction: str
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one prompt."""

    embedding: np.ndarray  # float32 [dimensions]
    num_prompt_tokens: int
    num_cached_tokens: int  # of these, taken from the prefix cache


def embeddings(
    endpoint: OpenAIServingEmbedding, prompts: Sequence[str | Sequence[int]], fields: EmbedFields
) -> list[Answer[list[Embedding]]]:
    """One group for each prompt."""

    def answer(prompt: str | Sequence[int]) -> Answer[list[Embedding]]:
        async def embed() -> Done[list[Embedding]]:
            body = {**fields, "input": prompt if isinstance(prompt, str) else list(prompt)}
            vectors, outputs = await endpoint.vectors(parse(EmbeddingRequest, dumps(body).encode()))
            (vector,), (output,) = vectors, outputs
            found = Embedding(vector, output.prompt_tokens, output.cached_tokens)
            return Done([found], output.prompt_tokens)

        return embed

    return list(map(answer, prompts))


def scores(
    endpoint: OpenAIServingScoring, first: str | Sequence[str], second: str | Sequence[str], fields: ScoreFields
) -> list[Answer[list[float]]]:
    """In groups of pairs. Raises `ValueError` where `first` is neither one text nor as many as `second`."""
    others = [second] if isinstance(second, str) else list(second)
    ones = [first] if isinstance(first, str) else list(first)
    if len(ones) not in (1, len(others)):
        raise ValueError(f"there are {len(ones)} texts and {len(others)} to compare them with: give one, or as many")

    def answer(start: int) -> Answer[list[float]]:
        async def score() -> Done[list[float]]:
            texts = ones if len(ones) == 1 else ones[start : start + _PAIRS]
            body = {**fields, "text_1": texts, "text_2": others[start : start + _PAIRS]}
            found, outputs = await endpoint.scores(parse(ScoreRequest, dumps(body).encode()))
            return Done(found, sum(output.prompt_tokens for output in outputs))

        return score

    return list(map(answer, range(0, len(others), _PAIRS)))
