"""Kimi K2 Thinking, GLM-4.7 and DeepSeek V3.1 as their authors publish them: see `published_models.py`."""

from __future__ import annotations

from tests.unit.server.chat.published_models import Calls, Model, as_json, with_parameters


def _kimi(calls: Calls) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{as_json(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


_KIMI_TURNS = """\
{%- macro role(m) -%}
  <|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.name or m.role }}<|im_middle|>
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
  {{ role(m) }}
  {%- if m.role == 'assistant' -%}
    <think>{{ m.reasoning_content or '' }}</think>{{ m.content or '' }}
    {%- if m.tool_calls -%}
      <|tool_calls_section_begin|>
      {%- for call in m.tool_calls -%}
        <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
        {%- if call.function.arguments is string %}{{ call.function.arguments }}
        {%- else %}{{ call.function.arguments | tojson }}{% endif -%}<|tool_call_end|>
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- elif m.role == 'tool' -%}
    ## Return of {{ m.tool_call_id }}\n{{ m.content }}
  {%- else -%}
    {{ m.content }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
"""
_KIMI_HISTORY = (
    "<think></think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)
KIMI_K2_THINKING = Model(
    _KIMI_TURNS + "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}",
    "kimi_k2",
    _kimi,
    _KIMI_HISTORY,
    reasoning="deepseek_r1",
    think=("<think>", "</think>"),
)
KIMI_K2_5 = Model(
    _KIMI_TURNS
    + "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>"
    + "{{ '<think></think>' if thinking is defined and not thinking else '<think>' }}{%- endif -%}",
    "kimi_k2",
    _kimi,
    _KIMI_HISTORY,
    reasoning="deepseek_r1",
    think=("", "</think>"),
    switches={"thinking": (True, False)},
    prompts=("<|im_middle|><think>", "<|im_middle|><think></think>"),
)


def _glm47(calls: Calls) -> str:
    pair = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"
    return "".join(with_parameters([call], "<tool_call>", "{}", pair, "", "</tool_call>") for call in calls)


GLM_4_7 = Model(
    """\
[gMASK]<sop>
{%- if tools -%}
  <|system|>\n# Tools\n
  {%- for tool in tools %}{{ tool | tojson }}\n{% endfor -%}
  <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}<|user|>{{ m.content }}
  {%- elif m.role == 'assistant' -%}
    <|assistant|></think>{{ m.content or '' }}
    {%- for call in m.tool_calls or [] -%}
      <tool_call>{{ call.function.name }}
      {%- for k, v in call.function.arguments.items() -%}
        <arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>
      {%- endfor -%}
      </tool_call>
    {%- endfor -%}
  {%- elif m.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif -%}
    <tool_response>{{ m.content }}</tool_response>
  {%- elif m.role == 'system' -%}<|system|>{{ m.content }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif -%}""",
    "glm45",
    _glm47,
    "<|assistant|></think><tool_call>weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>"
    "<|observation|><tool_response>rain</tool_response>",
    reasoning="deepseek_r1",
    think=("", "</think>"),
    switches={"enable_thinking": (True, False)},
    prompts=("<|assistant|><think>", "<|assistant|></think>"),
)
_BEGIN, _CALL, _SEP, _CALL_END, _END = (
    f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"
    for name in ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end")
)


def _v31(calls: Calls) -> str:
    return _BEGIN + "".join(f"{_CALL}{name}{_SEP}{as_json(given)}{_CALL_END}" for name, given in calls) + _END


# The published template leaves out the tools; servers add them to it, as here.
DEEPSEEK_V3_1 = Model(
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% if tools %}\\n\\n## Tools\\n{% for tool in tools %}\\n### {{ tool.function.name }}\\n"
    "{{ tool.function.description }}\\n{{ tool.function.parameters | tojson }}\\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{% if messages[loop.index0 - 1].role == 'user' %}<\uff5cAssistant\uff5c></think>{% endif %}{{ m.content or '' }}"
    f"{{% if m.tool_calls %}}{_BEGIN}{{% for call in m.tool_calls %}}{_CALL}{{{{ call.function.name }}}}{_SEP}"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    f"{_CALL_END}{{% endfor %}}{_END}{{% endif %}}<\uff5cend\u2581of\u2581sentence\uff5c>"
    "{% elif m.role == 'tool' %}<\uff5ctool\u2581output\u2581begin\uff5c>{{ m.content }}"
    "<\uff5ctool\u2581output\u2581end\uff5c>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<\uff5cAssistant\uff5c>"
    "{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}",
    "deepseek_v31",
    _v31,
    f'<\uff5cAssistant\uff5c></think>{_BEGIN}{_CALL}weather{_SEP}{{"city": "Bern"}}{_CALL_END}{_END}'
    "<\uff5cend\u2581of\u2581sentence\uff5c><\uff5ctool\u2581output\u2581begin\uff5c>rain",
    reasoning="deepseek_r1",
    think=("", "</think>"),
    switches={"thinking": (True, False)},
    prompts=("<\uff5cAssistant\uff5c><think>", "<\uff5cAssistant\uff5c></think>"),
)
MODELS = {
    "Kimi K2 Thinking": KIMI_K2_THINKING,
    "Kimi K2.5": KIMI_K2_5,
    "GLM-4.7": GLM_4_7,
    "DeepSeek V3.1": DEEPSEEK_V3_1,
}
