"""The requests of `/v1/rerank` and `/v1/score`, field for field."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag, model_validator

from oarlock.server.protocol.base import INT32_MAX, WHOLE, FieldError, StrictModel
from oarlock.server.protocol.pooling.fields import MAX_INPUTS, PoolingFields

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
    """What both have in common."""

    instruction: Instruction | None = Field(
        None, description="the task, for rerankers that are asked in words (default: that of the model)"
    )


class RerankRequest(ScoringFields):
    """`POST /v1/rerank`, `/v2/rerank` and `/rerank`."""

    query: str = Field(description="what is searched for")
    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] = Field(
        description="texts, or objects with a `text`"
    )
    top_n: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="only the best so many (default: all)"
    )
    return_documents: bool | None = Field(True, description="`document` with each result")

    @property
    def texts(self) -> list[str]:
        """Of the documents, in their order."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreRequest(ScoringFields):
    """`POST /v1/score` and `/score`."""

    text_1: Texts = Field(description="a text, which is compared with each of `text_2`, or as many as there are there")
    text_2: Texts = Field(description="a text, or texts")

    @model_validator(mode="after")
    def _numbers_agree(self) -> ScoreRequest:
        num_first, num_second = len(_as_list(self.text_1)), len(_as_list(self.text_2))
        if num_first not in (1, num_second):
            raise FieldError(
                "text_1", f"has {num_first} texts and text_2 {num_second}; give one, or as many as there are in text_2"
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The texts to compare, in the order of `text_2`."""
        first, second = _as_list(self.text_1), _as_list(self.text_2)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
