"""The request of `/v1/completions`, field for field."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field, model_validator

from oarlock.server.endpoints.schema import SamplingFields
from oarlock.server.strict_model import INT32_MAX, MAX_CHOICES, MAX_LOGPROBS, MAX_SEQUENCES, WHOLE, FieldError, Prompt


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Prompt = Field(description="text, texts, token ids, or lists of token ids; choices go prompt by prompt")
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = Field(
        16,
        description="a ceiling: cut to what the context has room for; 0 scores the prompt, with `echo` or "
        "`prompt_logprobs` only, and costs no decoding",
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        None,
        description="generate so many, answer with the `n` of the best mean log-probability; not with `stream`; "
        "usage counts all",
    )
    echo: bool | None = Field(False, description="the text begins with the prompt, and so do the logprobs")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None,
        description="natural logarithms of the raw distribution, before temperature, penalties and filters: each "
        "token's own and the so many best",
    )
    suffix: str | None = Field(
        None, description="text behind the answer; only for models with fill-in-the-middle tokens, not with `echo`"
    )
    add_special_tokens: bool | None = Field(True, description="false: no beginning-of-sequence token before a text")

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise FieldError("max_tokens", "may be 0 only with echo or prompt_logprobs, where the prompt is the answer")
        if (self.min_tokens or 0) > (self.max_tokens or 0):
            raise FieldError("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise FieldError("best_of", f"is {self.best_of}, less than n ({self.n})")
        if self.num_generated > (self.n or 1) and self.stream:
            raise FieldError("best_of", "is above n, which a stream cannot wait for; leave one of them out")
        if self.num_prompts * self.num_generated > MAX_SEQUENCES:
            name = "n" if self.best_of is None else "best_of"
            raise FieldError(
                name,
                f"times the number of prompts ({self.num_prompts}) is above {MAX_SEQUENCES}; send several requests",
            )
        if self.suffix and self.echo:
            raise FieldError("suffix", "cannot be combined with echo")
        return self

    @property
    def num_generated(self) -> int:
        return self.best_of or self.n or 1

    @property
    def num_prompts(self) -> int:
        """Number of prompts in the request."""
        return len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, whatever the form."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):  # the first decides the form of them all
            return [cast(list[int], self.prompt)]
        return cast(list[str | list[int]], self.prompt)
