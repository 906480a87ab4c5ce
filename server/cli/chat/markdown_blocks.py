"""Cuts Markdown that is still being written into blocks that will not change any more, and the rest.

So what is complete can be printed once and scroll away, and only the last block is drawn again and again.
"""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_LIST = re.compile(r"\s*([-*+]|\d{1,9}[.)])\s")


class MarkdownBlocks:
    """Cuts growing Markdown into blocks: `add` returns those that are complete by then; `rest` is the text after."""

    def __init__(self) -> None:
        self._lines: list[str] = []  # of the block that is being written, with their ends
        self._line = ""  # has no end yet
        self._fence = ""  # the marks of the code block that is open
        self._is_list = False

    @property
    def rest(self) -> str:
        """Text that belongs to no complete block yet."""
        return "".join(self._lines) + self._line

    def add(self, text: str) -> list[str]:
        """The blocks that `text` completes, each as it was written."""
        done: list[str] = []
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            done += self._end_line(line)
        return done

    def _end_line(self, line: str) -> list[str]:
        done = self._before(line)
        self._lines.append(line + "\n")
        match = _FENCE.fullmatch(line)
        if self._fence:
            closes = match is not None and match[1].startswith(self._fence) and not match[2].strip()
            self._fence = "" if closes else self._fence
            return done
        if len(self._lines) == 1:
            self._is_list = _LIST.match(line) is not None
        if match is not None and not (match[1][0] == "`" and "`" in match[2]):
            self._fence = match[1]
        return done

    def _before(self, line: str) -> list[str]:
        """The block that ends before `line`, if one does: after an empty line, unless a list goes on."""
        if self._fence or not self._lines or not line.strip() or self._lines[-1].strip():
            return []
        if self._is_list and (line[0] in " \t" or _LIST.match(line)):
            return []
        block = "".join(self._lines)
        self._lines = []
        return [block] if block.strip() else []
