"""Conversion of text to token ids and back, from the files of a checkpoint: one `Tokenizer` with a few threads.

Reads `tokenizer.json` with only the `tokenizers` library, so the frontend needs neither torch nor transformers. A
checkpoint without that file is converted by transformers. Never runs Python code of the checkpoint.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tokenizers

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import is_there, read_text
from oarlock.engine.panics import ENDS_TASK
from oarlock.server.config.settings import Settings
from oarlock.server.hub.model_path import VOCABULARY_FILES, OnDetailedProgress, read_json, resolve, resolve_tokenizer
from oarlock.server.hub.tiktoken_model import FILE as TIKTOKEN_FILE
from oarlock.server.hub.tiktoken_model import tiktoken_json
from oarlock.server.llm import tokenizer_file
from oarlock.server.llm.chat_template import MOST_CHARACTERS, ChatTemplate, read_template, with_template
from oarlock.server.llm.detokenizer import (
    BytesDetokenizer,
    Detokenizer,
    TokenizerError,
    WindowDetokenizer,
    token_bytes_for,
    tokenizer_error,
)
from oarlock.server.llm.generation_config import vocab_size_of
from oarlock.server.llm.text_pieces import TextPieces, pieces_for
from oarlock.server.llm.vocabulary_files import check_vocabulary_files

_T = TypeVar("_T")
_DECODED_AT_ONCE = 1 << 14  # limit in ids; joining the bytes of a million would hold the GIL for too long
# Sizes in characters or ids from which an input shares a thread with similar inputs, so that shorter ones do not wait.
_MEDIUM = 16 * 1024
_LONG = 256 * 1024
_PIECE = 64 * 1024  # characters of a long text that are tokenized at once
# Maximum size in UTF-8 of a text that is tokenized at once because it cannot be cut. It limits the CPU time and memory
# of one call.
MOST_UNCUT_BYTES = 512 * 1024
MOST_DECODED = 16 << 20  # limit in characters for a text that is decoded from token ids
_SAMPLE = "a"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The fill-in-the-middle tokens of each model family: before the prompt, before the suffix, before the completion.
_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


class TooManyTokensError(Exception):
    """Raised if a text has more tokens than the caller accepts, `at_least` this number. Not all of it was tokenized."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class PairMarks(NamedTuple):
    """Ids before, between and after two texts, and whether type ids mark the text that a token belongs to."""

    opening: tuple[int, ...]
    between: tuple[int, ...]
    closing: tuple[int, ...]
    has_types: bool


# Files of a multimodal model's processor, in which it has its chat template; the first that has one counts.
_PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
_TEMPLATE_FOR_TOOLS = "additional_chat_templates/tool_use.jinja"  # path that transformers' save_pretrained uses


class Tokenizer:
    """Tokenizer of one checkpoint. The synchronous methods are for threads, the `a…` methods for the event loop."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        template_file: Path | None = None,
        described: dict[str, Any] | None = None,
    ) -> None:
        """`config`: content of `tokenizer_config.json`. `template_file`: the file of its chat template, if it is a
        separate file. `described`: the tokenizer as the JSON object of a `tokenizer.json`, if known.

        Raises `StartupError` if the chat template is unusable.
        """
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        written = backend.to_str()
        described = json.loads(written) if described is None else described
        # Covers everything that determines ids: vocabulary and rules, special tokens, the chat template.
        self.digest = hashlib.sha256(f"{written}{json.dumps(config, sort_keys=True)}".encode()).hexdigest()
        self._special = frozenset(item["id"] for item in described["added_tokens"] if item["special"])
        self._bytes = token_bytes_for(backend, described["decoder"], self._special)
        vocabulary = described["model"].get("vocab") or ()
        # Without added tokens, since published checkpoints have some beyond the embedding.
        self.most_own_id = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        self._names = _special_names(config)
        self.eos_token_ids = self._ids_of(self._names.get("eos_token"))  # one id, or none
        self.bos = list(self._ids_of(self._names.get("bos_token")))  # one id, or none
        self._add_bos = config.get("add_bos_token")
        self._added_ids = self._find_added_ids()
        self._pieces = pieces_for(described) if self._added_ids is not None else TextPieces()
        self.template = ChatTemplate.from_config(config, self._names, template_file)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        self._medium_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-medium")
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-long")
        self._uncut_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-uncut")

    @staticmethod
    def load(
        directory: str | Path, chat_template: str | Path | None = None, parsers: Mapping[str, str] | None = None
    ) -> "Tokenizer":
        """Return the tokenizer of a checkpoint's folder, with its chat template or the template in `chat_template`.

        `parsers`: see `ChatTemplate.parsers`. Raises `StartupError` if a file is unusable.
        """
        path = Path(directory)
        config = read_json(path / "tokenizer_config.json")
        template_file = path / "chat_template.jinja" if chat_template is None else Path(chat_template)
        if parsers:
            config["parsers"] = dict(parsers)
        _check_config(path / "tokenizer_config.json", config)
        if chat_template is not None:
            config["chat_template"] = read_template(template_file)
        elif is_there(template_file):
            config["chat_template"] = read_text(template_file, MOST_CHARACTERS)
        else:
            template_file = _add_template_of_processor(path, config)
        if chat_template is None and is_there(for_tools := path / _TEMPLATE_FOR_TOOLS):
            config["chat_template"] = with_template(config, "tool_use", read_text(for_tools, MOST_CHARACTERS))
        backend, described = _read_backend(path)
        return Tokenizer(backend, config, template_file, described)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which have a name and add nothing to a text."""
        return self._special

    @property
    def fim_token_ids(self) -> tuple[int, int, int] | None:
        """Fill-in-the-middle ids before the prompt, before the suffix, and after it; None without such tokens."""
        for names in _FIM_TOKENS:
            before, between, after = (self.backend.token_to_id(name) for name in names)
            if before is not None and between is not None and after is not None:
                return before, between, after
        return None

    @property
    def opening(self) -> list[int]:
        """Ids that `encode` puts before a text, such as a BOS."""
        return self._with_bos(self._added_ids[0] if self._added_ids else [], "")

    @property
    def closing(self) -> list[int]:
        """Ids that `encode` puts after a text, such as a separator."""
        return self._added_ids[1] if self._added_ids else []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the special tokens that the checkpoint adds to a text (such as a BOS).

        For texts of limited length. Raises `TokenizerError` if the library fails.
        """
        # Only the batch method releases the GIL: a long text must not block the event loop.
        try:
            ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise tokenizer_error(error, "this text") from None
        return self._with_bos(ids, text) if add_special_tokens else ids

    def _with_bos(self, ids: list[int], text: str) -> list[int]:
        """Add the BOS to the `ids` of `text`, or remove it, if the configuration sets `add_bos_token`."""
        if not self.bos or self._add_bos is None:
            return ids
        if self._add_bos and ids[:1] != self.bos:
            return [*self.bos, *ids]
        if not self._add_bos and ids[:1] == self.bos and not text.startswith(self._names["bos_token"]):
            return ids[1:]
        return ids

    def _find_added_ids(self) -> tuple[list[int], list[int]] | None:
        """Return the ids that the checkpoint adds before and after a text; None if they cannot be separated."""
        plain, whole = (self.backend.encode(_SAMPLE, add_special_tokens=add).ids for add in (False, True))
        for start in range(len(whole) - len(plain) + 1):
            if plain and whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        return None

    def pair_marks(self) -> PairMarks | None:
        """Return the ids around two texts that are read together; None if the checkpoint's files do not define them."""
        plain = self.backend.encode(_SAMPLE, add_special_tokens=False).ids
        both = self.backend.encode(_SAMPLE, _SAMPLE, add_special_tokens=True)
        ids, size = both.ids, len(plain)
        starts = [start for start in range(len(ids) - size + 1) if ids[start : start + size] == plain]
        if not plain or len(starts) != 2:
            return None
        first, second = starts
        between = tuple(ids[first + size : second])
        return PairMarks(tuple(ids[:first]), between, tuple(ids[second + size :]), both.type_ids[second] == 1)

    async def aencode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        most: int | None = None,
        first: int | None = None,
        last: int | None = None,
        param: str | None = None,
    ) -> list[int]:
        """Encode a text in this tokenizer's threads, as `encode` does; cancelling ends the work on a long text.

        `most`: raises `TooManyTokensError` as soon as it is certain that the text has more tokens. `last`: only this
        number of ids from the end is needed; little more of a long text is tokenized and returned. `first`: the same
        from the start, without special tokens. `param` names the field of the text in errors.

        Raises `TokenizerError` if the library fails, or if a part that is needed is too long and cannot be cut.
        """
        assert first is None or not add_special_tokens
        try:
            return await self._encode_long(text, add_special_tokens, most, first, last)
        except TokenizerError as error:
            error.param = param
            raise

    async def _encode_long(
        self, text: str, add_special_tokens: bool, most: int | None, first: int | None, last: int | None
    ) -> list[int]:
        if len(text) <= _PIECE or self._added_ids is None:
            _check_uncut(text)
            whole = partial(self.encode, text, add_special_tokens=add_special_tokens)
            return await self.run(whole, len(text), is_uncut=len(text) > _LONG)
        least = 0 if most is None else await self.run(lambda: self._pieces.least_tokens(text), len(text))
        if most is not None and least > most:
            raise TooManyTokensError(least)
        pieces = await self.run(lambda: list(self._pieces.pieces(text, _PIECE)), len(text))
        if last is not None:
            pieces.reverse()
        parts: list[list[int]] = []
        count = 0
        for start, end in pieces:  # one piece at a time: texts that share a thread take turns
            piece = text[start:end]
            _check_uncut(piece)
            work = partial(self.encode, piece, add_special_tokens=False)
            parts.append(await self.run(work, len(text), is_uncut=end - start > _LONG))
            count += len(parts[-1])
            if most is not None and count > most:
                raise TooManyTokensError(max(count, least))
            if (last is not None and count >= last) or (first is not None and count >= first):
                break
        if last is not None:
            parts.reverse()
        ids = list(chain.from_iterable(parts))
        if not add_special_tokens:
            return ids
        before, behind = self._added_ids
        if len(parts) < len(pieces):  # the start is not needed
            return [*ids, *behind]
        return self._with_bos([*before, *ids, *behind], text)

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), kept_special_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return the incremental decoder of a sequence that continues `prompt_ids`.

        `kept_special_ids`: special ids whose name is part of the text; the others add nothing.
        """
        if self._bytes is not None:
            return BytesDetokenizer(self._bytes, prompt_ids, kept_special_ids)
        return WindowDetokenizer(self.backend, prompt_ids, kept_special_ids & self._special)

    def decode(self, ids: Sequence[int], kept_special_ids: frozenset[int] = frozenset()) -> str:
        """Return the text of `ids`, equal to the joined pieces of a stream.

        Raises `TokenizerError`, also if the text is too long.
        """
        detokenizer = self.detokenizer((), kept_special_ids)
        pieces: list[str] = []
        size = 0
        for start in range(0, len(ids), _DECODED_AT_ONCE):
            pieces.append(detokenizer.push(ids[start : start + _DECODED_AT_ONCE]))
            size += len(pieces[-1])
            if size > MOST_DECODED:
                raise TokenizerError(
                    f"The text of these token ids has more than {MOST_DECODED} characters. Send fewer ids at a time."
                )
        return "".join(pieces) + detokenizer.flush()

    async def atext(self, ids: Sequence[int], kept_special_ids: frozenset[int], param: str) -> str:
        """Return the text of `ids`, decoded in this tokenizer's threads. `param` names the field of the ids in errors.

        Raises the errors of `decode`.
        """
        try:
            return await self.run(lambda: self.decode(ids, kept_special_ids), len(ids))
        except TokenizerError as error:
            error.param = param
            raise

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; for a special token, its name."""
        if self._bytes is not None:
            return self._bytes(token_id)
        if token_id in self._special:
            return (self.backend.id_to_token(token_id) or "").encode()
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        r"""Return one token as text; a part of a character is written as `bytes:\xe4\xb8`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def close(self) -> None:
        """End the threads and the renderer processes. Work that has not begun is cancelled."""
        self.template.close()
        for pool in (self._pool, self._medium_pool, self._long_pool, self._uncut_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _ids_of(self, token: str | None) -> tuple[int, ...]:
        token_id = self.backend.token_to_id(token) if token else None
        return () if token_id is None else (token_id,)

    async def run(self, work: Callable[[], _T], size: int, *, is_uncut: bool = False) -> _T:
        """Return the result of `work`, run in this tokenizer's threads.

        `size`: characters or ids of the input. Inputs of medium size share one thread and long inputs another, so that
        short inputs never wait for them; long texts that cannot be cut into pieces (`is_uncut`) share a third.
        """
        pool = self._pool if size < _MEDIUM else self._medium_pool if size < _LONG else self._long_pool
        pool = self._uncut_pool if is_uncut else pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def _check_uncut(text: str) -> None:
    """Raise `TokenizerError` for a text that is too long to be tokenized at once."""
    if len(text) * 4 > MOST_UNCUT_BYTES and (size := len(text.encode(errors="replace"))) > MOST_UNCUT_BYTES:
        raise TokenizerError(
            f"A part of the text has {size} bytes without a boundary at which it can be split, such as a "
            f"space between words; at most {MOST_UNCUT_BYTES} can be tokenized at once. Shorten or split "
            "that part."
        )


def _read_backend(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer in a folder and the JSON object that describes it. Raises `StartupError` if unusable."""
    file = path / "tokenizer.json"
    return tokenizer_file.load(file) if is_there(file) else _convert(path)


def _add_template_of_processor(folder: Path, config: dict[str, Any]) -> Path | None:
    """Replace the chat template in `config` by that of the model's processor, and return its file. None: it has
    none."""
    for name in _PROCESSOR_FILES:
        template = read_json(folder / name).get("chat_template")
        if template is not None:
            if not isinstance(template, str):
                raise StartupError(
                    f"chat_template in {folder / name} is {shown(template)}, which is not a template.",
                    "Correct it, or serve with --chat-template and your own file.",
                )
            config["chat_template"] = template
            return folder / name
    return None


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raise `StartupError` if a value of `tokenizer_config.json` that is used here has the wrong type."""
    for name in _NAMED_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise StartupError(f"{name} in {file} is {shown(config[name])}, not the text of a token.", "Correct it.")
    if not isinstance(config.get("add_bos_token"), bool | None):
        raise StartupError(f"add_bos_token in {file} is {shown(config['add_bos_token'])}.", "Write true or false.")


def _convert(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer, with its description, of a checkpoint that has only a SentencePiece model or a vocabulary.

    Raises `StartupError` if it cannot be converted.
    """
    if is_there(path / TIKTOKEN_FILE):
        return tokenizer_file.made(path / TIKTOKEN_FILE, tiktoken_json(path))
    if not any(is_there(path / name) for name in VOCABULARY_FILES):  # transformers would create an empty vocabulary
        raise StartupError(
            f"{path} has no tokenizer.json, nor any other tokenizer vocabulary.",
            "Put the checkpoint's tokenizer.json next to its weights.",
        )
    check_vocabulary_files(path)
    from transformers import AutoTokenizer  # slow to import, and needed by few checkpoints

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        backend = _checked(getattr(loaded, "backend_tokenizer", None))
    except BaseException as error:  # transformers raises exceptions of many kinds
        if isinstance(error, ENDS_TASK):
            raise
        reason = " ".join(str(error).split())[:200]
        raise StartupError(
            f"{path} has no tokenizer.json and its tokenizer cannot be converted: {reason}.",
            "Put the checkpoint's tokenizer.json next to its weights.",
        ) from None
    described = json.loads(backend.to_str())
    tokenizer_file.check(path, described)
    tokenizer_file.try_out(path, backend)
    return backend, described


def _checked(backend: object) -> tokenizers.Tokenizer:
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TypeError("it has no fast version")
    return backend


def _special_names(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name (`bos_token`, `eos_token` …) as plain strings, for chat templates."""
    names = {}
    for key, value in config.items():
        if key.endswith("_token") and isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            names[key] = value
    return names


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Paths of the files that the server reads when it starts, all on this machine."""

    model: str  # directory
    tokenizer: str | None  # directory; None: the model's
    chat_template: str | None  # file; None: the tokenizer's template
    parsers: Mapping[str, str]  # the operator's choices for the chat format and its parsers

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `StartupError`, also if it has tokens that the model's embedding lacks."""
        tokenizer = Tokenizer.load(self.tokenizer or self.model, self.chat_template, self.parsers)
        file = Path(self.model) / "config.json"
        size = vocab_size_of(read_json(file))
        if size is not None and tokenizer.most_own_id >= size:
            raise StartupError(
                f"The tokenizer of {self.tokenizer or self.model} gives a token the id {tokenizer.most_own_id}, "
                f"but the vocab_size in {file} is {size}.",
                "Use the tokenizer of this checkpoint.",
            )
        return tokenizer


async def find_files(settings: Settings, on_progress: OnDetailedProgress) -> ModelFiles:
    """Fetch missing files, the smallest first. A cancelled download can be resumed.

    Raises `StartupError` if a file is missing or unusable.
    """
    if settings.chat_template is not None:
        await asyncio.to_thread(read_template, settings.chat_template)
    tokenizer = await resolve_tokenizer(settings, on_progress)
    options = ("tool_call_parser", "reasoning_parser", "chat_template_content_format")
    named = {option: getattr(settings, option) for option in options}
    parsers = {option: name for option, name in named.items() if name != "auto"}
    return ModelFiles(await resolve(settings, on_progress, tokenizer), tokenizer, settings.chat_template, parsers)
