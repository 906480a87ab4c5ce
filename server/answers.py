"""The JSON of answers, whole and in chunks, as the API documents it. Hand-built: this is the path of every token.

Knows field names and their order; knows nothing of sockets, the engine or how the text came about.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from server.choice import Delta, TokenScore
from server.service import Generation
from server.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_FLOOR = -9999.0  # JSON has no -Infinity; the field's convention for "impossible"
# Valid in JSON strings, yet taken for line ends by some clients that split events by lines.
_LINE_ENDS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"})


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer have in common."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_text(text: str) -> str:
    """`text` as a JSON string that stays on one line for every reader."""
    return encode_basestring(text).translate(_LINE_ENDS) if not text.isascii() else encode_basestring(text)


def usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


class AnswerFormat(ABC):
    """One generation as JSON: chunks for a stream, one body for a plain answer."""

    def __init__(self, head: Head, tokenizer: Tokenizer, with_logprobs: bool, with_usage: bool = False) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._start = f"data: {dumps(head.fields())[:-1]}" + ',"choices":[{"index":'
        self._end = '}],"usage":null}\n\n' if with_usage else "}]}\n\n"

    @abstractmethod
    def opening(self, num_choices: int) -> Iterable[bytes]:
        """Chunks that come before any text."""

    @abstractmethod
    def _piece(self, delta: Delta) -> str:
        """The member of a chunk's choice that carries the text."""

    @abstractmethod
    def _choice(self, text: str) -> dict[str, Any]:
        """The member of a whole choice that carries the text."""

    @abstractmethod
    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any]: ...

    def chunk(self, delta: Delta) -> bytes | None:
        """One event, or None when the piece has nothing to show."""
        if not (delta.text or delta.scores or delta.finish_reason):
            return None
        logprobs = dumps(self._logprobs(delta.scores)) if self._with_logprobs else "null"
        ending = '"finish_reason":null'
        if delta.finish_reason is not None:
            ending = f'"finish_reason":"{delta.finish_reason}","stop_reason":{dumps(delta.stop_reason)}'
        text = f'{self._start}{delta.index},{self._piece(delta)},"logprobs":{logprobs},{ending}{self._end}'
        return text.encode()

    def usage_chunk(self, generation: Generation) -> bytes:
        return f"data: {dumps({**self._head.fields(), 'choices': [], 'usage': usage(generation)})}\n\n".encode()

    def whole(self, deltas: Sequence[Sequence[Delta]], generation: Generation) -> bytes:
        """The plain answer, from every choice's pieces."""
        choices = []
        for index, pieces in enumerate(deltas):
            scores = [score for piece in pieces for score in piece.scores]
            choices.append(
                {
                    "index": index,
                    **self._choice("".join(piece.text for piece in pieces)),
                    "logprobs": self._logprobs(scores) if self._with_logprobs else None,
                    "finish_reason": pieces[-1].finish_reason,
                    "stop_reason": pieces[-1].stop_reason,
                }
            )
        return dumps({**self._head.fields(), "choices": choices, "usage": usage(generation)}).encode()


class CompletionFormat(AnswerFormat):
    """`text_completion`."""

    def opening(self, num_choices: int) -> Iterable[bytes]:
        return ()

    def _piece(self, delta: Delta) -> str:
        return f'"text":{json_text(delta.text)}'

    def _choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        name = self._tokenizer.token_text
        top: list[dict[str, float] | None] = []
        for score in scores:
            if score.logprob is None:
                top.append(None)
                continue
            entries = {name(token_id): _finite(logprob) for token_id, logprob in score.top}
            top.append(entries | {name(score.token_id): _finite(score.logprob)})
        return {
            "tokens": [name(score.token_id) for score in scores],
            "token_logprobs": [None if score.logprob is None else _finite(score.logprob) for score in scores],
            "top_logprobs": top,
            "text_offset": [score.offset for score in scores],
        }


class ChatFormat(AnswerFormat):
    """`chat.completion` and its chunks."""

    def opening(self, num_choices: int) -> Iterable[bytes]:
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return [f"{self._start}{index},{role}{self._end}".encode() for index in range(num_choices)]

    def _piece(self, delta: Delta) -> str:
        if not delta.text and not delta.scores:
            return '"delta":{}'
        return f'"delta":{{"content":{json_text(delta.text)}}}'

    def _choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        content = []
        for score in scores:
            top = [self._entry(token_id, logprob) for token_id, logprob in score.top]
            content.append({**self._entry(score.token_id, score.logprob or 0.0), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _FLOOR
