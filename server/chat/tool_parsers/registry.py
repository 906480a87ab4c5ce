"""The ways in which models write calls, and which of them a chat template speaks.

Found out from the template's own text: it must show the model its earlier calls in the form the model was trained on.
Knows marks and readers; knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.chat.tool_parsers.base import HermesToolParser, ToolParser
from server.chat.tool_parsers.other_readers import LlamaToolParser, MistralToolParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    reader: type[ToolParser] | None  # None: nobody here can read it; forced calls are written the Hermes way
    marks: tuple[str, ...] = ()  # tokens that must be seen even where they are special ones
    in_template: bool = True  # False: the template knows nothing of tools, so the messages must say it all


HERMES = ToolFormat("hermes", HermesToolParser, ("<tool_call>", "</tool_call>"))
LLAMA = ToolFormat("llama3", LlamaToolParser, ("<|python_tag|>",))
MISTRAL = ToolFormat("mistral", MistralToolParser, ("[TOOL_CALLS]",))
MISTRAL_NAMED = ToolFormat("mistral_named", MistralToolParser, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))
GENERIC = ToolFormat("generic", HermesToolParser, ("<tool_call>", "</tool_call>"), in_template=False)
UNKNOWN = ToolFormat("unknown", None)


def detect(template: str) -> ToolFormat:
    """The format that the source of a chat template speaks."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "tools" not in template:
        return GENERIC
    if "<tool_call>" in template:
        # The same marks around XML instead of JSON.
        return UNKNOWN if "<function=" in template or "<arg_key>" in template else HERMES
    if '"parameters"' in template and ("python_tag" in template or "<|start_header_id|>" in template):
        return LLAMA
    return UNKNOWN
