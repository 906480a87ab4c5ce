"""Cohere's client, whose `rerank` is served in both of its versions."""

from __future__ import annotations

import cohere
import httpx
from reporter import Report, arguments, expect

QUERY = "What does os.path.join do?"
DOCUMENTS = ["Joins parts of a path", "Counts items", "Joins parts of a path", "import os"]


def main() -> int:
    given = arguments()
    report = Report()
    scores = httpx.post(
        f"{given.embedding_url}/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}, timeout=60
    ).json()["results"]
    wanted = [(result["index"], result["relevance_score"]) for result in scores]
    options = {"api_key": "none", "base_url": given.embedding_url}
    for label, client in (("ClientV2", cohere.ClientV2(**options)), ("Client", cohere.Client(**options))):
        with report.exercise(f"{label}.rerank, in order and with top_n"):
            ranked = client.rerank(model=given.model, query=QUERY, documents=DOCUMENTS)
            expect([(result.index, result.relevance_score) for result in ranked.results] == wanted, ranked)
            best = client.rerank(model=given.model, query=QUERY, documents=DOCUMENTS, top_n=2)
            expect([(result.index, result.relevance_score) for result in best.results] == wanted[:2], best)
    with report.exercise("errors as the client's own classes"):
        try:
            cohere.ClientV2(**options).rerank(model=given.model, query=QUERY, documents=[])
        except cohere.BadRequestError as error:
            expect(error.body["error"]["param"] == "documents", error.body)
        else:
            expect(False, "an empty list was accepted")
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
