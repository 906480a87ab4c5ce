"""The requests for vectors and scores, field for field: `/v1/embeddings`, `/pooling`, `/v1/rerank` and `/v1/score`."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Discriminator, Field, Tag, model_validator

from oarlock.server.schemas.strict_model import (
    INT32_MAX,
    WHOLE,
    CacheSalt,
    FieldError,
    Priority,
    StrictModel,
    Timeout,
    TokenIds,
    User,
    prompt_form,
)

MAX_INPUTS = 2048  # limit of one request, as in OpenAI's API


class PoolingFields(StrictModel):
    """Fields that every request for vectors or scores may have."""

    model: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="one of the served model names, returned in the response; without it the first; unknown: 404"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = Field(
        None,
        description="keep only this many tokens from the start of a text, including the model's special "
        "tokens; -1: as many as fit; without it, a text that is too long is refused",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        "right", description="side at which a text is truncated: only its end; `left` is refused"
    )
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: User = None

    @model_validator(mode="after")
    def _some_tokens_are_kept(self) -> PoolingFields:
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", "is 0, which would leave no token; use -1 for as many as fit")
        if self.truncation_side == "left":
            raise FieldError(
                "truncation_side", "is 'left', but texts can only be truncated at their end; truncate them yourself"
            )
        return self


Input = Annotated[
    Annotated[str, Tag("form:text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("form:texts")]
    | Annotated[TokenIds, Tag("form:ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("form:id_lists")],
    Discriminator(
        prompt_form,
        custom_error_type="prompt_form",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list of lists of token ids",
    ),
]


class InputFields(PoolingFields):
    """Fields that both requests for vectors have in common."""

    input: Input = Field(
        description="a text, a list of texts, token ids, or a list of lists of token ids, which are used unchanged"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="`base64`: the bytes of the values, little-endian float32"
    )
    dimensions: Annotated[int, Field(ge=1, le=65_536), WHOLE] | None = Field(
        None, description="keep only this many values and normalize again; for models that were trained for it"
    )
    normalize: bool | None = Field(None, description="normalize to length 1 (default: as the model's files specify)")
    prompt_name: Annotated[str, Field(max_length=128)] | None = Field(
        None,
        description="name of the model's prompt that is put before each text: a name in `prompts` of "
        "config_sentence_transformers.json, such as `query` (default: its "
        "`default_prompt_name`)",
    )
    input_type: Annotated[str, Field(max_length=128)] | None = Field(
        None,
        description="use of the texts: `query` (also `search_query`) or `document` (also `passage`, "
        "`search_document`) puts the model's prompt for that use before them, if there is one: "
        "`query`, or the first of `document`, `passage` and `corpus`; or the name of a prompt",
    )
    add_special_tokens: bool | None = Field(
        True, description="false: do not add the model's special tokens around a text"
    )

    @model_validator(mode="after")
    def _prompts_go_before_texts(self) -> InputFields:
        if self.prompt_name is not None and self.input_type is not None:
            raise FieldError(
                "input_type", "and prompt_name both choose the prompt before a text; give only one of them"
            )
        for name in ("prompt_name", "input_type"):
            if getattr(self, name) and not isinstance(self.inputs[0], str):
                raise FieldError(name, "applies to texts, but input contains token ids; leave it out")
        return self

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs as a list, with one entry per vector in any form."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):  # the first element decides the form of all
            return [cast(list[int], self.input)]
        return cast(list[str | list[int]], self.input)


class EmbeddingRequest(InputFields):
    """`POST /v1/embeddings`."""


class PoolingRequest(InputFields):
    """`POST /pooling`."""

    task: Literal["embed", "token_embed"] | None = Field(
        "token_embed", description="`token_embed`: a vector for each token; `embed`: one for the text"
    )


Instruction = Annotated[str, Field(min_length=1, max_length=65_536)]


class Document(StrictModel):
    """A document as an object."""

    text: str = Field(description="its text")


def _document_form(value: object) -> str:
    return "form:text" if isinstance(value, str) else "form:object"


def _texts_form(value: object) -> str | None:
    return "form:one" if isinstance(value, str) else "form:many" if isinstance(value, list) else None


AnyDocument = Annotated[
    Annotated[str, Tag("form:text")] | Annotated[Document, Tag("form:object")], Discriminator(_document_form)
]
Texts = Annotated[
    Annotated[str, Tag("form:one")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("form:many")],
    Discriminator(
        _texts_form, custom_error_type="texts_form", custom_error_message="must be a string or a list of strings"
    ),
]


class ScoringFields(PoolingFields):
    """Fields that both requests for scores have in common."""

    instruction: Instruction | None = Field(
        None, description="the task, for rerankers that follow an instruction (default: the model's)"
    )


class RerankRequest(ScoringFields):
    """`POST /v1/rerank`, `/v2/rerank` and `/rerank`."""

    query: str = Field(description="the query")
    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] = Field(
        description="texts, or objects with a `text`"
    )
    top_n: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="number of best results to return (default: all)"
    )
    return_documents: bool | None = Field(True, description="return the `document` with each result")

    @property
    def texts(self) -> list[str]:
        """The texts of the documents, in their order."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreRequest(ScoringFields):
    """`POST /v1/score` and `/score`."""

    text_1: Texts = Field(description="a text, which is compared with each of `text_2`, or a list as long as `text_2`")
    text_2: Texts = Field(description="a text, or texts")

    @model_validator(mode="after")
    def _numbers_agree(self) -> ScoreRequest:
        num_first, num_second = len(_as_list(self.text_1)), len(_as_list(self.text_2))
        if num_first not in (1, num_second):
            raise FieldError(
                "text_1",
                f"has {num_first} texts and text_2 {num_second}; give one text, or the same number as in text_2",
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts to compare, in the order of `text_2`."""
        first, second = _as_list(self.text_1), _as_list(self.text_2)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
