"""Jinja without attributes that reach Python, and with a budget of time and size that loops cannot dodge.

A template comes with the checkpoint, so it is foreign code. Every loop, macro and block begins with a look at the
clock, put there when the template is parsed; every operation that makes a large text or number out of small ones is
checked before it is done. Knows nothing of conversations.
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

_MAX_NUMBER = 1_000_000  # as an argument: wider paddings and longer ranges have no place in a prompt
_MAX_BITS = 4096
_WIDE = re.compile(r"\d{5}|\*")  # a width in a format string, or one taken from the arguments
_NO_LIMIT = 2**62
_NEEDLESS_FILTERS = ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr")


class TemplateLimitError(TemplateError):
    """The budget is spent."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. One serves all threads: the budget of a rendering belongs to the thread that renders."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._budget = threading.local()
        self.concat: Callable[[Iterable[str]], str] = self.collect  # how macros and `{% set %}` blocks are put together
        for name in _NEEDLESS_FILTERS:
            self.filters.pop(name, None)
        self.filters.update({name: _bounded(function) for name, function in self.filters.items()})
        self.filters["format"] = self.formatted

    @contextmanager
    def limits(self, seconds: float, size: int) -> Generator[None, None, None]:
        """What happens inside may take so much of this thread's CPU time, and no text may become larger."""
        self._budget.deadline, self._budget.size = time.thread_time() + seconds, size
        try:
            yield
        finally:
            del self._budget.deadline, self._budget.size

    def tick(self) -> str:
        """One more turn of a loop, or one more call of a macro."""
        if time.thread_time() > getattr(self._budget, "deadline", _NO_LIMIT):
            raise TemplateLimitError
        return ""

    def collect(self, pieces: Iterable[str]) -> str:
        """The pieces as one text, unless it becomes too large on the way."""
        kept, size, most = [], 0, getattr(self._budget, "size", _NO_LIMIT)
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            if size > most:
                raise TemplateLimitError
            self.tick()
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
        if operator in ("+", "*") and self._size(operator, left, right) > getattr(self._budget, "size", _NO_LIMIT):
            raise TemplateLimitError
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TemplateLimitError
        return self.binop_table[operator](left, right)

    @staticmethod
    def _size(operator: str, left: Any, right: Any) -> int:
        """How long the text or list will be."""
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
        return _Guards(self).visit(super()._parse(source, name, filename))


class _Guards(NodeTransformer):
    """Puts `tick` at the start of everything that can repeat, and `joined` in place of `~`."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def _call(self, method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)
        call.set_lineno(line).set_environment(self._environment)
        return call

    def _guarded(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._call("tick", [], node.lineno))
        node.body.insert(0, tick.set_lineno(node.lineno).set_environment(self._environment))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _guarded

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._call("joined", [nodes.List(node.nodes)], node.lineno)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments (what stands in the brackets) may not be huge numbers."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return call


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
        raise SecurityError(f"numbers above {_MAX_NUMBER} are not accepted as arguments")
