"""`/v1/rerank` and `/v1/score`: how well two texts match, by a reranker's output or the cosine of their vectors."""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from oarlock.engine.errors import RequestError
from oarlock.engine.types import PoolingParams
from oarlock.server.endpoints.pooling.serving import DOCUMENT, QUERY, OpenAIServingPooling, Run, unit, usage
from oarlock.server.http.request_record import request_id_of
from oarlock.server.http.server_sent_events import whole_response
from oarlock.server.json_text import StreamedList, pieces_of
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.llm.generation import PooledOutput
from oarlock.server.llm.pooler_config import LABELS, PoolerConfig, Task
from oarlock.server.schemas.pooling import RerankRequest, ScoreRequest, ScoringFields

_TEXTS = ("text_1", "text_2")  # the fields of a request for scores


class OpenAIServingScoring(OpenAIServingPooling):
    """The endpoints `/v1/rerank` and `/v1/score`."""

    state_name = "serving_scoring"
    tasks = frozenset({Task.EMBED, Task.SCORE})

    async def rerank(self, request: Request, body: RerankRequest, headers: dict[str, str]) -> Response:
        """Return the documents by relevance, best first, ties in order. Raises `RequestError`."""
        model = await self.check_model(body.model)
        response_id = f"rerank-{request_id_of(request.scope)}"
        pairs = [(body.query, text) for text in body.texts]
        run = partial(self.pool, request, body, response_id=response_id)
        scores, outputs, _ = await self._scores(run, body, pairs, ("query", "documents"))
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]

        def result(index: int) -> dict[str, Any]:
            document = {"document": {"text": pairs[index][1]}} if body.return_documents else {}
            return {"index": index, **document, "relevance_score": scores[index]}

        results = StreamedList(result, order, lambda index: 1 + len(pairs[index][1]))
        answer = {"id": response_id, "model": model, "usage": usage(outputs), "results": results}
        return await whole_response(pieces_of(answer), headers)

    async def score(self, request: Request, body: ScoreRequest, headers: dict[str, str]) -> Response:
        """Return one score for each pair, in their order. Raises `RequestError`."""
        model = await self.check_model(body.model)
        response_id = f"score-{request_id_of(request.scope)}"
        run = partial(self.pool, request, body, response_id=response_id)
        scores, outputs, _ = await self._scores(run, body, body.pairs, _TEXTS)
        answer: dict[str, Any] = {"id": response_id, "object": "list", "created": int(time.time()), "model": model}
        answer["data"] = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return await whole_response(pieces_of({**answer, "usage": usage(outputs)}), headers)

    async def scores(self, body: ScoreRequest) -> tuple[list[float], list[tuple[PooledOutput, ...]]]:
        """Return the score of each pair, and the outputs that it was computed from. The offline interface uses this."""
        await self.check_model(body.model)
        scores, _, made_of = await self._scores(partial(self.run, body), body, body.pairs, _TEXTS)
        return scores, made_of

    async def _scores(
        self,
        run: Run,
        body: ScoringFields,
        pairs: Sequence[tuple[str, str]],
        params: tuple[str, str],
    ) -> tuple[list[float], list[PooledOutput], list[tuple[PooledOutput, ...]]]:
        """Return the score of each pair, all outputs, and the outputs that each score was computed from.

        `params`: names of the fields that the first and the second texts of the pairs came from.
        """
        if self.pooler.kind == LABELS:
            self._check_no_instruction(body)
            second_texts: list[int] = []
            prompts = partial(self._side_by_side, body, pairs, params, second_texts)
            outputs = await run(prompts, PoolingParams(LABELS), second_texts=second_texts)
            scores = [label(output.vectors, self.pooler.sigmoid) for output in outputs]
            return scores, outputs, [(output,) for output in outputs]
        if self.pooler.task is Task.SCORE:
            prompts = partial(self._asked, body, pairs, params[1])
            ids = tuple(answer for answer in self.pooler.label_tokens if isinstance(answer, int))
            outputs = await run(prompts, PoolingParams("logits", ids))
            return [probability(output.vectors) for output in outputs], outputs, [(output,) for output in outputs]
        self._check_no_instruction(body)
        first = list(dict.fromkeys(text for text, _ in pairs))  # a query that occurs in several pairs is embedded once
        second = [text for _, text in pairs]
        prompts = partial(self._embedded, body, first, second, params)
        outputs = await run(prompts, PoolingParams(self.pooler.kind))
        indices = {text: number for number, text in enumerate(first)}
        behind = outputs[len(first) :]
        made_of: list[tuple[PooledOutput, ...]] = [
            (outputs[indices[text]], other) for (text, _), other in zip(pairs, behind, strict=True)
        ]
        scores = [cosine(one.vectors[0], other.vectors[0]) for one, other in made_of]
        return scores, outputs, made_of

    def _check_no_instruction(self, body: ScoringFields) -> None:
        """Raise `RequestError` if the request has an instruction."""
        if body.instruction is not None:
            does = "reads two texts at once" if self.pooler.kind == LABELS else "compares vectors"
            message = f"'instruction' is for rerankers that follow an instruction; this model {does}. Leave it out."
            raise RequestError(message, "instruction", "unsupported_by_model")

    async def _side_by_side(
        self,
        body: ScoringFields,
        pairs: Sequence[tuple[str, str]],
        params: tuple[str, str],
        second_texts: list[int],
    ) -> list[tuple[int, ...]]:
        """Return one prompt for each pair, in the model's format for two texts. Fills `second_texts`."""
        prompts = []
        for query, document in pairs:
            ids, second = await self.text_ids.ids_of_pair(query, document, params, truncate=body.truncate_prompt_tokens)
            prompts.append(ids)
            second_texts.append(second)
        return prompts

    async def _asked(self, body: ScoringFields, pairs: Sequence[tuple[str, str]], param: str) -> list[tuple[int, ...]]:
        """Return one prompt for each pair, which asks whether the two texts match."""
        asking = await PairPrompt.of(self.tokenizer.template, self.pooler, body.instruction)
        closing = await self.tokenizer.aencode(asking.closing, False)
        prompts, truncate = [], body.truncate_prompt_tokens
        for query, document in pairs:
            text = await asking.text(query, document)
            if truncate is None:
                ids = await self.text_ids.ids_of_text(text, param, truncate=None, marks=False)
            else:  # cuts the end of the document, not the end of the question
                text = text.removesuffix(asking.closing)
                ids = await self.text_ids.ids_of_text(text, param, truncate=truncate, marks=False, behind=closing)
            prompts.append(ids)
        return prompts

    async def _embedded(
        self, body: ScoringFields, first: Sequence[str], second: Sequence[str], params: tuple[str, str]
    ) -> list[tuple[int, ...]]:
        """Return one prompt for each text. Queries and documents get the model's prompts for them."""
        kinds = (QUERY, DOCUMENT) if isinstance(body, RerankRequest) else (None, None)
        prompts = []
        for texts, kind, param in zip((first, second), kinds, params, strict=True):
            before = self.text_ids.prompt_for(kind)
            for text in texts:
                prompts.append(
                    await self.text_ids.ids_of_text(before + text, param, truncate=body.truncate_prompt_tokens)
                )
        return prompts


_MAX_ADDED = 64 * 1024  # characters that a template may add to four times its input, as for conversations
_MARK = "\u2e28document\u2e29"  # placeholder of a document, used to find the text that follows it
# The format of Qwen3-Reranker's model card, with its default task.
_QWEN_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN_OPENING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN_CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PairPrompt:
    """Writer of the prompts of one request."""

    def __init__(self, template: ChatTemplate | None, instruction: str | None, closing: str) -> None:
        """Use `template`, a template for pairs; None: Qwen3's format. `closing`: the text after each document."""
        self._template = template
        self._instruction = instruction
        self.closing = closing

    @staticmethod
    async def of(template: ChatTemplate, pooler: PoolerConfig, instruction: str | None) -> "PairPrompt":
        """Return the writer for a model. `instruction`: the request's; None: the model's own. Raises `RequestError`."""
        default = pooler.prompts.get(pooler.default_prompt) if pooler.default_prompt is not None else None
        if not await template.takes_pairs():
            return PairPrompt(None, instruction or default, _QWEN_CLOSING)
        prompt = PairPrompt(template, instruction or default, "")
        prompt.closing = (await prompt.text("query", _MARK)).rpartition(_MARK)[2]
        return prompt

    async def text(self, query: str, document: str) -> str:
        """Return the prompt of a pair. Raises `RequestError`."""
        if self._template is None:
            task = self._instruction or _QWEN_TASK
            return f"{_QWEN_OPENING}<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}{_QWEN_CLOSING}"
        turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if self._instruction:
            turns.insert(0, {"role": "system", "content": self._instruction})
        size = sum(len(turn["content"]) for turn in turns)
        return await self._template.render(turns, True, 4 * size + _MAX_ADDED)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors, floats [size] each."""
    similarity = float(np.sum(unit(first[None]) * unit(second[None])))
    return max(-1.0, min(1.0, similarity))


def probability(logits: np.ndarray) -> float:
    """Return the probability of the last answer from its logit and, before it, the wrong answer's: float32 [1 or 2]."""
    odds = float(logits[-1]) - (float(logits[0]) if len(logits) > 1 else 0.0)
    return 1 / (1 + math.exp(-odds)) if odds >= 0 else math.exp(odds) / (1 + math.exp(odds))


def label(values: np.ndarray, sigmoid: bool) -> float:
    """Return the score of a head with one label. `values`: float32 [1]."""
    return probability(values) if sigmoid else float(values[0])
