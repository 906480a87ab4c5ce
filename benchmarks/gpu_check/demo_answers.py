"""The demo model's answers through engine and ranks: with keys and values of 8 bits, and with `--batch-invariant`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from benchmarks.gpu_check import correctness
from benchmarks.gpu_check.part import NotHere, Row, Where
from oarlock.base.errors import StartupError
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor, start_executor

if TYPE_CHECKING:
    from tests.parallel.direct_engine import Answer

DEMO = correctness.ROOT / "models" / "oarlock-demo"
LEAST = 0.9  # of the answers as trained; on the CPU 0.98, with pages of each form


@contextlib.contextmanager
def _ranks(where: Where, **options: Any) -> Generator[Executor]:
    """One rank in the types that are served: graphs, and steps scheduled ahead, where there is a device."""
    config = WorkerConfig(
        str(DEMO),
        device=where.device,
        dtype="float32" if where.is_tiny else "bfloat16",
        max_model_len=256,
        max_num_seqs=48,
        max_num_batched_tokens=512,
        kv_cache_bytes=(16 if where.is_tiny else 256) << 20,
    )
    executor = start_executor(config.with_(**options), lambda *_: None)
    try:
        yield executor
    finally:
        executor.close()


def _answers(executor: Executor, requests: Iterable[Request]) -> dict[int, Answer]:
    """Two of them arrive before each step."""
    from tests.parallel.direct_engine import DirectEngine

    return DirectEngine(executor, pipeline_depth=None).run(requests, arrives_at=lambda number: number // 2)


def _requests(where: Where, *, sampled: bool) -> tuple[list[Request], list[list[int]]]:
    """Questions, and what the model was trained to answer. `sampled`: every second one at random, all with logprobs."""
    count, tokens = (4, 6) if where.is_tiny else (100, 24)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    requests, trained = [], []
    for number, line in enumerate((DEMO / "questions.jsonl").read_text("utf-8").splitlines()[:count]):
        asked = json.loads(line)
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        if sampled:
            temperature, top_p = (1.1, 0.9) if number % 2 else (0.0, 1.0)
            params = SamplingParams(max_tokens=tokens, seed=number, logprobs=3, temperature=temperature, top_p=top_p)
        question = tokenizer.encode(f"Q: {asked['question']}\nA:", add_special_tokens=False).ids
        requests.append(Request(number, tuple(question), params))
        trained.append(tokenizer.encode(f" {asked['answer']}", add_special_tokens=False).ids[:tokens])
    return requests, trained


def rounded_pages(where: Where) -> Iterator[Row]:
    """Answers with keys and values of 8 bits. `as trained`: their share, by which they are judged. `same tokens`: the
    share of answers that are those with keys and values in the model's type, also after the trained text, where
    rounding decides much."""
    requests, trained = _requests(where, sampled=False)
    plain: dict[int, list[int]] = {}
    for form in ("auto", "int8", "fp8"):
        with _ranks(where, kv_cache_dtype=form) as executor:
            found = {number: answer.token_ids for number, answer in _answers(executor, requests).items()}
        plain = plain or found
        learnt = sum(found[i][: len(ids)] == ids for i, ids in enumerate(trained)) / len(trained)
        same = sum(found[i] == plain[i] for i in found) / len(found)
        figures = {"as trained": learnt, "same tokens": same}
        yield Row(f"pages of {form}", figures, ok=learnt >= LEAST)


def two_devices(where: Where) -> Iterator[Row]:
    """Answers of two ranks with graphs and without. `as trained`: their share, by which they are judged."""
    requests, trained = _requests(where, sampled=False)
    for name, eager in (("graphs", False), ("eager", True)):
        with _ranks(where, tensor_parallel_size=2, enforce_eager=eager) as executor:
            found = _answers(executor, requests)
        learnt = sum(found[i].token_ids[: len(ids)] == ids for i, ids in enumerate(trained)) / len(trained)
        yield Row(name, {"as trained": learnt}, ok=learnt >= LEAST)


def batch_invariant(where: Where) -> Iterator[Row]:
    """Tokens and logprobs, bit by bit, of requests that are answered together: alone, and without graphs."""
    requests, _ = _requests(where, sampled=True)
    for pages in ("auto",) if where.is_tiny else ("auto", "int8"):
        try:
            with _ranks(where, batch_invariant=True, kv_cache_dtype=pages) as executor:
                yield Row(f"the start's test, pages of {pages}", ok=True, note=executor.info.batch_invariant_reason)
                together = _answers(executor, requests)
                alone = {n: a for request in requests for n, a in _answers(executor, [request]).items()}
            with _ranks(where, batch_invariant=True, kv_cache_dtype=pages, enforce_eager=True) as executor:
                eager = _answers(executor, requests)
        except StartupError as error:
            if where.is_tiny:
                raise NotHere(str(error)) from error
            yield Row(f"the start's test, pages of {pages}", ok=False, note=str(error))
            continue
        for name, found in {"alone": alone, "without graphs": eager}.items():
            yield compared(f"{len(requests)} requests together and {name}, pages of {pages}", together, found)


def compared(name: str, together: dict[int, Answer], found: dict[int, Answer]) -> Row:
    """Row of a comparison. `that differ`: the number of answers that are not the same."""
    differ = [number for number, answer in together.items() if found[number] != answer]
    note = f"requests {', '.join(map(str, differ[:5]))}" if differ else ""
    return Row(name, {"answers": float(len(together)), "that differ": float(len(differ))}, ok=not differ, note=note)
