"""The requests of `/v1/embeddings` and `/pooling`, field for field."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Discriminator, Field, Tag, model_validator

from oarlock.server.protocol.base import WHOLE, FieldError, TokenIds, prompt_form
from oarlock.server.protocol.pooling.fields import MAX_INPUTS, PoolingFields

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
    """What both have in common."""

    input: Input = Field(description="text, texts, token ids, or lists of token ids, which are taken as they are")
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="`base64`: the bytes of the numbers, little-endian float32"
    )
    dimensions: Annotated[int, Field(ge=1, le=65_536), WHOLE] | None = Field(
        None, description="only the first so many numbers, normalised again; for models that were trained for it"
    )
    normalize: bool | None = Field(None, description="to length 1, or not (default: as the model's files say)")
    prompt_name: Annotated[str, Field(max_length=128)] | None = Field(
        None,
        description="which of the model's prompts stands before each text: a name in `prompts` of "
        "config_sentence_transformers.json, such as `query` (default: its `default_prompt_name`)",
    )
    input_type: Annotated[str, Field(max_length=128)] | None = Field(
        None,
        description="what the texts are for: `query` (also `search_query`) or `document` (also `passage`, "
        "`search_document`) puts the model's prompt for it before them, if it has one: `query`, or the first of "
        "`document`, `passage` and `corpus`; or the name of a prompt",
    )
    add_special_tokens: bool | None = Field(True, description="false: no tokens of the model's own around a text")

    @model_validator(mode="after")
    def _prompts_go_before_texts(self) -> InputFields:
        if self.prompt_name is not None and self.input_type is not None:
            raise FieldError("input_type", "and prompt_name both choose what stands before a text; give one of them")
        for name in ("prompt_name", "input_type"):
            if getattr(self, name) and not isinstance(self.inputs[0], str):
                raise FieldError(name, "goes before texts, and input holds token ids; leave it out")
        return self

    @property
    def inputs(self) -> list[str | list[int]]:
        """One entry per vector, whatever the form."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):  # the first decides the form of them all
            return [cast(list[int], self.input)]
        return cast(list[str | list[int]], self.input)


class EmbeddingRequest(InputFields):
    """`POST /v1/embeddings`."""


class PoolingRequest(InputFields):
    """`POST /pooling`."""

    task: Literal["embed", "token_embed"] | None = Field(
        "token_embed", description="`token_embed`: a vector for each token; `embed`: one for the text"
    )
