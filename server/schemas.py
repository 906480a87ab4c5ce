"""The wire types of requests, field for field, with every range and limit in the schema itself.

Read from raw bytes by strict pydantic: NaN, numbers as text, `true` for a number, lone surrogates and deep nesting are
refused there. Knows JSON. Does not know the model, the tokenizer or the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

MAX_PROMPTS = 1024
MAX_CHOICES = 128
MAX_SEQUENCES = 2048  # prompts x n of one request
MAX_PROMPT_IDS = 1_048_576
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


def _prompt_form(value: Any) -> str | None:
    """Which of the four forms a prompt has; the first element decides, the rest is then checked against it."""
    if isinstance(value, str):
        return "form:text"
    if not isinstance(value, list):
        return None
    if not value or isinstance(value[0], str):
        return "form:texts"
    if isinstance(value[0], list):
        return "form:id_lists"
    return "form:ids" if isinstance(value[0], int) and not isinstance(value[0], bool) else None


def _stop_form(value: Any) -> str | None:
    return "form:one" if isinstance(value, str) else "form:many" if isinstance(value, list) else None


Prompt = Annotated[
    Annotated[str, Tag("form:text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("form:texts")]
    | Annotated[TokenIds, Tag("form:ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("form:id_lists")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt_form",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list of lists of token ids",
    ),
]
Stop = Annotated[
    Annotated[StopText, Tag("form:one")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True), Tag("form:many")],
    Discriminator(
        _stop_form, custom_error_type="stop_form", custom_error_message="must be a string or a list of strings"
    ),
]


class Wire(BaseModel):
    """Strict, and `null` means the default everywhere."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", protected_namespaces=())

    def model_post_init(self, context: Any, /) -> None:
        for name, described in type(self).model_fields.items():
            if described.default is not None and getattr(self, name) is None:
                setattr(self, name, described.get_default(call_default_factory=True))


class StreamOptions(Wire):
    """Options that only a stream has."""

    include_usage: bool | None = False


class SamplingFields(Wire):
    """What completions and chat have in common."""

    model: Annotated[str, Field(max_length=512)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    stop: Stop | None = Field(default_factory=list)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = False
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = 0
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        default_factory=list
    )
    user: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is only allowed with stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = 16
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "may be 0 only with echo: true, where the prompt is the answer")
        if (self.min_tokens or 0) > (self.max_tokens or 0):
            raise FieldError("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        if self.num_prompts * (self.n or 1) > MAX_SEQUENCES:
            raise FieldError("n", f"times the number of prompts ({self.num_prompts}) is above {MAX_SEQUENCES}")
        return self

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, whatever the form."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]


def _content_form(value: Any) -> str | None:
    return "form:plain" if isinstance(value, str) else "form:parts" if isinstance(value, list) else None


class TextPart(Wire):
    """The one kind of content part that a text model can read."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("form:plain")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True), Tag("form:parts")],
    Discriminator(
        _content_form, custom_error_type="content_form", custom_error_message="must be a string or a list of text parts"
    ),
]


class ChatMessage(Wire):
    """One turn of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None:
            raise FieldError("messages", "holds a message without content")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "is only allowed with logprobs: true")
        limit = self.token_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise FieldError("min_tokens", f"is {self.min_tokens}, more than the token limit ({limit})")
        return self

    @property
    def token_limit(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class FieldError(ValueError):
    """Two fields that do not go together. `param` is the one to change."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"'{param}' {problem}.")
        self.param = param


# Fields of the API that this server knows and does not support yet, with the values that ask for nothing. Any other
# value is refused: a field is never accepted and ignored.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
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
    "prompt_logprobs": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "add_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "cache_salt": (None,),
    "priority": (None, 0),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
}
