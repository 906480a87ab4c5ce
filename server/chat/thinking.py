"""Template variables that switch reasoning on and off or set its level, found by trial, and their values for a request.

Templates share no variable name: some have a switch, some have levels, and some refuse unknown levels. A short
conversation is rendered with each candidate once; a candidate that changes nothing does not belong to the template.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from oarlock.server.llm.chat_template import ChatTemplate, text_parts
from oarlock.server.schemas.chat import ChatRequest

# Variable -> (value that turns reasoning on, value that turns it off); None: omit the variable.
_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    "thinking_budget": (None, 0),
}
_LEVEL_NAMES = ("reasoning_effort", "thinking_effort")
_LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
_USUAL = frozenset({"low", "medium", "high"})  # levels of models whose template writes any given level
_OFF = ("none", "no_think")  # level values that switch reasoning off
_EQUIVALENT_LEVELS = {"minimal": ("low",), "low": ("minimal",), "xhigh": ("max", "high"), "max": ("xhigh", "high")}
_NO_LEVEL = "qzx"  # a value that no template knows
_MAX_TRIAL = 256 * 1024  # limit in characters for a rendered trial
_found: WeakKeyDictionary[ChatTemplate, "ThinkingControls"] = WeakKeyDictionary()


class TemplateVariables(NamedTuple):
    """Variables for a template, and the request's fields that have no effect with it."""

    variables: dict[str, Any]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EffortLevels:
    """Values of one level variable."""

    accepted: frozenset[str]  # values that the template does not refuse
    known: frozenset[str]  # values that the template or its model treats specially
    off: str | None = None  # value that switches reasoning off

    def nearest(self, effort: str) -> str:
        """Return the value that is closest to `effort`, the higher of two equally close values."""
        for level in (effort, *_EQUIVALENT_LEVELS.get(effort, ())):
            if level in self.known:
                return level
        if effort in self.accepted:
            return effort
        asked = _LEVELS.index(effort)
        return min(self.known, key=lambda level: (abs(_LEVELS.index(level) - asked), -_LEVELS.index(level)))


@dataclass(frozen=True, slots=True)
class ThinkingControls:
    """Variables of one template that control reasoning."""

    switches: tuple[str, ...] = ()
    levels: Mapping[str, EffortLevels] = field(default_factory=dict)

    def on(self, effort: str | None) -> dict[str, Any]:
        """Return the variables that switch reasoning on, at level `effort` if given; value None: omit the variable."""
        found = {name: _SWITCHES[name][0] for name in self.switches}
        if effort is not None:
            found |= {name: level.nearest(effort) for name, level in self.levels.items() if level.known}
        return found

    def off(self) -> dict[str, Any]:
        """Return the variables that switch reasoning off; empty if the template has no such variable."""
        found = {name: _SWITCHES[name][1] for name in self.switches}
        return found | {name: level.off for name, level in self.levels.items() if level.off is not None}

    def least(self) -> dict[str, Any]:
        """Return the variables for the lowest level, for templates that cannot switch reasoning off."""
        return {name: level.nearest("minimal") for name, level in self.levels.items() if level.known}

    def without(self, own: Mapping[str, Any]) -> "ThinkingControls":
        """Return the controls that remain if the caller sets the variables `own`; any switch replaces all switches."""
        switches = () if own.keys() & _SWITCHES.keys() else self.switches
        return ThinkingControls(switches, {name: level for name, level in self.levels.items() if name not in own})


async def thinking_of(template: ChatTemplate, request: ChatRequest, reasons: bool) -> TemplateVariables:
    """Return the template's variables for a request; variables that the caller sets by name take precedence.

    `reasons`: whether responses of this model contain reasoning at all.
    """
    own = request.chat_template_kwargs or {}
    effort, switch = request.reasoning_effort, request.thinking_switch
    if effort is None and switch is None:
        return TemplateVariables(dict(own))
    controls = (await _controls_of(template)).without(own)
    is_on = effort != "none" if switch is None else switch
    found = controls.on(effort if effort != "none" else None) if is_on else controls.off()
    ignored = []
    if effort is not None and not (found and is_on == (effort != "none")):
        ignored.append("reasoning_effort")
    # Without a switch, the request is satisfied if the model's fixed behaviour is the requested behaviour.
    if request.sets_thinking and not (controls.on(None) or controls.off()) and is_on != reasons:
        ignored.append("thinking")
    if not found and (effort == "none" or request.sets_thinking):
        found = controls.least()
    values = {name: value for name, value in found.items() if value is not None}
    return TemplateVariables(values | own, tuple(ignored))


async def _controls_of(template: ChatTemplate) -> ThinkingControls:
    if template not in _found:
        _found[template] = await _Trial(template).controls()
    return _found[template]


class _Trial:
    """Renders a short conversation with different sets of variables."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    async def controls(self) -> ThinkingControls:
        plain = await self._written({})
        if plain is None:
            return ThinkingControls()
        switches = [name for name in _SWITCHES if await self._switches(name)]
        on = {name: value for name in switches if (value := _SWITCHES[name][0]) is not None}
        levels = {name: found for name in _LEVEL_NAMES if (found := await self._levels(name, on))}
        return ThinkingControls(tuple(switches), levels)

    async def _switches(self, name: str) -> bool:
        texts = [await self._written({} if value is None else {name: value}) for value in _SWITCHES[name]]
        return None not in texts and texts[0] != texts[1]

    async def _levels(self, name: str, on: dict[str, Any]) -> EffortLevels | None:
        """Return the levels of the variable `name`, with reasoning switched on; None if it changes nothing."""
        plain = await self._written(on)
        unknown = await self._written({**on, name: _NO_LEVEL})
        texts = {level: await self._written({**on, name: level}) for level in (*_LEVELS, *_OFF)}
        accepted = {level for level, text in texts.items() if text is not None}
        if unknown is not None and _NO_LEVEL in unknown:
            known = {level for level in _LEVELS if level in _USUAL or self._names(level)} & accepted
            off = next((word for word in _OFF if word in accepted and self._names(word)), None)
        else:
            known = {level for level in accepted if texts[level] != unknown}
            off = next((word for word in _OFF if word in known), None)
        changes = off is not None or any(texts[level] not in (None, plain) for level in known)
        return EffortLevels(frozenset(accepted), frozenset(known.intersection(_LEVELS)), off) if changes else None

    def _names(self, value: str) -> bool:
        """Return whether the template's source contains this value as a literal."""
        return any(f"{quote}{value}{quote}" in self._template.source for quote in ("'", '"'))

    async def _written(self, variables: dict[str, Any]) -> str | None:
        """Return the prompt, or None if the template refuses these variables."""
        content: Any = text_parts("Hi") if await self._template.reads_parts() else "Hi"
        messages = [{"role": "user", "content": content}]
        return await self._template.try_render(messages, True, _MAX_TRIAL, variables=variables)
