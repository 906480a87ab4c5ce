"""No client but the reference: sentence-transformers computes the same checkpoint in float64 and in float32.

The checkpoint's vectors go through a Dense module. The server's may be twice as far from float64 as the library's own
float32, and a few last places.
"""

from __future__ import annotations

import base64
import json
import urllib.request

import numpy as np
import torch
from reporter import Report, arguments, expect
from sentence_transformers import CrossEncoder, SentenceTransformer

TEXTS = [
    "def read(self, size=-1):\n    ",
    "x",
    "Wörld 😀",
    "import os\nimport sys\n\n" * 20,
    "word " * 700,  # more than the checkpoint's max_seq_length: both cut it
]

LETTERS = ["where is the bank?", "a river bank", "money in the bank!", "x"]


def post(url: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def vectors(url: str, texts: list[str], **fields: object) -> np.ndarray:
    body = {"input": texts, "encoding_format": "base64", "truncate_prompt_tokens": -1, **fields}
    data = post(url, "/v1/embeddings", body)["data"]
    return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])


def main() -> int:
    given = arguments()
    report = Report()
    torch.set_num_threads(1)
    exact, single = (
        SentenceTransformer(given.embedding_checkpoint, device="cpu", model_kwargs={"dtype": dtype}).to(dtype)
        for dtype in (torch.float64, torch.float32)
    )

    def judged(found: np.ndarray, texts: list[str], **how: object) -> None:
        truth = np.stack([exact.encode(text, **how) for text in texts])
        theirs = np.stack([single.encode(text, **how) for text in texts])
        expect(truth.dtype == np.float64, truth.dtype)
        limit = 2 * np.abs(theirs - truth).max() + 4 * np.finfo(np.float32).eps * np.abs(truth).max()
        off = np.abs(found - truth).max()
        expect(off <= limit, f"{off} from float64, where {limit} are allowed")

    texts = TEXTS
    with report.exercise("vectors of float64, within twice the library's own float32, long texts cut alike"):
        judged(vectors(given.embedding_url, texts), texts)
    with report.exercise("with the prompt of a query"):
        judged(vectors(given.embedding_url, texts, prompt_name="query"), texts, prompt_name="query")
    with report.exercise("cut to 64 numbers and normalised again"):
        cut = [np.asarray(exact.encode(text, truncate_dim=64, normalize_embeddings=True)) for text in texts]
        off = np.abs(vectors(given.embedding_url, texts, dimensions=64) - np.stack(cut)).max()
        expect(off < 1e-5, off)
    with report.exercise("cosines of encode_query and encode_document"):
        scored = post(given.embedding_url, "/v1/rerank", {"query": "sum", "documents": texts[:3]})["results"]
        query, documents = exact.encode_query("sum"), exact.encode_document(texts[:3])
        for result in scored:
            off = abs(result["relevance_score"] - float(query @ documents[result["index"]]))
            expect(off < 1e-5, off)
    embedding_url, embedding_path, scoring_url, scoring_path = given.encoders
    exact, single = (
        SentenceTransformer(embedding_path, device="cpu", model_kwargs={"dtype": dtype})
        for dtype in (torch.float64, torch.float32)
    )
    texts = [*LETTERS, "the deep blue sea " * 40]  # the last has more than the checkpoint's max_seq_length
    with report.exercise("vectors of a ModernBERT in float64, within twice the library's own float32"):
        judged(vectors(embedding_url, texts), texts)
    cross = CrossEncoder(scoring_path, device="cpu", model_kwargs={"dtype": torch.float64})
    with report.exercise("scores of a BERT cross-encoder in float64, the longer text cut alike"):
        for query in (LETTERS[0], "where is the sea? " * 12):
            body = {"query": query, "documents": texts, "truncate_prompt_tokens": -1}
            theirs = cross.predict([(query, text) for text in texts])
            for result in post(scoring_url, "/v1/rerank", body)["results"]:
                off = abs(result["relevance_score"] - float(theirs[result["index"]]))
                expect(off < 1e-6, off)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
