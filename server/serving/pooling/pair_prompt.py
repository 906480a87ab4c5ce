"""The prompt that asks a reranker about a query and a document: by its own chat template, or as Qwen3's are trained."""

from __future__ import annotations

from oarlock.server.llm.pooler_config import PoolerConfig
from oarlock.server.tokenizer.chat_template import ChatTemplate

_MAX_CHARACTERS = 64 * 1024 * 1024  # of a rendered prompt; bodies are smaller
_MARK = "\u2e28document\u2e29"  # in place of one, to find what follows it
# The format of Qwen3-Reranker's model card, with its default task.
_QWEN_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN_OPENING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN_CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PairPrompt:
    """Writes the prompts of one request."""

    def __init__(self, template: ChatTemplate | None, instruction: str | None, closing: str) -> None:
        """`template`: one for pairs; None: as Qwen3's are trained. `closing`: what follows each document."""
        self._template = template
        self._instruction = instruction
        self.closing = closing

    @staticmethod
    async def of(template: ChatTemplate, pooler: PoolerConfig, instruction: str | None) -> PairPrompt:
        """Prompts for a model. `instruction`: of the request; None: the model's. Raises `RequestError`."""
        default = pooler.prompts.get(pooler.default_prompt) if pooler.default_prompt is not None else None
        if not await template.takes_pairs():
            return PairPrompt(None, instruction or default, _QWEN_CLOSING)
        prompt = PairPrompt(template, instruction or default, "")
        prompt.closing = (await prompt.text("query", _MARK)).rpartition(_MARK)[2]
        return prompt

    async def text(self, query: str, document: str) -> str:
        """The prompt. Raises `RequestError`."""
        if self._template is None:
            task = self._instruction or _QWEN_TASK
            return f"{_QWEN_OPENING}<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}{_QWEN_CLOSING}"
        turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if self._instruction:
            turns.insert(0, {"role": "system", "content": self._instruction})
        return await self._template.render(turns, True, _MAX_CHARACTERS)
