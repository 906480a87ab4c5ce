"""Jinja without attributes that reach Python, and with limits of CPU time and text size.

A template comes with the checkpoint, so it is foreign code. Every loop, macro and block begins with a check of the
time, inserted when the template is parsed; every operation that makes a large text or number out of small ones is
checked before it is done.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

_MAX_NUMBER = 1_000_000  # as an argument: no prompt needs wider paddings or longer ranges
_MAX_BITS = 4096
_WIDE = re.compile(r"\d{5}|\*")  # a width in a format string, or one taken from the arguments
_NO_LIMIT = 2**62
_REMOVED_FILTERS = ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr")


class TemplateLimitError(TemplateError):
    """The template takes more time, or makes a larger value, than it may."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. One serves all threads: the limits of a rendering belong to the thread that renders."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._limits = threading.local()
        self.concat: Callable[[Iterable[str]], str] = self.collect  # how macros and `{% set %}` blocks are put together
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        self.filters.update({name: _bounded(function) for name, function in self.filters.items()})
        self.filters["format"] = self.formatted

    @contextmanager
    def limits(self, seconds: float, size: int) -> Generator[None, None, None]:
        """Inside: so many seconds of this thread's CPU time, and so many characters for any text."""
        self._limits.deadline, self._limits.size = time.thread_time() + seconds, size
        try:
            yield
        finally:
            del self._limits.deadline, self._limits.size

    def check_time(self) -> str:
        """Called at each turn of a loop and each call of a macro. Raises `TemplateLimitError`."""
        if time.thread_time() > getattr(self._limits, "deadline", _NO_LIMIT):
            raise TemplateLimitError
        return ""

    def collect(self, pieces: Iterable[str]) -> str:
        """The pieces as one text. Raises `TemplateLimitError` as soon as it is too large."""
        kept, size, most = [], 0, getattr(self._limits, "size", _NO_LIMIT)
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            if size > most:
                raise TemplateLimitError
            self.check_time()
        return "".join(kept)

    def joined(self, values: list[Any]) -> str:
        """What `a ~ b` means."""
        return self.collect(map(str, values))

    def formatted(self, text: Any, *args: Any, **kwargs: Any) -> str:
        """The filter `format`, which is Python's `%`."""
        return self.call_binop(None, "%", str(text), kwargs or args)

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateLimitError
        if operator in ("+", "*") and self._size(operator, left, right) > getattr(self._limits, "size", _NO_LIMIT):
            raise TemplateLimitError
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TemplateLimitError
        return self.binop_table[operator](left, right)

    @staticmethod
    def _size(operator: str, left: Any, right: Any) -> int:
        """The length of the text or list that `left operator right` makes; 0 for numbers."""
        sizes = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
        if operator == "+":
            return sum(size or 0 for size in sizes)
        times = right if isinstance(right, int) else left if isinstance(left, int) else 0
        return (sizes[0] or sizes[1] or 0) * times

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE.search(value.__self__):
            raise TemplateLimitError
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _InsertChecks(self).visit(super()._parse(source, name, filename))


class _InsertChecks(NodeTransformer):
    """Inserts `check_time` at the start of all that can repeat, and `joined` in place of `~`."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def _call(self, method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)
        call.set_lineno(line).set_environment(self._environment)
        return call

    def _checked(self, node: Any) -> Any:
        self.generic_visit(node)
        check_time = nodes.ExprStmt(self._call("check_time", [], node.lineno))
        node.body.insert(0, check_time.set_lineno(node.lineno).set_environment(self._environment))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _checked

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._call("joined", [nodes.List(node.nodes)], node.lineno)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing huge numbers as arguments (the values in its parentheses)."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return call


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
        raise SecurityError(f"numbers above {_MAX_NUMBER} are not accepted as arguments")
