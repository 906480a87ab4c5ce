"""All tool-call formats. A new format is one file, which ends with its `ToolFormat`, and one line of `FORMATS`.

The format that a model writes is detected from its chat template (`detection.py`).
"""

import re

from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.dsml import DEEPSEEK_V4, DEEPSEEK_V32
from oarlock.server.chat.tool_parsers.functionary import FUNCTIONARY
from oarlock.server.chat.tool_parsers.gemma import FUNCTIONGEMMA, GEMMA_4
from oarlock.server.chat.tool_parsers.glm4 import GLM4, GLM4_9B
from oarlock.server.chat.tool_parsers.harmony import HARMONY
from oarlock.server.chat.tool_parsers.hermes import GENERIC, HERMES, SMOLLM3
from oarlock.server.chat.tool_parsers.json_list import (
    GRANITE,
    GRANITE_3_0,
    MISTRAL,
    MISTRAL_NAMED,
    PHI4_MINI,
    PHI4_MINI_JSON,
)
from oarlock.server.chat.tool_parsers.llama import LLAMA
from oarlock.server.chat.tool_parsers.minimax_m3 import MINIMAX_M3
from oarlock.server.chat.tool_parsers.named import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_TEXT,
    DEEPSEEK_V31,
    DEEPSEEK_V31_TEXT,
    KIMI_K2,
)
from oarlock.server.chat.tool_parsers.olmo3 import OLMO3, OLMO3_FUNCTIONS
from oarlock.server.chat.tool_parsers.pythonic import LFM2, PYTHONIC
from oarlock.server.chat.tool_parsers.tagged_list import (
    APERTUS,
    APRIEL,
    COHERE,
    COMMAND_R,
    GIGACHAT,
    MINIMAX,
    NEMOTRON,
)
from oarlock.server.chat.tool_parsers.xml import GLM45, HUNYUAN_3, MINIMAX_M2, QWEN3_CODER, SEED_OSS

FORMATS: list[ToolFormat] = [
    HARMONY,
    MISTRAL_NAMED,
    MISTRAL,
    DEEPSEEK_V3,
    DEEPSEEK_V3_TEXT,
    DEEPSEEK_V31,
    DEEPSEEK_V31_TEXT,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    KIMI_K2,
    GENERIC,
    SMOLLM3,
    FUNCTIONGEMMA,
    GEMMA_4,
    PYTHONIC,
    LFM2,
    OLMO3,
    OLMO3_FUNCTIONS,
    PHI4_MINI,
    PHI4_MINI_JSON,
    GRANITE,
    GRANITE_3_0,
    GLM4,
    GLM4_9B,
    QWEN3_CODER,
    SEED_OSS,
    GLM45,
    HUNYUAN_3,
    MINIMAX_M2,
    MINIMAX_M3,
    APRIEL,
    MINIMAX,
    NEMOTRON,
    COHERE,
    COMMAND_R,
    GIGACHAT,
    APERTUS,
    FUNCTIONARY,
    HERMES,
    LLAMA,
]


def by_name(name: str) -> ToolFormat:
    """Return the format with this name or alias."""
    return next(known for known in FORMATS if name in (known.name, *known.aliases))


def as_markdown() -> str:
    """Return the table of tool-call formats for the documentation."""
    rows = ["| `--tool-call-parser` | models | a call |", "|---|---|---|"]
    for known in FORMATS:
        names = ", ".join(f"`{name}`" for name in (known.name, *known.aliases))
        example = known.example.replace("|", "\\|").replace("\n", "↵")
        rows.append(f"| {names} | {known.models} | {_code(example)} |")
    return "\n".join(rows) + "\n"


def _code(text: str) -> str:
    """Return `text` as Markdown inline code; text with backticks gets longer runs of backticks as delimiters."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return f"`{text}`" if not longest else f"{'`' * (longest + 1)} {text} {'`' * (longest + 1)}"
