"""Texts to the token ids of which vectors are made: prompts of the model before them, what is around them, limits."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import ContextLengthError, RequestError
from server.llm.input_processor import InputProcessor
from server.llm.pooler_config import PoolerConfig
from server.tokenizer.tokenizer import TooManyTokensError

_ALL_THAT_FIT = -1  # of truncate_prompt_tokens


class TextIds:
    """Makes the prompts of one model."""

    def __init__(self, processor: InputProcessor, config: PoolerConfig) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._config = config
        self.max_len = min(processor.max_len, config.max_len or processor.max_len)

    def prompt_before(self, name: str | None) -> str:
        """What stands before a text: the model's prompt of this name. Raises `RequestError`."""
        prompts = self._config.prompts
        if name is None:
            return prompts[self._config.default_prompt] if self._config.default_prompt is not None else ""
        if name not in prompts:
            known = f"its prompts are {', '.join(sorted(prompts))}" if prompts else "it has none; leave it out"
            raise RequestError(f"'prompt_name' is no prompt of this model: {known}.", "prompt_name")
        return prompts[name]

    async def of_text(
        self, text: str, param: str, *, truncate: int | None, marks: bool = True, behind: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """`marks`: with the tokens that the model puts around a text. `behind`: what follows it, never cut away.

        Raises `RequestError`; `param` names the field that the text came from.
        """
        if self._config.lower_case:
            text = text.lower()
        keep = self._kept(truncate)
        most = (self.max_len if keep is None else keep) - len(behind)
        try:
            ids, at_least = await self._tokenizer.aencode(text, marks, most=most), 0
        except TooManyTokensError as error:
            ids, at_least = [], error.at_least
        if max(at_least, len(ids)) > most:
            if keep is None:
                number = f"at least {at_least + len(behind)}" if at_least else str(len(ids) + len(behind))
                raise self._too_long(number, param)
            ids = await self._beginning(text, most, marks)
        ids = [*ids, *behind]
        if not ids:
            raise RequestError(f"'{param}' has an empty text, of which this model makes no token.", param)
        return await self._checked(ids, param)

    async def _beginning(self, text: str, most: int, marks: bool) -> list[int]:
        """The first tokens of a text that has more than `most`, with what is put around it."""
        opening, closing = (self._tokenizer.opening, self._tokenizer.closing) if marks else ([], [])
        room = most - len(opening) - len(closing)
        if room < 1:
            message = "'truncate_prompt_tokens' leaves no token of the text. Raise it."
            raise RequestError(message, "truncate_prompt_tokens")
        own = await self._tokenizer.aencode(text, False, first=room)
        return [*opening, *own[:room], *closing]

    async def of_ids(self, ids: Sequence[int], param: str, *, truncate: int | None) -> tuple[int, ...]:
        """Ids that the caller has made. Raises `RequestError`."""
        keep = self._kept(truncate)
        return await self._checked(ids if keep is None else ids[:keep], param)

    async def _checked(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        if len(ids) > self.max_len:
            raise self._too_long(str(len(ids)), param)
        await self._processor.check_ids(ids, param)
        return tuple(ids)

    def _kept(self, truncate: int | None) -> int | None:
        return self.max_len if truncate == _ALL_THAT_FIT else truncate

    def _too_long(self, number: str, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"A text of '{param}' has {number} tokens, and this model takes {self.max_len}. Send a shorter one, or cut "
            "it with truncate_prompt_tokens: -1.",
            param,
        )
