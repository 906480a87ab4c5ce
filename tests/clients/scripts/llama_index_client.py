"""LlamaIndex's package for vectors of servers like OpenAI's: texts, queries, batches, asynchronous, shorter ones."""

from __future__ import annotations

import asyncio
import json
import urllib.request

from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from openai import BadRequestError
from reporter import Report, arguments, expect

TEXTS = ["Joins parts of a path", "Counts items", "import os"]


def raw(url: str, texts: list[str]) -> list[list[float]]:
    """Vectors that the route returns without any client package."""
    body = json.dumps({"input": texts}).encode()
    request = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [item["embedding"] for item in json.load(answer)["data"]]


def main() -> int:
    given = arguments()
    report = Report()
    options = {"model_name": given.model, "api_base": f"{given.embedding_url}/v1", "api_key": "none"}
    embedding = OpenAILikeEmbedding(embed_batch_size=2, **options)
    wanted = raw(given.embedding_url, TEXTS)
    with report.exercise("embeddings: texts in batches and a query, as the route answers them"):
        expect(embedding.get_text_embedding_batch(TEXTS) == wanted, "they differ")
        expect(embedding.get_query_embedding(TEXTS[1]) == wanted[1], "they differ")
        best = max(range(3), key=lambda at: embedding.similarity(wanted[1], wanted[at]))
        expect(best == 1, best)
    with report.exercise("asynchronous"):
        expect(asyncio.run(embedding.aget_text_embedding_batch(TEXTS)) == wanted, "they differ")
    with report.exercise("dimensions"):
        expect(len(OpenAILikeEmbedding(dimensions=32, **options).get_query_embedding("two")) == 32, "not 32")
    with report.exercise("errors as the client's own classes"):
        try:
            OpenAILikeEmbedding(dimensions=1000, max_retries=0, **options).get_query_embedding("two")
        except BadRequestError as error:
            expect(error.param == "dimensions", error.body)
        else:
            expect(False, "more numbers than there are")
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
