"""Calls as each format writes them, and the template of a model that does: short, with the marks of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from tests.unit.server.llm.chat_templates import HARMONY, PLAIN

Calls = list[tuple[str, dict]]
TEXTS = ("s", "e", "p", "a")  # arguments that are strings by the schemas of the tests


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


def _hunyuan(calls: Calls) -> str:
    blocks = []
    for name, arguments in calls:
        pairs = [
            f"<arg_key@>{key}</arg_key@>\n<arg_value@>{_plain(value)}</arg_value@>\n"
            for key, value in arguments.items()
        ]
        blocks.append(f"<tool_calls@>\n<tool_call@>{name}<tool_sep@>\n{''.join(pairs)}</tool_call@>\n</tool_calls@>")
    return "\n".join(blocks).replace("@>", ":opensource>")


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


def _olmo(calls: Calls) -> str:
    return f"<function_calls>{_pythonic(calls)[1:-1].replace('), ', f'){chr(10)}')}</function_calls>"


def _lines(calls: Calls) -> str:
    return "<|assistant|>".join(f"{name}\n{_json(arguments)}" for name, arguments in calls)


def _action(call: tuple[str, dict]) -> str:
    return f'{{"tool_name": "{call[0]}", "parameters": {_json(call[1])}}}'


def _minimax(calls: Calls) -> str:
    blocks = []
    for name, arguments in calls:
        pairs = [f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items()]
        blocks.append(f'<minimax:tool_call>\n<invoke name="{name}">\n{"".join(pairs)}</invoke>\n</minimax:tool_call>')
    return "\n".join(blocks)


def _minimax_m3(calls: Calls) -> str:
    lines = []
    for name, arguments in calls:
        pairs = [f"@<{key}>{_plain(value)}@</{key}>" for key, value in arguments.items()]
        lines.append(f'@<invoke name="{name}">{"".join(pairs)}@</invoke>\n')
    return f"@<tool_call>\n{''.join(lines)}@</tool_call>".replace("@", "]<]minimax[>[")


def _dsml(outer: str, calls: Calls) -> str:
    blocks = []
    for name, arguments in calls:
        pairs = [
            f'<@parameter name="{key}" string="{"true" if key in TEXTS else "false"}">'
            f"{value if key in TEXTS else _json(value)}</@parameter>\n"
            for key, value in arguments.items()
        ]
        blocks.append(f'<@{outer}>\n<@invoke name="{name}">\n{"".join(pairs)}</@invoke>\n</@{outer}>')
    return "\n".join(blocks).replace("@", "\uff5cDSML\uff5c")


def _harmony(calls: Calls) -> str:
    head = "<|channel|>commentary to=functions."
    written = [f"{head}{name} <|constrain|>json<|message|>{_json(arguments)}" for name, arguments in calls]
    return "<|call|><|start|>assistant".join(written)


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _hermes,
    "smollm3": _hermes,
    "generic": _hermes,
    "unknown": _hermes,
    "llama3": lambda calls: ";".join(_object(*call, key="parameters") for call in calls),
    "mistral": lambda calls: "[TOOL_CALLS]" + _list(calls),
    "mistral_named": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(value)}" for name, value in calls),
    "granite": lambda calls: "<|tool_call|>" + _list(calls),
    "granite_3_0": lambda calls: "<|tool_call|>" + _list(calls),
    "olmo3": _olmo,
    "olmo3_functions": _olmo,
    "glm4": _lines,
    "glm4_9b": _lines,
    "phi4_mini": lambda calls: f"<|tool_call|>{_list(calls)}<|/tool_call|>",
    "phi4_mini_json": lambda calls: "functools" + _list(calls),
    "deepseek_v3": lambda calls: _deepseek("function", ("\n```json\n", "\n```"), "\n", calls),
    "deepseek_v3_text": lambda calls: _deepseek("function", ("\n```json\n", "\n```"), "\n", calls),
    "deepseek_v31": lambda calls: _deepseek("", ("", ""), "", calls),
    "deepseek_v31_text": lambda calls: _deepseek("", ("", ""), "", calls),
    "kimi_k2": _kimi,
    "qwen3_coder": lambda calls: _qwen("<tool_call>", "</tool_call>", "\n", calls),
    "seed_oss": lambda calls: _qwen("<seed:tool_call>", "</seed:tool_call>", "", calls),
    "glm45": _glm,
    "hy_v3": _hunyuan,
    "openai": _harmony,
    "functiongemma": partial(_gemma, "<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": partial(_gemma, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "pythonic": _pythonic,
    "lfm2": lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>",
    "deepseek_v32": partial(_dsml, "function_calls"),
    "deepseek_v4": partial(_dsml, "tool_calls"),
    "minimax_m2": _minimax,
    "minimax_m3": _minimax_m3,
    "apriel": lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
    "minimax": lambda calls: "<tool_calls>\n" + "\n".join(_object(*call) for call in calls) + "\n</tool_calls>",
    "nemotron_json": lambda calls: f"<TOOLCALL>{_list(calls)}</TOOLCALL>",
    "gigachat3": lambda calls: "<|function_call|>" + "".join(_object(*call) for call in calls),
    "cohere": lambda calls: f"<|START_ACTION|>[{', '.join(map(_action, calls))}]<|END_ACTION|>",
    "command_r": lambda calls: "Action:\n```json\n[\n" + ",\n".join(map(_action, calls)) + "\n]```",
    "apertus": lambda calls: (
        "<|tools_prefix|>["
        + ", ".join(f'{{"{name}": {_json(arguments)}}}' for name, arguments in calls)
        + "]<|tools_suffix|>"
    ),
    "functionary_v3_1": lambda calls: "".join(
        f"<function={name}>{_json(arguments)}</function>" for name, arguments in calls
    ),
}
ONE_CALL = ("llama3", "openai", "gigachat3")  # models that were not trained to write several
WHOLE_ANSWER = ("llama3", "pythonic", "glm4", "glm4_9b")  # calls begin the answer
ARGUMENTS_AS_TEXT = (
    "qwen3_coder",
    "seed_oss",
    "glm45",
    "hy_v3",
    "minimax_m2",
    "minimax_m3",
    "deepseek_v32",
    "deepseek_v4",
)


def _template(call: str, before: str = "", between: str = "", after: str = "") -> str:
    """A template that writes tools, calls and results, `call` for each call `f`."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        f"{{% if m.tool_calls %}}{before}"
        f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{{% if not loop.last %}}{between}{{% endif %}}"
        f"{{% endfor %}}{after}{{% endif %}}<|end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def _without_tools(template: str) -> str:
    """The template without the part that writes the tools."""
    return template.replace("{% if tools %}{{ tools | tojson }}{% endif %}", "")


def _each(pair: str, between: str = "") -> str:
    """Jinja of all arguments: `k` is the key, `v` the text, `j` the JSON of the value."""
    return (
        "{% for k, v in f.arguments.items() %}{% set j = v | tojson %}{% set v = v if v is string else j %}"
        f"{pair}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}"
    )


def _without_calls(instructions: str) -> str:
    """A template that writes the tools, and leaves out calls."""
    return (
        f"{{% if tools %}}<|im_start|>system\n{instructions}{{{{ tools | tojson }}}}{{% endif %}}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    )


def _turns(before: str, **turns: str) -> str:
    """A template that writes turns of these roles only, each in its way."""
    branches = "".join(f"{{% elif m.role == '{role}' %}}{turn}<|end|>" for role, turn in turns.items())
    return f"{before}{{% for m in messages %}}{{% if false %}}{branches}{{% endif %}}{{% endfor %}}<|assistant|>"


_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_COHERE = '{"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
_QWEN_CALL = "\n<function={{ f.name }}>\n" + _each("<parameter={{ k }}>\n{{ v }}\n</parameter>\n") + "</function>\n"
_SEED_CALL = _QWEN_CALL.replace(">\n{{ v }}\n<", ">{{ v }}<")
_INVOKE_CALL = (
    '<invoke name="{{ f.name }}">\n' + _each('<parameter name="{{ k }}">{{ v }}</parameter>\n') + "</invoke>\n"
)
_DSML_CALL = (
    '<@invoke name="{{ f.name }}">\n'
    + _each('<@parameter name="{{ k }}" string="{{ "false" if v == j else "true" }}">{{ v }}</@parameter>\n')
    + "</@invoke>\n"
)


def _dsml_template(outer: str) -> str:
    return _template(_DSML_CALL, f"\n\n<@{outer}>\n", "", f"</@{outer}>").replace("@", "\uff5cDSML\uff5c")


def _gemma_template(start: str, end: str, quote: str) -> str:
    value = f"{{% if v == j %}}{{{{ v }}}}{{% else %}}{quote}{{{{ v }}}}{quote}{{% endif %}}"
    pairs = _each("{{ k }}:" + value, ",")
    return _template(f"{start}call:{{{{ f.name ~ '{{' }}}}{pairs}}}{end}")


def _deepseek_template(before: str, behind: str, arguments: str, between: str) -> str:
    call = f"{deepseek('tool call begin')}{before}{{{{ f.name }}}}{behind}{{{{ f.arguments }}}}{arguments}"
    begin, end = deepseek("tool calls begin"), deepseek("tool calls end")
    return _template(call + deepseek("tool call end"), begin, between, end)


_SEP = deepseek("tool sep")
TEMPLATES = {
    "functiongemma": _gemma_template("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma_template("<|tool_call>", "<tool_call|>", '<|"|>'),
    "pythonic": _template("{{ f.name }}(" + _each("{{ k }}={{ j }}", ", ") + ")", "[", ", ", "]"),
    "lfm2": _without_calls("List of tools: "),
    "openai": "{{ tools | tojson if tools }}" + HARMONY,
    "hermes": _template(f"\n<tool_call>\n{_OBJECT}\n</tool_call>"),
    "smollm3": "{% for tool in xml_tools %}{{ tool.name ~ tool }}{% endfor %}" + PLAIN,
    "generic": PLAIN,
    "unknown": _template("<call>{{ f.name }}</call>"),
    "llama3": _template(_OBJECT.replace('arguments"', 'parameters"')),
    "mistral": _template(_OBJECT, "[TOOL_CALLS] [", ", ", "]"),
    "mistral_named": _template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "granite": _without_calls("Answer with <|tool_call|> and a list: "),
    "granite_3_0": _turns(
        "{{ tools | tojson }}",
        user="<|user|>{{ m.content }}",
        assistant="<|assistant|>{{ m.content }}",
        assistant_tool_call="<|assistant|><|tool_call|>{{ m.content }}",
        tool_response="<|tool_response|>{{ m.content }}",
    ),
    "glm4": _turns(
        "{{ tools | tojson }}",
        user="<|user|>\n{{ m.content }}",
        assistant="<|assistant|>{{ m.metadata }}\n{{ m.content }}",
        observation="<|observation|>\n{{ m.content }}",
    ),
    "glm4_9b": (
        "{% for m in messages %}{% for t in m.tools %}{{ t.function | tojson }}{% endfor %}"
        "{% if m.content %}<|{{ m.role }}|>{{ m.metadata }}\n{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
    ),
    "olmo3": _template(
        "{{ f.name }}(" + _each("{{ k }}={{ j }}", ", ") + ")", "<function_calls>", "\n", "</function_calls>"
    ),
    "olmo3_functions": _turns(
        "",
        system="<|system|>{{ m.content ~ m.functions }}",
        user="<|user|>{{ m.content }}",
        assistant="<|assistant|>{{ m.content }}"
        "{% if m.function_calls %}<function_calls>{{ m.function_calls }}</function_calls>{% endif %}",
        environment="<|environment|>{{ m.content }}",
    ),
    "phi4_mini": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>{% endfor %}<|assistant|>"
    ),
    "phi4_mini_json": _template(_OBJECT, "functools[", ", ", "]"),
    "deepseek_v3": _deepseek_template(f"function{_SEP}", "\n```json\n", "\n```", "\n"),
    "deepseek_v3_text": _without_tools(_deepseek_template(f"function{_SEP}", "\n```json\n", "\n```", "\n")),
    "deepseek_v31": _deepseek_template("", _SEP, "", ""),
    "deepseek_v31_text": _without_tools(_deepseek_template("", _SEP, "", "")),
    "deepseek_v32": _dsml_template("function_calls"),
    "deepseek_v4": _dsml_template("tool_calls"),
    "kimi_k2": _template(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "qwen3_coder": _template(f"<tool_call>{_QWEN_CALL}</tool_call>", "", "\n"),
    "seed_oss": _template(f"<seed:tool_call>{_SEED_CALL}</seed:tool_call>", "", "\n"),
    "minimax_m2": _template(_INVOKE_CALL, "\n<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    "minimax_m3": _template(
        '@<invoke name="{{ f.name }}">' + _each("@<{{ k }}>{{ v }}@</{{ k }}>") + "@</invoke>\n",
        "@<tool_call>\n",
        "",
        "@</tool_call>",
    ).replace("@", "]<]minimax[>["),
    "glm45": _template(
        "<tool_call>{{ f.name }}\n"
        + _each("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n")
        + "</tool_call>",
    ),
    "hy_v3": _template(
        "<tool_call@>{{ f.name }}<tool_sep@>\n"
        + _each("<arg_key@>{{ k }}</arg_key@>\n<arg_value@>{{ v }}</arg_value@>\n")
        + "</tool_call@>\n",
        "<tool_calls@>\n",
        "",
        "</tool_calls@>",
    ).replace("@>", ":opensource>"),
    "apriel": _template(_OBJECT, "<tool_calls>[", ", ", "]</tool_calls>"),
    "minimax": _template(_OBJECT, "<tool_calls>\n", "\n", "\n</tool_calls>"),
    "nemotron_json": _template(_OBJECT, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "gigachat3": _template(f"<|function_call|>{_OBJECT}"),
    "cohere": _template(_COHERE, "<|START_ACTION|>[\n", ",\n", "\n]<|END_ACTION|>"),
    "command_r": _template(_COHERE, "\nAction:\n```json\n[\n", ",\n", "\n]```\n"),
    "apertus": _template(
        '{"{{ f.name }}": {{ f.arguments | tojson }}}', "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"
    ),
    "functionary_v3_1": _template("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
}
