"""Fields of the official types for what this server does not do: only the values that ask for nothing pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator

from oarlock.server.protocol.base import FieldError


def _only(place: str, name: str, *neutral: Any) -> Callable[[Any], Any]:
    """`place`: the parameter that the error names."""

    def check(value: Any) -> Any:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in (None, *neutral)):
            raise FieldError(place, f"has '{name}', which is not supported here; leave it out")
        return value

    return check


# Of functions: each is called by the model itself, at once, and its result is text.
AllowedCallers = Annotated[Any, AfterValidator(_only("tools", "allowed_callers", ["direct"]))]
DeferLoading = Annotated[Any, AfterValidator(_only("tools", "defer_loading", False))]
OutputSchema = Annotated[Any, AfterValidator(_only("tools", "output_schema"))]
AsyncTool = Annotated[Any, AfterValidator(_only("tools", "async", False))]
# Of calls and their results.
Caller = Annotated[Any, AfterValidator(_only("input", "caller", {"type": "direct"}))]
Namespace = Annotated[Any, AfterValidator(_only("input", "namespace"))]
AsyncCall = Annotated[Any, AfterValidator(_only("input", "async", False))]
CacheBreakpoint = Annotated[Any, AfterValidator(_only("input", "prompt_cache_breakpoint"))]
# Of the reasoning: which thoughts a template shows is for the template to say.
ReasoningContext = Annotated[Any, AfterValidator(_only("reasoning", "reasoning.context", "auto"))]
ReasoningMode = Annotated[Any, AfterValidator(_only("reasoning", "reasoning.mode", "standard"))]
