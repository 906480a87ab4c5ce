"""The formats of tool calls. A new format is one file, which ends with its `ToolFormat`, and one line of `FORMATS`.

Which one a model writes is found out from its chat template: the template shows the model its earlier calls, so it
writes them in the form that the model was trained on.
"""

from collections.abc import Mapping

from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.gemma import FUNCTIONGEMMA, GEMMA_4
from oarlock.server.chat.tool_parsers.harmony import HARMONY
from oarlock.server.chat.tool_parsers.hermes import GENERIC, HERMES, UNKNOWN
from oarlock.server.chat.tool_parsers.json_list import GRANITE, LLAMA, MISTRAL, MISTRAL_NAMED, PHI4_MINI, PHI4_MINI_JSON
from oarlock.server.chat.tool_parsers.named import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from oarlock.server.chat.tool_parsers.pythonic import PYTHONIC
from oarlock.server.chat.tool_parsers.xml import GLM45, QWEN3_CODER, SEED_OSS

FORMATS: list[ToolFormat] = [
    HARMONY,
    MISTRAL,
    MISTRAL_NAMED,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    GENERIC,
    FUNCTIONGEMMA,
    GEMMA_4,
    PYTHONIC,
    PHI4_MINI,
    PHI4_MINI_JSON,
    GRANITE,
    QWEN3_CODER,
    SEED_OSS,
    GLM45,
    HERMES,
    LLAMA,
]


def choose(template: str, parsers: Mapping[str, str]) -> ToolFormat:
    """The format that the operator named (`ChatTemplate.parsers`), or else the one that the template shows."""
    name = parsers.get("tool_call_parser")
    if parsers.get("reasoning_parser") == "openai_gptoss":
        return HARMONY
    if name is None:
        return detect(template)
    if name == HERMES.name and GENERIC.matches(template):
        return GENERIC  # the same calls, and the tools get into the prompt
    return next(known for known in FORMATS if name in (known.name, *known.aliases))


def detect(template: str) -> ToolFormat:
    """The first format that matches the source of a chat template, or `UNKNOWN`."""
    return next((known for known in FORMATS if known.matches(template)), UNKNOWN)


def as_markdown() -> str:
    """Table of the tool-call formats for the documentation."""
    rows = ["| `--tool-call-parser` | models | a call |", "|---|---|---|"]
    for known in FORMATS:
        names = ", ".join(f"`{name}`" for name in (known.name, *known.aliases))
        example = known.example.replace("|", "\\|").replace("\n", "↵")
        rows.append(f"| {names} | {known.models} | `{example}` |")
    return "\n".join(rows) + "\n"
