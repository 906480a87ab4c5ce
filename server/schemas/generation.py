"""Request fields that the generating endpoints share, and the requests of `/v1/completions` and `/admin/abort`.

Every range and limit is part of the schema. Each field's description is one sentence: the OpenAPI document,
`/v1/capabilities` and the parameter table of the documentation are made from it. Unknown keys of structured output are
refused, because each could be a constraint that the response would not keep.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from oarlock.engine.types import SamplingParams
from oarlock.server.schemas.strict_model import (
    ACCEPTED,
    INT32_MAX,
    INT64_MAX,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_METADATA,
    MAX_SEQUENCES,
    WHOLE,
    Bias,
    CacheSalt,
    DecimalId,
    FieldError,
    Priority,
    Prompt,
    Stop,
    StrictModel,
    Timeout,
    TokenId,
    User,
    at_most,
)

MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN_CHARACTERS = 16 * 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_ALTERNATIVES = 1024
MAX_ALTERNATIVE_CHARACTERS = 4096


def _wrong(problem: str) -> PydanticCustomError:
    """Return an error whose message is only this sentence, without pydantic's words around it."""
    return PydanticCustomError("structured_form", "{problem}", {"problem": problem})


def _schema(value: Any) -> Any:
    """Return a JSON schema that was given as it is or as text, within the limits."""
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_CHARACTERS:
            raise _wrong(_too_long(len(value)))
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _wrong("it is text that is not JSON; give the schema itself") from None
    if not isinstance(value, dict | bool):
        raise _wrong("a JSON schema is an object, or true for any value")
    return value


def _within_limits(value: dict[str, Any] | bool) -> dict[str, Any] | bool:
    if value is False:
        raise _wrong("no value matches the schema `false`")
    if _depth_reaches(value, MAX_SCHEMA_DEPTH + 1):
        raise _wrong(f"it is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    try:
        length = len(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    except ValueError:
        raise _wrong("NaN and Infinity are not numbers in JSON") from None
    if length > MAX_SCHEMA_CHARACTERS:
        raise _wrong(_too_long(length))
    return value


def _too_long(length: int) -> str:
    return f"it has {length} characters as JSON; at most {MAX_SCHEMA_CHARACTERS} are accepted"


def _depth_reaches(value: Any, limit: int) -> bool:
    """Return whether containers are nested at least `limit` levels deep."""
    level = [value]
    for _ in range(limit):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder)]
    return True


JsonSchema = Annotated[
    dict[str, Any] | bool,
    BeforeValidator(_schema),
    AfterValidator(_within_limits),
    WithJsonSchema(
        {
            "anyOf": [{"type": "object", "additionalProperties": True}, {"type": "boolean"}, {"type": "string"}],
            "description": f"a JSON schema, or its text; {MAX_SCHEMA_CHARACTERS} characters and {MAX_SCHEMA_DEPTH} "
            "levels at most",
        }
    ),
]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)]
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_ALTERNATIVE_CHARACTERS)]],
    Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True),
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class _Closed(StrictModel):
    """A schema that refuses undeclared keys."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", protected_namespaces=())


class JsonSchemaFormat(_Closed):
    """A named schema, as the official clients send it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = Field(
        None, description="a name for the format; not shown to the model", json_schema_extra={"x-effect": "none"}
    )
    description: Annotated[str, Field(max_length=16 * 1024)] | None = Field(
        None, description="a description; not shown to the model", json_schema_extra={"x-effect": "none"}
    )
    schema_: JsonSchema | None = Field(
        None, alias="schema", description="the response matches it; without it, any JSON"
    )
    strict: bool | None = Field(
        None,
        description="always in effect: the response always matches the schema",
        json_schema_extra={"x-effect": "none"},
    )


class ResponseFormat(_Closed):
    """`response_format`: plain text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="the format of the response")
    json_schema: JsonSchemaFormat | None = Field(None, description="only with `type: json_schema`")
    schema_: JsonSchema | None = Field(
        None, alias="schema", description="the schema itself, as in llama.cpp; with both JSON types"
    )

    @model_validator(mode="after")
    def _schema_fits_type(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise FieldError("response_format", "needs a json_schema with this type: {name, schema}")
        if self.type != "json_schema" and self.json_schema is not None:
            raise FieldError("response_format", "has a json_schema, which needs type json_schema")
        if self.type == "text" and self.schema_ is not None:
            raise FieldError("response_format", "has a schema, which needs type json_object or json_schema")
        named = None if self.json_schema is None else self.json_schema.schema_
        if named is not None and self.schema_ is not None and named != self.schema_:
            raise FieldError("response_format", "has two schemas, 'schema' and 'json_schema.schema', which differ")
        return self

    @property
    def json_form(self) -> dict[str, Any] | bool | None:
        """The schema, from either field, or None if there is none."""
        if self.schema_ is None and self.json_schema is not None:
            return self.json_schema.schema_
        return self.schema_


class StructuredOutputs(_Closed):
    """`structured_outputs`: one constraint that the whole response matches."""

    json_: JsonSchema | None = Field(None, alias="json", description="JSON that matches this schema")
    regex: Pattern | None = Field(None, description="a regular expression without look-around and backreferences")
    choice: Alternatives | None = Field(None, description="one of these strings")
    grammar: GrammarText | None = Field(
        None, description="a context-free grammar, in Lark's notation or in EBNF (GBNF)"
    )
    json_object: bool | None = Field(None, description="any JSON object")


class StreamOptions(StrictModel):
    """Options that only a stream has."""

    include_usage: bool | None = Field(False, description="a final chunk without choices contains `usage`")
    continuous_usage_stats: bool | None = Field(
        False, description="every chunk contains the `usage` so far, unless `include_usage` is false"
    )
    include_obfuscation: bool | None = Field(
        None, description="chunks are never padded, with any value", json_schema_extra=ACCEPTED
    )


class _NamedModel(StrictModel):
    model: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="one of the served model names, returned in the response; without it the first; unknown: 404"
    )


def _scalar_fields() -> dict[str, Any]:
    """Return the fields of the table of sampling parameters, each with its type, range, default and description."""
    found: dict[str, Any] = {}
    for row in SamplingParams.table():
        checks = Field(ge=row.low, le=row.high)
        one = Annotated[int, checks, WHOLE] if isinstance(row.default, int) else Annotated[float, checks]
        found[row.name] = (one | None, Field(row.default, description=row.text))
    return found


if TYPE_CHECKING:
    _ScalarFields = _NamedModel
else:
    _ScalarFields = create_model("_ScalarFields", __base__=_NamedModel, **_scalar_fields())


class SamplingFields(_ScalarFields):
    """The fields that all requests to generate have in common."""

    logit_bias: (
        Annotated[
            dict[DecimalId, Bias],
            Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
            at_most(MAX_BIASES),
        ]
        | None
    ) = Field(None, description="token id (as a string) to a number added to its logit; -100 bans, 100 forces")
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True)] | None
    ) = Field(None, description="only these tokens can be generated")
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = Field(None, description="their token sequences, with and without a leading space, are never completed")
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX), WHOLE] | None = Field(
        None,
        description="equal seeds give equal text, independent of other requests; without it, each "
        "choice gets a random seed",
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        1, description=f"choices per prompt, also with greedy sampling; n x prompts is at most {MAX_SEQUENCES}"
    )
    stop: Stop | None = Field(
        default_factory=list, description="the text ends before the earliest match, which is not returned"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        default_factory=list, description="tokens that end the completion"
    )
    include_stop_str_in_output: bool | None = Field(
        False, description="include the stop string or stop token that matched"
    )
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = Field(
        0, description="the completion cannot end before this many tokens; at most the token limit"
    )
    ignore_eos: bool | None = Field(False, description="the end-of-sequence token does not end the completion")
    skip_special_tokens: bool | None = Field(True, description="false: special tokens are included in the text")
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None,
        description="for every prompt token its log-probability, its rank and this many best "
        "alternatives; the first is null",
    )
    return_token_ids: bool | None = Field(
        False,
        description="return `prompt_token_ids` and `token_ids` with each choice (in chat the prompt's next "
        "to the choices); in streams the prompt's once",
    )
    return_tokens_as_token_ids: bool | None = Field(
        False, description="tokens in logprobs are written `token_id:N` instead of as text"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = Field(
        None,
        description="keep only this many tokens from the prompt's end; -1: as many as fit next to the "
        "completion, at least half of the context; 0 is refused",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        "left", description="side at which `truncate_prompt_tokens` truncates: `right` keeps the start of the prompt"
    )
    response_format: ResponseFormat | None = Field(
        None, description="the completion is JSON: any object, or as a schema specifies"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="the whole completion matches it; constraints under several names must be equal"
    )
    guided_json: JsonSchema | None = Field(None, description="the same as `structured_outputs.json`")
    guided_regex: Pattern | None = Field(None, description="the same as `structured_outputs.regex`")
    guided_choice: Alternatives | None = Field(None, description="the same as `structured_outputs.choice`")
    guided_grammar: GrammarText | None = Field(None, description="the same as `structured_outputs.grammar`")
    json_schema: JsonSchema | None = Field(None, description="llama.cpp's name of `structured_outputs.json`")
    regex: Pattern | None = Field(None, description="SGLang's name of `structured_outputs.regex`")
    ebnf: GrammarText | None = Field(
        None, description="SGLang's name of `structured_outputs.grammar`, always EBNF (GBNF)"
    )
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)] | None = Field(
        None, description="llama.cpp's name of `structured_outputs.grammar`; an empty text is no constraint"
    )
    stream: bool | None = Field(False, description="server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    return_progress: bool | None = Field(
        False, description="only with `stream`: chunks with `prompt_progress` until the first prompt is computed"
    )
    timeout: Timeout = Field(
        None,
        description="time limit in seconds: a choice that runs then ends with finish_reason `timeout`; if "
        "none has begun, 408. The header X-Request-Timeout has the same effect; the shorter "
        "limit applies",
    )
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: User = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
            at_most(MAX_METADATA),
        ]
        | None
    ) = Field(None, description="accepted, but unused", json_schema_extra=ACCEPTED)
    store: bool | None = Field(None, description="accepted; nothing is stored", json_schema_extra=ACCEPTED)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="accepted; there is one tier", json_schema_extra=ACCEPTED
    )

    @model_validator(mode="after")
    def _sampling_fields_agree(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is only allowed with stream: true")
        if self.return_progress and not self.stream:
            raise FieldError("return_progress", "is only allowed with stream: true")
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", "is 0, which would leave no token; use -1 for as many as fit")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """True if the last chunk of a stream carries `usage`."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk of a stream carries `usage`. `include_usage: false` prevents it."""
        options = self.stream_options
        if options is None or ("include_usage" in options.model_fields_set and not options.include_usage):
            return False
        return bool(options.continuous_usage_stats)

    @property
    def limit_field(self) -> str:
        """Name of the field that limits the tokens of a response."""
        return "max_tokens"

    @property
    def num_prompts(self) -> int:
        """Number of prompts of the request."""
        return 1

    @property
    def num_generated(self) -> int:
        """Number of choices to generate for each prompt. The response may keep fewer."""
        return self.n or 1

    def kept_bytes(self, num_bytes: int) -> int:
        """Return how many of this body's `num_bytes` stay in memory after its inputs are dropped."""
        return 0

    def forget_inputs(self) -> None:
        """Drop the inputs after the prompts are made: they may be large, and the response may take long."""
        for name in _INPUTS & self.__dict__.keys():
            self.__dict__[name] = None


_INPUTS = frozenset({"prompt", "suffix", "messages", "tools", "documents", "chat_template_kwargs"})
_INPUTS |= {"allowed_token_ids", "logit_bias", "bad_words", "stop", "metadata"}


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Prompt = Field(
        description="a text, a list of texts, token ids, or a list of lists of token ids; choices are "
        "in order of the prompts"
    )
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = Field(
        16,
        description="token limit, lowered to the rest of the context; 0 scores the prompt, only with "
        "`echo` or `prompt_logprobs`, and decodes nothing",
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        None,
        description="generate this many, return the `n` with the best mean log-probability; not with "
        "`stream`; usage counts all",
    )
    echo: bool | None = Field(False, description="the text and the logprobs include the prompt")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None,
        description="natural logarithms of the raw distribution, before temperature, penalties and "
        "filters: of each token and of this many best alternatives",
    )
    suffix: str | None = Field(
        None, description="text after the completion; only for models with fill-in-the-middle tokens, not with `echo`"
    )
    add_special_tokens: bool | None = Field(True, description="false: no beginning-of-sequence token before a text")

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise FieldError("max_tokens", "may be 0 only with echo or prompt_logprobs, which return the prompt")
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
        """The prompts as a list, with one entry per prompt in any form."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):  # the first element decides the form of all
            return [cast(list[int], self.prompt)]
        return cast(list[str | list[int]], self.prompt)


class AbortRequest(StrictModel):
    """`POST /admin/abort`."""

    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="the `X-Request-Id` of the requests to abort, or the `id` of their response"
    )
    all: bool | None = Field(False, description="true: abort every open request; either this or `request_id`")

    @model_validator(mode="after")
    def _one_of_both(self) -> AbortRequest:
        if self.request_id is None and not self.all:
            raise FieldError("request_id", "is missing: name the request to abort, or set all: true")
        if self.request_id is not None and self.all:
            raise FieldError("all", "cannot be combined with request_id")
        return self
