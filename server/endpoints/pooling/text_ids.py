"""Texts to the token ids of which vectors are made: prompts of the model before them, what is around them, limits."""

from __future__ import annotations

from collections.abc import Sequence

from oarlock.engine.errors import ContextLengthError, RequestError
from oarlock.server.llm.input_processor import InputProcessor
from oarlock.server.llm.pooler_config import PoolerConfig
from oarlock.server.llm.tokenizer import TooManyTokensError

_ALL_THAT_FIT = -1  # of truncate_prompt_tokens
QUERY, DOCUMENT = "query", "document"
# The prompts that sentence-transformers tries for each, in its order; a model that has none takes the bare text.
_PROMPTS_OF = {QUERY: ("query",), DOCUMENT: ("document", "passage", "corpus")}
# Other words for them: of Cohere, of NVIDIA NIM.
_ALIASES = {"search_query": QUERY, "search_document": DOCUMENT, "passage": DOCUMENT}


class TextIds:
    """Makes the prompts of one model."""

    def __init__(self, processor: InputProcessor, config: PoolerConfig) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._config = config
        self.max_len = min(processor.max_len, config.max_len or processor.max_len)

    def prompt_before(self, name: str | None) -> str:
        """The model's prompt of this name, which stands before a text. Raises `RequestError`."""
        prompts = self._config.prompts
        if name is None:
            return prompts[self._config.default_prompt] if self._config.default_prompt is not None else ""
        if name not in prompts:
            known = f"its prompts are {', '.join(sorted(prompts))}" if prompts else "it has none; leave it out"
            raise RequestError(f"'prompt_name' is no prompt of this model: {known}.", "prompt_name")
        return prompts[name]

    def prompt_for(self, input_type: str | None) -> str:
        """The prompt that stands before a text of this kind, or the one of this name. Raises `RequestError`."""
        known = self._config.prompts
        if input_type is None or input_type in known:
            return self.prompt_before(input_type)
        tried = _PROMPTS_OF.get(_ALIASES.get(input_type, input_type))
        if tried is None:
            others = sorted(known.keys() - _PROMPTS_OF.keys() - _ALIASES.keys())
            names = ", ".join([*_PROMPTS_OF, *_ALIASES, *others])
            raise RequestError(f"'input_type' is {input_type[:64]!r}, but it must be one of {names}.", "input_type")
        return next((known[name] for name in tried if name in known), "")

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

    async def of_pair(
        self, first: str, second: str, params: tuple[str, str], *, truncate: int | None
    ) -> tuple[tuple[int, ...], int]:
        """Two texts side by side, and where the second begins, or 0 where the model is not told. Of pairs that are too
        long the longer text is cut, as sentence-transformers does it.

        Raises `RequestError`; `params` name the fields that the texts came from.
        """
        marks = self._tokenizer.pair_marks()
        assert marks is not None, "the start has checked that there are some"
        keep = self._kept(truncate)
        most = self.max_len if keep is None else keep
        room = most - sum(map(len, marks[:3]))
        texts = []
        for text, param in zip((first, second), params, strict=True):
            text = text.lower() if self._config.lower_case else text
            texts.append(await self._within(text, param, room, cut=keep is not None))
        left, right = texts
        if len(left) + len(right) > room:
            if keep is None:
                raise self._too_long(str(most - room + len(left) + len(right)), params[1])
            half = room // 2 + (room % 2 if len(left) > len(right) else 0)  # of the first, if both must be cut
            left = left[: max(half, room - len(right))]
            right = right[: room - len(left)]
        start = len(marks.opening) + len(left) + len(marks.between)
        ids = (*marks.opening, *left, *marks.between, *right, *marks.closing)
        return await self._checked(ids, params[1]), start if marks.has_types else 0

    async def _within(self, text: str, param: str, room: int, *, cut: bool) -> list[int]:
        """The ids of a text without marks, or with `cut` the first `room` of them. Raises `RequestError`."""
        if cut:
            if room < 2:
                message = "'truncate_prompt_tokens' leaves no token of the texts. Raise it."
                raise RequestError(message, "truncate_prompt_tokens")
            return (await self._tokenizer.aencode(text, False, first=room))[:room]
        try:
            return await self._tokenizer.aencode(text, False, most=self.max_len)
        except TooManyTokensError as error:
            raise self._too_long(f"at least {error.at_least}", param) from None

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
