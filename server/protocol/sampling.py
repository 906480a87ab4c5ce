"""The wire types of a completion, field for field, with every range and limit in the schema itself.

The sampling fields are shared with conversations (`chat_schemas`). Each field says in one sentence what it does: the
OpenAPI document, `/v1/capabilities` and the table of the documentation are made from here. Knows JSON. Does not know
the model, the tokenizer or the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from engine.types import MAX_PRIORITY, MIN_PRIORITY
from server.protocol.base import (
    ACCEPTED,
    INT32_MAX,
    INT64_MAX,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    MAX_TIMEOUT_S,
    WHOLE,
    Bias,
    DecimalId,
    FieldError,
    Penalty,
    Prompt,
    Stop,
    StrictModel,
    TokenId,
)
from server.protocol.structured_output import (
    Alternatives,
    GrammarText,
    JsonSchema,
    Pattern,
    ResponseFormat,
    StructuredOutputs,
)


class StreamOptions(StrictModel):
    """Options that only a stream has."""

    include_usage: bool | None = Field(False, description="a last chunk without choices carries `usage`")
    continuous_usage_stats: bool | None = Field(False, description="every chunk carries the `usage` so far")
    include_obfuscation: bool | None = Field(
        None, description="chunks are never padded, whatever is asked", json_schema_extra=ACCEPTED
    )


class SamplingFields(StrictModel):
    """What completions and chat have in common."""

    model: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="one of the served names, echoed in the answer; without it the first; unknown: 404"
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(1.0, description="0: greedy, exactly")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        1.0, description="keep the most likely tokens that hold this much probability; 0: greedy"
    )
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = Field(
        0, description="keep so many tokens; -1, 0, or more than the vocabulary: off"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        0.0, description="keep tokens at least so likely, relative to the most likely one"
    )
    presence_penalty: Penalty | None = Field(
        0.0, description="subtracted once from the logit of every token the answer has"
    )
    frequency_penalty: Penalty | None = Field(
        0.0, description="subtracted from a token's logit as often as the answer has it"
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        1.0, description="divides positive logits of tokens in prompt or answer, multiplies negative ones"
    )
    logit_bias: (
        Annotated[
            dict[DecimalId, Bias], Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False})
        ]
        | None
    ) = Field(None, description="token id (as text) to a number added to its logit; -100 bans, 100 forces")
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True)] | None
    ) = Field(None, description="only these tokens may be generated")
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = Field(None, description="their token sequences, with and without a leading space, are never completed")
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX), WHOLE] | None = Field(
        None, description="same seed, same text, whatever else runs; without one, a fresh one for every choice"
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        1, description=f"choices per prompt, greedy ones too; n x prompts is at most {MAX_SEQUENCES}"
    )
    stop: Stop | None = Field(
        default_factory=list, description="the text ends before the earliest match; nothing of it is sent"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        default_factory=list, description="tokens that end the answer"
    )
    include_stop_str_in_output: bool | None = Field(
        False, description="show the stop string or stop token that matched"
    )
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = Field(
        0, description="no end is considered before so many tokens; at most the token limit"
    )
    ignore_eos: bool | None = Field(False, description="the end-of-sequence token does not end the answer")
    skip_special_tokens: bool | None = Field(True, description="false: special tokens are shown in the text")
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="for every prompt token its log-probability, its rank and the so many best; the first is null"
    )
    return_token_ids: bool | None = Field(
        False,
        description="`prompt_token_ids` and `token_ids` with each choice (the prompt's beside the choices in chat); in "
        "streams the prompt's once",
    )
    return_tokens_as_token_ids: bool | None = Field(
        False, description="tokens in logprobs are written `token_id:N` instead of as text"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = Field(
        None,
        description="keep only so many tokens from the prompt's end; -1: as many as fit beside the answer, "
        "at least half of the context; 0 is refused",
    )
    response_format: ResponseFormat | None = Field(
        None, description="the answer is JSON, any object or as a schema says"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="the whole answer matches it; one constraint for each request, whatever the field"
    )
    guided_json: JsonSchema | None = Field(None, description="the same as `structured_outputs.json`")
    guided_regex: Pattern | None = Field(None, description="the same as `structured_outputs.regex`")
    guided_choice: Alternatives | None = Field(None, description="the same as `structured_outputs.choice`")
    guided_grammar: GrammarText | None = Field(None, description="the same as `structured_outputs.grammar`")
    stream: bool | None = Field(False, description="server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = Field(
        None,
        description="seconds: a choice that runs then ends with finish_reason `timeout`; if none has begun, 408. "
        "The header X-Request-Timeout says the same; the shorter counts",
    )
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY), WHOLE] | None = Field(
        0, description="lower runs earlier; waiting counts as well, so that none starves"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]*$")] | None = Field(
        None, description="prompt beginnings are shared in the KV cache only between equal salts; printable ASCII"
    )
    user: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="accepted; a hash of it in the request log", json_schema_extra=ACCEPTED
    )
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, description="accepted, used for nothing", json_schema_extra=ACCEPTED)
    store: bool | None = Field(None, description="accepted; nothing is ever stored", json_schema_extra=ACCEPTED)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="accepted; there is one tier", json_schema_extra=ACCEPTED
    )

    @model_validator(mode="after")
    def _sampling_fields_agree(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is only allowed with stream: true")
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", "is 0, which would leave nothing; use -1 for what fits")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def limit_field(self) -> str:
        """Which field limits the tokens of an answer."""
        return "max_tokens"

    @property
    def num_generated(self) -> int:
        """Choices to generate for each prompt; the answer may keep fewer."""
        return self.n or 1


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
        return len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, whatever the form."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):  # the first decides the form of them all
            return [cast(list[int], self.prompt)]
        return cast(list[str | list[int]], self.prompt)


# Fields of the API that this server knows and does not support, with the values that ask for nothing. Any other value
# is refused: a field is never accepted and ignored. An endpoint that declares a field reads it itself.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "best_of": (None, 1),
    "echo": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "spaces_between_special_tokens": (None, True),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "documents": (None, []),
    "mm_processor_kwargs": (None, {}),
    "logits_processors": (None, []),
    "use_beam_search": (None, False),
    # Constraints as other servers call them: an answer without them would look like one that keeps them.
    "regex": (None,),
    "ebnf": (None,),
    "grammar": (None, ""),
    "json_schema": (None,),
    "guided_whitespace_pattern": (None,),
    "length_penalty": (None, 1),
}

__all__ = [
    "INT32_MAX",
    "MAX_LOGPROBS",
    "NEUTRAL_VALUES",
    "CompletionRequest",
    "FieldError",
    "SamplingFields",
    "StreamOptions",
    "StrictModel",
]
