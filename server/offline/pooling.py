"""Makes vectors and scores for the Python interface, with vLLM's names, by the server's endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from oarlock.server.endpoints.pooling.embedding import OpenAIServingEmbedding
from oarlock.server.endpoints.pooling.schema import EmbeddingRequest, ScoreRequest
from oarlock.server.endpoints.pooling.scoring import OpenAIServingScoring
from oarlock.server.http.request_body import parse
from oarlock.server.json_text import dumps
from oarlock.server.offline.outputs import Answer, Done
from oarlock.server.offline.prompts import Prompt

if TYPE_CHECKING:
    import numpy as np

_PAIRS = 32  # of a group: a text that is in all of them is embedded once for each group


class EmbedFields(TypedDict, total=False):
    """Names what a request for vectors has beside its input. `docs/embeddings.md` describes each field."""

    dimensions: int
    normalize: bool
    prompt_name: str
    input_type: str
    add_special_tokens: bool
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str


class ScoreFields(TypedDict, total=False):
    """Names what a request for scores has beside its texts."""

    instruction: str
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Holds one vector. `array` is the same for numpy: float32 [dimensions]."""

    array: np.ndarray

    @property
    def embedding(self) -> list[float]:
        return self.array.tolist()

    @property
    def hidden_size(self) -> int:
        return len(self.array)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """Holds one prompt and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int  # of these, taken from the prefix cache
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Holds one score."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """Holds one pair of texts and its score. `prompt_token_ids`: of its prompt, or of one text and then the other."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


def embeddings(
    endpoint: OpenAIServingEmbedding, prompts: Sequence[Prompt], fields: EmbedFields, request_ids: Iterator[str]
) -> list[Answer[list[EmbeddingRequestOutput]]]:
    """Make one group for each prompt."""

    def answer(prompt: Prompt, request_id: str) -> Answer[list[EmbeddingRequestOutput]]:
        async def embed() -> Done[list[EmbeddingRequestOutput]]:
            body = {**fields, "input": prompt}
            vectors, outputs = await endpoint.vectors(parse(EmbeddingRequest, dumps(body).encode()))
            (vector,), (output,) = vectors, outputs
            ids = list(output.prompt_token_ids)
            found = EmbeddingRequestOutput(request_id, EmbeddingOutput(vector), ids, output.cached_tokens)
            return Done([found], output.prompt_tokens)

        return embed

    return [answer(prompt, next(request_ids)) for prompt in prompts]


def scores(
    endpoint: OpenAIServingScoring,
    first: str | Sequence[str],
    second: str | Sequence[str],
    fields: ScoreFields,
    request_ids: Iterator[str],
) -> list[Answer[list[ScoringRequestOutput]]]:
    """Make groups of pairs. Raises `ValueError` where `first` is neither one text nor as many as `second`."""
    others = [second] if isinstance(second, str) else list(second)
    ones = [first] if isinstance(first, str) else list(first)
    if len(ones) not in (1, len(others)):
        raise ValueError(f"there are {len(ones)} texts and {len(others)} to compare them with: give one, or as many")
    names = [next(request_ids) for _ in others]

    def answer(start: int) -> Answer[list[ScoringRequestOutput]]:
        async def score() -> Done[list[ScoringRequestOutput]]:
            texts = ones if len(ones) == 1 else ones[start : start + _PAIRS]
            body = {**fields, "text_1": texts, "text_2": others[start : start + _PAIRS]}
            found, made_of = await endpoint.scores(parse(ScoreRequest, dumps(body).encode()))
            outputs = [
                ScoringRequestOutput(
                    names[start + number],
                    ScoringOutput(one),
                    [token_id for part in parts for token_id in part.prompt_token_ids],
                    sum(part.cached_tokens for part in parts),
                )
                for number, (one, parts) in enumerate(zip(found, made_of, strict=True))
            ]
            return Done(outputs, sum(len(output.prompt_token_ids) for output in outputs))

        return score

    return list(map(answer, range(0, len(others), _PAIRS)))
