"""Removal of the tags that some models write around their response after the reasoning.

Line ends next to the tags belong to them, unless text follows the closing tag. An opening tag that is not at the start
of the response is text, and so is a closing tag without an opening tag.
"""

from dataclasses import dataclass

_START, _INSIDE, _BEHIND, _PLAIN = range(4)


@dataclass(frozen=True, slots=True)
class AnswerTags:
    """Tags around a response."""

    start: str
    end: str
    speaker: str = ""  # text with which the model may name itself before its response


class AnswerParser:
    """Parser of one output's response. Holds back only a partial tag and the white space before it."""

    def __init__(self, tags: AnswerTags) -> None:
        self._tags = tags
        self._state = _START
        self._held = ""  # possible start of a tag, with the white space before it
        self._openings = [text for text in (tags.start, tags.speaker) if text]  # may still be read
        self._read: list[str] = []  # openings that have been read

    def push(self, text: str) -> str:
        """Return the text of the response that this piece completes."""
        text, self._held = self._held + text, ""
        if self._state == _START:
            text = self._at_start(text)
        written = ""
        if self._state == _INSIDE:
            written, text = self._inside(text)
        if self._state == _BEHIND:
            if not text.strip("\n"):
                self._held = text
                return written
            self._state = _PLAIN
        return written + text if self._state == _PLAIN else written

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        held, self._held = self._held, ""
        is_after_tag = self._state == _BEHIND or (self._state == _START and self._read)
        return held.lstrip("\n") if is_after_tag else held

    def _at_start(self, text: str) -> str:
        """Remove the openings; return the text after them as soon as it cannot begin with another one."""
        words = text.lstrip()
        while (found := next((each for each in self._openings if words.startswith(each)), None)) is not None:
            self._openings = self._openings[self._openings.index(found) + 1 :]
            self._read.append(found)
            text = words[len(found) :]
            words = text.lstrip()
        if not words or any(each.startswith(words) for each in self._openings):
            self._held = text
            return ""
        self._state = _INSIDE if self._tags.start in self._read else _PLAIN
        return text.lstrip("\n") if self._read else text

    def _inside(self, text: str) -> tuple[str, str]:
        """Return the text up to the closing tag, and the text after the tag."""
        end = text.find(self._tags.end)
        if end >= 0:
            self._state = _BEHIND
            return text[:end].rstrip("\n"), text[end + len(self._tags.end) :]
        most = len(self._tags.end) - 1
        size = next((size for size in range(most, 0, -1) if text.endswith(self._tags.end[:size])), 0)
        written = text[: len(text) - size].rstrip("\n")
        self._held = text[len(written) :]
        return written, ""
