"""Error messages for wrong fields: words for who wrote the request, for every kind of error that a schema has."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oarlock.server.http.request_body import problem_of


class _Inner(BaseModel):
    x: int = 0


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    text: Annotated[str, Field(min_length=2, max_length=3, pattern="^[a-z]*$")] = "ab"
    count: Annotated[int, Field(ge=1, le=2000)] = 1
    share: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    many: Annotated[list[int], Field(min_length=1, max_length=2)] = Field(default_factory=lambda: [1])
    kind: Literal["a", "b"] = "a"
    inner: _Inner = Field(default_factory=_Inner)
    flag: bool = False
    table: dict[str, int] = Field(default_factory=dict)
    nothing: None = None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"text": 5}', "must be a string"),
        ('{"text": "a"}', "must have at least 2 characters"),
        ('{"text": "abcd"}', "must have at most 3 characters"),
        ('{"text": "A1"}', "must match the pattern ^[a-z]*$"),
        ('{"count": 0}', "must be at least 1"),
        ('{"count": 3000}', "must be at most 2,000"),
        ('{"count": 1.5}', "must be an integer"),
        ('{"count": "1"}', "must be an integer"),
        ('{"share": 0}', "must be above 0"),
        ('{"share": 0.5}', "must be below 0.5"),
        ('{"share": "x"}', "must be a number"),
        ('{"share": 1e999}', "must be a finite number"),
        ('{"many": []}', "must have at least 1 item"),
        ('{"many": [1, 2, 3]}', "must have at most 2 items"),
        ('{"many": 5}', "must be a list"),
        ('{"kind": "c"}', "must be 'a' or 'b'"),
        ('{"inner": 5}', "must be an object"),
        ('{"flag": "yes"}', "must be true or false"),
        ('{"table": 5}', "must be an object"),
        ('{"nothing": 5}', "must be null"),
        ('{"other": 5}', "is not known here"),
    ],
)
def test_every_kind_of_error_is_said_plainly(body: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Body.model_validate_json(body)
    (error,) = caught.value.errors()
    assert problem_of(error["type"], error.get("ctx", {}), error["msg"]) == words


def test_unknown_errors_keep_their_message() -> None:
    assert problem_of("custom", {}, "must be either, not both") == "must be either, not both"
    assert problem_of("another", {}, "Value is odd") == "is wrong: value is odd"
