"""Introduction of a model: sentences about it and first questions, from `introduction.json` in its directory.

The owner of a model writes the file, and no model needs one. It does not affect responses, so a damaged or different
file is logged and ignored. The web page offers the questions, and the startup output includes the sentences, so both
are short, on one line, and without characters that move a cursor or reverse the direction of text.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from oarlock.base.errors import StartupError
from oarlock.base.json_files import is_there, read_text
from oarlock.server.observability.logs import event, logger

FILE = "introduction.json"
MAX_FILE_BYTES = 65_536
MAX_ABOUT_CHARACTERS = 400
MAX_QUESTIONS = 8
MAX_QUESTION_CHARACTERS = 200
_log = logger("introduction")


def _one_line(text: str) -> str:
    """Return the text without surrounding spaces. Raises `ValueError` if it is empty or not printable."""
    stripped = text.strip()
    if not stripped or not stripped.isprintable():
        raise ValueError("must be one line of printable characters")
    return stripped


_Text = Annotated[str, AfterValidator(_one_line)]


class _File(BaseModel):
    """Content of the file. Unknown fields are left to other programs."""

    model_config = ConfigDict(strict=True, extra="ignore")

    about: Annotated[_Text, Field(max_length=MAX_ABOUT_CHARACTERS)] | None = None
    questions: Annotated[
        list[Annotated[_Text, Field(max_length=MAX_QUESTION_CHARACTERS)]], Field(max_length=MAX_QUESTIONS)
    ] = []


@dataclass(frozen=True, slots=True)
class Introduction:
    """Sentences and questions of one model; empty if there is no file."""

    about: str | None = None
    questions: tuple[str, ...] = ()

    @staticmethod
    def load(model: str | Path) -> "Introduction":
        """Return the introduction of the model in this directory. A file that cannot be used is logged as a warning."""
        file = Path(model) / FILE
        if not is_there(file):
            return Introduction()
        try:
            found = _File.model_validate(json.loads(read_text(file, MAX_FILE_BYTES)))
        except (StartupError, ValueError, RecursionError) as error:
            _log.warning(event("introduction_ignored", file=file, reason=_reason(error)))
            return Introduction()
        return Introduction(found.about, tuple(found.questions))


def _reason(error: Exception) -> str:
    """Return a description of the file's first fault in one sentence, with the field."""
    if isinstance(error, StartupError):
        return error.cause
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    return f"{path}: {first['msg']}" if path else first["msg"]
