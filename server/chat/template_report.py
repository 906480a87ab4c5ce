"""Startup report of the conversations that a chat template does not render as they are sent."""

import asyncio

from oarlock.engine.errors import EngineError, RequestError
from oarlock.server.chat.detection import tool_format_of
from oarlock.server.chat.turn_folding import Folding
from oarlock.server.chat.turn_trial import Outline, TrialTurn, TurnTrial
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.observability.logs import event, logger

_SYSTEM, _DEVELOPER, _USER, _ANSWER = (TrialTurn(role, True) for role in ("system", "developer", "user", "assistant"))
_ONE_CALL, _TWO_CALLS = TrialTurn("assistant", False, 1), TrialTurn("assistant", False, 2)
_CALL_WITH_TEXT = TrialTurn("assistant", True, 1)
_RESULT, _SECOND = TrialTurn("tool", True, call_ref=(1, 0)), TrialTurn("tool", True, call_ref=(2, 1))
# Trial conversations, by their unusual property.
_TRIALS = {
    "several_system_turns": (_SYSTEM, _SYSTEM, _USER),
    "developer": (_DEVELOPER, _USER),
    "late_system_turn": (_SYSTEM, _USER, _ANSWER, _SYSTEM, _USER),
    "user_turns_in_a_row": (_USER, _USER),
    "answer_first": (_ANSWER, _USER),
    "several_calls": (_USER, _TWO_CALLS, _RESULT, _SECOND, _ANSWER, _USER),
    "call_with_text": (_USER, _CALL_WITH_TEXT, _RESULT, _ANSWER, _USER),
    "user_after_result": (_USER, _ONE_CALL, _RESULT, _USER),
}
_MOST_S = 5.0  # time limit; the engine loads in the meantime
_log = logger("chat_template")


async def foldings_needed(template: ChatTemplate) -> dict[str, str]:
    """Return the rewrites that unusual conversations need, or "refused" if no rewrite preserves all turns."""
    tool_format = await tool_format_of(template)
    as_parts = await template.reads_parts()
    needed = {}
    for name, turns in _TRIALS.items():
        trial = TurnTrial(template, tool_format, as_parts, any(turn.num_calls for turn in turns), True, {})
        found = await trial.result(Outline(turns, tuple(range(len(turns)))))
        if not isinstance(found, Folding):
            needed[name] = "refused"
        elif found.words:
            needed[name] = ",".join(found.words)
    return needed


async def report_foldings(template: ChatTemplate) -> None:
    """Try the template, and log the conversations that it does not render as they are sent."""
    if not template.exists:
        return
    try:
        async with asyncio.timeout(_MOST_S):
            needed = await foldings_needed(template)
    except (EngineError, RequestError, TimeoutError) as error:  # requests will hit the same limits and report them
        _log.warning(event("chat_template_check_failed", cause=str(error) or f"it takes longer than {_MOST_S:g} s"))
        return
    if needed:
        _log.info(event("chat_template_needs_rewriting", **needed))
