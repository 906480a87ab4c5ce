"""Calls as each format writes them, and the template of a model that does: short, with the marks of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

Calls = list[tuple[str, dict]]


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _plain(value) -> str:
    return value if isinstance(value, str) else _json(value)


def _object(name: str, arguments: dict, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {_json(arguments)}}}'


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def _list(calls: Calls) -> str:
    return "[" + ", ".join(_object(*call) for call in calls) + "]"


def _qwen(start: str, end: str, wrap: str, calls: Calls) -> str:
    lines = []
    for name, arguments in calls:
        pairs = [f"<parameter={key}>{wrap}{_plain(value)}{wrap}</parameter>\n" for key, value in arguments.items()]
        lines.append(f"{start}\n<function={name}>\n{''.join(pairs)}</function>\n{end}")
    return "\n".join(lines)


def _glm(calls: Calls) -> str:
    lines = []
    for name, arguments in calls:
        pairs = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items()
        ]
        lines.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(lines)


def deepseek(words: str) -> str:
    """A token of DeepSeek by its words."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


def _deepseek(before: str, fence: tuple[str, str], between: str, calls: Calls) -> str:
    begin, end, sep = deepseek("tool call begin"), deepseek("tool call end"), deepseek("tool sep")
    written = []
    for name, arguments in calls:
        head = f"{before}{sep}{name}" if before else f"{name}{sep}"
        written.append(f"{begin}{head}{fence[0]}{_json(arguments)}{fence[1]}{end}")
    return deepseek("tool calls begin") + between.join(written) + deepseek("tool calls end")


def _kimi(calls: Calls) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def _gemma(start: str, end: str, quote: str, calls: Calls) -> str:
    def value(given) -> str:
        if isinstance(given, str):
            return f"{quote}{given}{quote}"
        return f"[{','.join(map(value, given))}]" if isinstance(given, list) else _json(given)

    lines = []
    for name, arguments in calls:
        pairs = ",".join(f"{key}:{value(given)}" for key, given in arguments.items())
        lines.append(f"{start}call:{name}{{{pairs}}}{end}")
    return "".join(lines)


def _pythonic(calls: Calls) -> str:
    written = [
        f"{name}({', '.join(f'{key}={_json(value)}' for key, value in arguments.items())})" for name, arguments in calls
    ]
    return "[" + ", ".join(written) + "]"


def _harmony(calls: Calls) -> str:
    head = "<|channel|>commentary to=functions."
    written = [f"{head}{name} <|constrain|>json<|message|>{_json(arguments)}" for name, arguments in calls]
    return "<|call|><|start|>assistant".join(written)


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _hermes,
    "generic": _hermes,
    "unknown": _hermes,
    "llama3": lambda calls: ";".join(_object(*call, key="parameters") for call in calls),
    "mistral": lambda calls: "[TOOL_CALLS]" + _list(calls),
    "mistral_named": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(value)}" for name, value in calls),
    "granite": lambda calls: "<|tool_call|>" + _list(calls),
    "phi4_mini": lambda calls: f"<|tool_call|>{_list(calls)}<|/tool_call|>",
    "phi4_mini_json": lambda calls: "functools" + _list(calls),
    "deepseek_v3": lambda calls: _deepseek("function", ("\n```json\n", "\n```"), "\n", calls),
    "deepseek_v31": lambda calls: _deepseek("", ("", ""), "", calls),
    "kimi_k2": _kimi,
    "qwen3_coder": lambda calls: _qwen("<tool_call>", "</tool_call>", "\n", calls),
    "seed_oss": lambda calls: _qwen("<seed:tool_call>", "</seed:tool_call>", "", calls),
    "glm45": _glm,
    "openai": _harmony,
    "functiongemma": partial(_gemma, "<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": partial(_gemma, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "pythonic": _pythonic,
}
ONE_CALL = ("llama3", "openai")  # models that were not trained to write several
WHOLE_ANSWER = ("llama3", "pythonic")  # calls begin the answer
ARGUMENTS_AS_TEXT = ("qwen3_coder", "seed_oss", "glm45")

TEMPLATES = {
    "functiongemma": "{{ tools }} <start_function_call>call: <escape>",
    "gemma4": '{{ tools }} <|tool_call>call: <|"|>',
    "pythonic": '{{ tools }} "parameters" [func_name1(a=b)] <|start_header_id|>',
    "openai": "{{ tools }} '<|start|>assistant<|channel|>commentary to=functions.' <|message|>",
    "hermes": "{{ tools }} '<tool_call>\\n{\"name\": ' + call.name + '\\n</tool_call>'",
    "generic": "{{ messages }}",
    "unknown": "{{ tools }} <call>",
    "llama3": '{{ tools }} {"name": name, "parameters": {}} <|python_tag|>',
    "mistral": "{{ tools }} '[TOOL_CALLS] [' ']'",
    "mistral_named": "{{ tools }} [TOOL_CALLS] [ARGS]",
    "granite": "<|start_of_role|>tools<|end_of_role|> {{ tools }} write <|tool_call|> and a list",
    "phi4_mini": "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}",
    "phi4_mini_json": "{{ tools }} write functools[{name and arguments}]",
    "deepseek_v3": f"{{{{ tool }}}} {deepseek('tool call begin')} tools ```json",
    "deepseek_v31": f"{{{{ tools }}}} {deepseek('tool call begin')}",
    "kimi_k2": "{{ tools }} <|tool_call_begin|> id <|tool_call_argument_begin|>",
    "qwen3_coder": "{{ tools }} <tool_call>\\n<function=name>\\n<parameter=key>",
    "seed_oss": "{{ tools }} <seed:tool_call> <function=name>",
    "glm45": "{{ tools }} <tool_call>name <arg_key> <arg_value>",
}
