"""Search, by trial, for the rewrites with which a chat template shows all turns of a conversation.

A template is foreign code that may omit a turn or refuse it. So the shape of a conversation (roles, calls, results,
whether there is text) is rendered once with a marker for each text. The first `Folding` is used for which the prompt
contains all markers in order. Shapes repeat, so results are cached with the template. In a long conversation repeated
rounds are left out of the trial.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from oarlock.engine.errors import RequestError
from oarlock.server.chat.conversation import Tools, in_parts, template_messages
from oarlock.server.chat.tool_parsers.base import Messages, ToolFormat
from oarlock.server.chat.turn_folding import INSTRUCTIONS, CallText, CallTurns, Folding, SystemTurns, TurnRuns
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.llm.template_renderers import TemplateLimitError
from oarlock.server.schemas.chat import CalledFunction, ChatMessage, ToolCall

MAX_TRIAL_TURNS = 64
MAX_PROMPT = 1 << 18  # limit in characters for a trial's prompt
_MAX_RESULTS = 512  # cached results per template
_MAX_KIND = 16  # limit in characters of JSON
_TOOL = "trial_tool"
# Used instead of a turn index: the list of tools, and arguments of calls that are text in quotes instead of an object.
TOOLS, QUOTED = -1, -2
_ANY_NAME = re.compile(r"function\d+x\d+end")
_TRIAL_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Tries the template.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "Any text."}}},
        },
    }
]


class TrialTurn(NamedTuple):
    """Shape of one message."""

    role: str
    has_text: bool
    num_calls: int = 0
    has_reasoning: bool = False
    call_ref: tuple[int, int] | None = None  # results only: (turns back to the call, index of the call in its turn)


class Fault(NamedTuple):
    """The first turn that a prompt does not show correctly."""

    turn: int  # index in the trial, TOOLS or QUOTED
    is_lost: bool = True  # False: it is in the wrong position, or appears as the result of another call


@dataclass(frozen=True, slots=True)
class Outline:
    """Shape of a conversation, as it is tried."""

    turns: tuple[TrialTurn, ...]
    indices: tuple[int, ...]  # index of each turn in the conversation

    @staticmethod
    def of(messages: Sequence[ChatMessage]) -> "Outline":
        """Return the outline of a conversation."""
        shape = shape_of(messages)
        kept = kept_turns(shape)
        numbers = {position: number for number, position in enumerate(kept)}
        turns = []
        for number, position in enumerate(kept):
            turn = shape[position]
            if turn.call_ref is not None:
                call_number = numbers.get(position - turn.call_ref[0])
                turn = turn._replace(call_ref=None if call_number is None else (number - call_number, turn.call_ref[1]))
            turns.append(turn)
        return Outline(tuple(turns), tuple(kept))


def shape_of(messages: Sequence[ChatMessage]) -> tuple[TrialTurn, ...]:
    """Return the shape of a conversation."""
    calls: dict[str, tuple[int, int]] = {}
    turns = []
    for position, message in enumerate(messages):
        found = calls.get(message.tool_call_id or "") if message.role == "tool" else None
        call_ref = None if found is None else (position - found[0], found[1])
        made = message.tool_calls or ()
        calls |= {call.id: (position, number) for number, call in enumerate(made)}
        has_text, has_reasoning = (
            bool(message.text.strip()),
            bool(message.reasoning_text) and message.role == "assistant",
        )
        turns.append(TrialTurn(message.role, has_text, len(made), has_reasoning, call_ref))
    return tuple(turns)


def kept_turns(shape: Sequence[TrialTurn]) -> list[int]:
    """Return the indices of the turns that a trial needs: without repeated rounds, and repeated steps in a round."""
    rounds: list[list[list[int]]] = [[]]
    for position, turn in enumerate(shape):
        if turn.role == "user" and rounds[-1]:
            rounds.append([])
        if turn.role == "tool" and rounds[-1] and shape[rounds[-1][-1][0]].num_calls:
            rounds[-1][-1].append(position)  # results belong to the step of their call
        else:
            rounds[-1].append([position])
    return _without_repeats(shape, [_without_repeats(shape, steps) for steps in rounds])


def _without_repeats(shape: Sequence[TrialTurn], parts: Sequence[list[int]]) -> list[int]:
    """Return the turns of all parts except repeats: the same shape after the same shape. The last part always stays."""
    seen: set[tuple[Any, Any]] = set()
    before = None
    kept: list[int] = []
    for number, part in enumerate(parts):
        kind = tuple(shape[position] for position in part)
        is_new = (before, kind) not in seen and len(kept) + len(part) <= MAX_TRIAL_TURNS
        if is_new or number == len(parts) - 1:
            kept += part
        seen.add((before, kind))
        before = kind
    return kept


def trial_messages(shape: Sequence[TrialTurn]) -> list[ChatMessage]:
    """Return a conversation of this shape, with a marker in place of each text, name and argument."""
    messages = []
    for position, turn in enumerate(shape):
        calls = [
            ToolCall(
                id=_call_id(position, number),
                function=CalledFunction(
                    name=_name(position, number), arguments=json.dumps({"x": _argument(position, number)})
                ),
            )
            for number in range(turn.num_calls)
        ]
        call_id = None
        if turn.role == "tool":
            back, number = turn.call_ref or (position + 1, 0)
            call_id = _call_id(position - back, number)
        messages.append(
            ChatMessage.model_construct(
                role=turn.role,
                content=_text(position) if turn.has_text else "",
                tool_calls=calls or None,
                tool_call_id=call_id,
                reasoning_content=f"think{position}end" if turn.has_reasoning else None,
            )
        )
    return messages


def _text(turn: int) -> str:
    return f"turn{turn}end"


def _name(turn: int, call: int) -> str:
    return f"function{turn}x{call}end"


def _argument(turn: int, call: int) -> str:
    return f"argument{turn}x{call}end"


def _call_id(turn: int, call: int) -> str:
    """Return an id of nine letters and digits, as Mistral's templates require."""
    return f"c{turn % 10000:05d}{call % 1000:03d}" if turn >= 0 else "unknown00"


def fault_in(prompt: str, shape: Sequence[TrialTurn], has_tools: bool) -> Fault | None:
    """Return the first fault of a trial's prompt.

    Initial instructions may be anywhere, since many templates write them with the tools or into a user turn. The text
    before a call may be anywhere between the surrounding user turns.
    """
    offsets = [[prompt.find(marker) for marker in _markers(turn, position)] for position, turn in enumerate(shape)]
    lost = next((position for position, found in enumerate(offsets) if -1 in found), None)
    if lost is not None:
        return Fault(lost)
    end = -1
    for task in _tasks(shape):
        found = [offset for group in task for position in group for offset in offsets[position]]
        if found and min(found) < end:
            return Fault(task[0][0], False)
        wrong = _disorder(prompt, shape, task)
        if wrong is not None:
            return Fault(wrong, False)
        end = max([end, *found])
    wrong = _wrong_result(prompt, shape, offsets)
    if wrong is not None:
        return Fault(wrong, False)
    return Fault(TOOLS) if has_tools and _TOOL not in prompt else None


def _markers(turn: TrialTurn, position: int) -> list[str]:
    calls = range(turn.num_calls)
    texts = [_text(position)] if turn.has_text else []
    return [*texts, *(_name(position, i) for i in calls), *(_argument(position, i) for i in calls)]


def _groups(shape: Sequence[TrialTurn]) -> list[list[int]]:
    """Return the turns after the initial instructions: one by one, but calls together with their results."""
    opening = next((i for i, turn in enumerate(shape) if turn.role not in INSTRUCTIONS), len(shape))
    groups: list[list[int]] = []
    for position in range(opening, len(shape)):
        if shape[position].role == "tool" and groups and shape[groups[-1][0]].num_calls:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def _tasks(shape: Sequence[TrialTurn]) -> list[list[list[int]]]:
    """Return the groups of turns by task: calls together with the response after them."""
    tasks: list[list[list[int]]] = []
    for group in _groups(shape):
        is_assistant = shape[group[0]].role == "assistant"
        if is_assistant and tasks and any(shape[each[0]].num_calls for each in tasks[-1]):
            tasks[-1].append(group)
        else:
            tasks.append([group])
    return tasks


def _disorder(prompt: str, shape: Sequence[TrialTurn], task: Sequence[Sequence[int]]) -> int | None:
    """Return the first turn of a task whose call, result or response is out of order."""
    end = -1
    for group in task:
        caller = group[0]
        calls = [(caller, number) for number in range(shape[caller].num_calls)]
        found = [prompt.find(marker(*call)) for call in calls for marker in (_name, _argument)]
        found += [prompt.find(_text(i)) for i in (group[1:] if calls else group) if shape[i].has_text]
        if found and min(found) < end:
            return caller
        end = max([end, *found])
    return None


def _has_stray(shape: Sequence[TrialTurn]) -> bool:
    """Return whether some result does not follow the turn of its call."""
    behind = {i for caller, *others in _groups(shape) for i in others if _is_response(shape, i, caller)}
    return any(turn.role == "tool" and position not in behind for position, turn in enumerate(shape))


def _is_response(shape: Sequence[TrialTurn], position: int, caller: int) -> bool:
    call_ref = shape[position].call_ref
    return call_ref is not None and position - call_ref[0] == caller


def _wrong_result(prompt: str, shape: Sequence[TrialTurn], offsets: Sequence[Sequence[int]]) -> int | None:
    """Return the first result that precedes its call, or follows the name of another call."""
    known = sorted(offset for found in offsets for offset in found)
    for position, turn in enumerate(shape):
        if turn.role != "tool" or not turn.has_text:
            continue
        offset = offsets[position][0]
        caller = None if turn.call_ref is None else (position - turn.call_ref[0], turn.call_ref[1])
        if caller is not None and offset < prompt.find(_argument(*caller)):
            return position
        before = known[bisect_left(known, offset) - 1] if offset > known[0] else 0
        names = _ANY_NAME.findall(prompt, before + 1, offset)  # a name at `before` belongs to a call
        if names and (caller is None or names[-1] != _name(*caller)):
            return position
    return None


def _in_order(shape: Sequence[TrialTurn]) -> tuple[TrialTurn, ...]:
    """Return the shape that a template sees if it ignores ids: results belong to the first calls, in order."""
    turns = list(shape)
    for caller, *others in _groups(shape):
        own = {i: shape[i].call_ref for i in others if _is_response(shape, i, caller)}
        answered = list(dict.fromkeys(call_ref[1] for call_ref in own.values() if call_ref))
        for position, call_ref in own.items():
            if call_ref is not None:
                turns[position] = turns[position]._replace(call_ref=(position - caller, answered.index(call_ref[1])))
    return tuple(turns)


@dataclass(frozen=True, slots=True)
class TurnTrial:
    """Trials of one template, for requests with or without tools and with the same variables."""

    template: ChatTemplate
    tool_format: ToolFormat
    as_parts: bool
    has_tools: bool
    opens_assistant_turn: bool
    variables: Mapping[str, Any]

    async def folding(self, outline: Outline) -> Folding:
        """Return the folding that keeps all turns of a conversation.

        Returns no rewrites if the template refuses the conversation with every folding: the request then fails with the
        template's own error. Raises `RequestError` if the template would omit a turn.
        """
        found = await self.result(outline)
        if isinstance(found, Fault):
            raise _refusal(found, outline)
        return found or Folding()

    async def result(self, outline: Outline) -> Folding | Fault | None:
        """Return the folding, or the fault that no folding fixes; None if the template refuses all foldings."""
        known = self.template.trials
        key = (outline.turns, self.has_tools, self.opens_assistant_turn, _kinds(self.variables))
        if key not in known:
            found = await self._find(outline.turns)
            while len(known) >= _MAX_RESULTS:
                del known[next(iter(known))]
            known[key] = found
        return known[key]

    async def _find(self, shape: tuple[TrialTurn, ...]) -> Folding | Fault | None:
        conversation = trial_messages(shape)
        first: Fault | RequestError | None = None
        usable: dict[int, Folding] = {}
        tried: set[str] = set()
        for folding in self._foldings(shape):
            messages, tools = self._written(conversation, folding)
            form = json.dumps(messages)
            if form in tried:
                continue
            tried.add(form)
            outcome = await self._fault(messages, tools, shape)
            if outcome is None and not await self._confuses_results(shape, folding):
                return folding
            if isinstance(outcome, Fault) and outcome.turn in (TOOLS, QUOTED):
                usable.setdefault(outcome.turn, folding)
            first = first or outcome or Fault(_first_result(shape), False)
        if usable:
            return usable[max(usable)]  # TOOLS: the model knows its tools from elsewhere
        return first if isinstance(first, Fault) else None

    def _foldings(self, shape: Sequence[TrialTurn]) -> Iterator[Folding]:
        """Yield the foldings that may change a conversation of this shape, in order of increasing change."""
        has_calls = any(turn.num_calls for turn in shape)
        has_results = any(turn.role == "tool" for turn in shape)
        writes_tools = self.has_tools and self.tool_format.write_into_messages is not None  # as a system turn
        has_system = writes_tools or any(turn.role in INSTRUCTIONS for turn in shape)
        texts = list(CallText) if any(turn.num_calls and turn.has_text for turn in shape) else [CallText.KEPT]
        calls = [CallTurns.KEPT]
        if _in_order(shape) != tuple(shape):
            calls.append(CallTurns.ORDERED)
        if any(turn.num_calls > 1 for turn in shape):
            calls.append(CallTurns.SINGLE)
        forms = [*product((False, True)[: 1 + _has_stray(shape)], (False, True)[: 1 + has_calls], texts, calls)]
        if (has_calls or has_results) and self.tool_format.calls_as_text is not None:
            forms += [(False, False, CallText.KEPT, each) for each in CallTurns if each >= CallTurns.LAST_TEXT]
        systems = list(SystemTurns) if has_system else [SystemTurns.KEPT]
        developers = (False, True)[: 1 + any(turn.role == "developer" for turn in shape)]
        for (stray, other, text, call), system, runs, developer in product(forms, systems, TurnRuns, developers):
            yield Folding(call, text, system, runs, developer, stray, other)

    async def _fault(
        self, messages: Messages, tools: Tools | None, shape: tuple[TrialTurn, ...]
    ) -> Fault | RequestError | None:
        """Return the fault of a trial's prompt, the template's refusal, or None if the prompt is correct."""
        try:
            prompt = await self._render(messages, tools)
        except TemplateLimitError:
            raise  # a limit is no information about these turns
        except RequestError as error:
            return error
        fault = fault_in(prompt, shape, self.has_tools)
        is_intact = fault is None or fault.turn == TOOLS
        return Fault(QUOTED) if is_intact and self._quotes_arguments(prompt, shape) else fault

    def _quotes_arguments(self, prompt: str, shape: Sequence[TrialTurn]) -> bool:
        """Return whether a template that should copy the text of arguments writes it as a JSON string."""
        calls = ((turn, call) for turn, each in enumerate(shape) for call in range(each.num_calls))
        return self.tool_format.text_arguments and any(f'\\"{_argument(*one)}' in prompt for one in calls)

    async def _confuses_results(self, shape: tuple[TrialTurn, ...], folding: Folding) -> bool:
        """Return whether results are not in the order of the first calls and the prompt does not show their calls."""
        ordered = _in_order(shape)
        if ordered == shape or folding.calls >= CallTurns.LAST_TEXT:
            return False
        prompts = []
        for each in (shape, ordered):
            messages, tools = self._written(trial_messages(each), folding)
            prompts.append(await self._render(messages, tools))
        return prompts[0] == prompts[1]

    def _written(self, conversation: list[ChatMessage], folding: Folding) -> tuple[Messages, Tools | None]:
        has_developer = "developer" in self.template.source
        tools = _TRIAL_TOOLS if self.has_tools else None
        messages, tools = template_messages(conversation, tools, self.tool_format, folding, has_developer=has_developer)
        return (in_parts(messages, conversation) if self.as_parts else messages), tools

    async def _render(self, messages: Messages, tools: Tools | None) -> str:
        return await self.template.render(
            messages,
            self.opens_assistant_turn,
            MAX_PROMPT,
            tools=tools,
            tools_variable=self.tool_format.tools_variable,
            variables=self.variables,
        )


def _first_result(shape: Sequence[TrialTurn]) -> int:
    return next(position for position, turn in enumerate(shape) if turn.role == "tool")


def _kinds(variables: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the variables as a cache key: long values count only by their type, so that they share trials."""
    return tuple(sorted((name, _value_kind(value)) for name, value in variables.items()))


def _value_kind(value: Any) -> str:
    """Return the JSON of a short value, and the type of any other value."""
    written = json.dumps(value)
    return written if len(written) <= _MAX_KIND else type(value).__name__


def _refusal(fault: Fault, outline: Outline) -> RequestError:
    position, role = outline.indices[fault.turn], outline.turns[fault.turn].role
    what = "omits" if fault.is_lost else "moves"
    message = (
        f"This model's chat template {what} messages[{position}] (role '{role}') of this conversation, in "
        "every form that the server can send to it. Move its text into another message, or serve the model "
        "with a --chat-template that renders it."
    )
    return RequestError(message, "messages", "unsupported_value")
