"""Sampling parameters of offline prompts: the fields of a request, by the names that they have over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Fields of a request that decide its answer.

    A field that is None has the server's default, which for sampling may be the model's own. Ranges and errors are
    those of the server.

    `docs/api.md` describes each field.
    """

    max_tokens: int | None = None  # None: 16 for `generate`, what the context has room for for `chat`
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    n: int | None = None  # choices of each prompt
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None  # so many alternatives with each token
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    timeout: float | None = None  # seconds
    priority: int | None = None
    cache_salt: str | None = None

    def as_fields(self) -> dict[str, Any]:
        """Fields that were given, as the body of a completion has them."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def as_chat_fields(self) -> dict[str, Any]:
        """Fields that were given, as the body of a chat completion has them."""
        found = self.as_fields()
        if self.logprobs is not None:
            found |= {"logprobs": True, "top_logprobs": self.logprobs}
        return found
