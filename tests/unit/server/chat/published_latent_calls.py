"""Kimi K2 Thinking, GLM-4.7, DeepSeek V3.1 and R1 as their authors publish them: see `published_models.py`."""

from __future__ import annotations

from dataclasses import replace

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


# DeepSeek's published templates show no tools; vLLM's users take a template of its examples, which does.
_SYSTEM = "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
_TOOLS = (
    "{% if tools %}\\n\\n## Tools\\n{% for tool in tools %}\\n### {{ tool.function.name }}\\n"
    "{{ tool.function.description }}\\n{{ tool.function.parameters | tojson }}\\n{% endfor %}{% endif %}"
)
_USER, _ASSISTANT, _EOS = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
_OUTPUTS, _OUTPUT, _OUTPUT_END, _OUTPUTS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("outputs\u2581begin", "output\u2581begin", "output\u2581end", "outputs\u2581end")
)
_V31_TURNS = (
    f"{{% for m in messages %}}{{% if m.role == 'user' %}}{_USER}{{{{ m.content }}}}{{% elif m.role == 'assistant' %}}"
    f"{{% if messages[loop.index0 - 1].role == 'user' %}}{_ASSISTANT}</think>{{% endif %}}{{{{ m.content or '' }}}}"
    f"{{% if m.tool_calls %}}{_BEGIN}{{% for call in m.tool_calls %}}{_CALL}"
    f"{{{{ call.function.name + '{_SEP}' + call.function.arguments }}}}{_CALL_END}{{% endfor %}}{_END}"
    f"{{% endif %}}{_EOS}"
    f"{{% elif m.role == 'tool' %}}{_OUTPUT}{{{{ m.content }}}}{_OUTPUT_END}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt and messages[-1].role != 'tool' %}}{_ASSISTANT}"
    "{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}"
)
DEEPSEEK_V3_1 = Model(
    _SYSTEM + _V31_TURNS,
    "deepseek_v31_text",
    _v31,
    f'{_ASSISTANT}</think>{_BEGIN}{_CALL}weather{_SEP}{{"city": "Bern"}}{_CALL_END}{_END}{_EOS}{_OUTPUT}rain',
    reasoning="deepseek_r1",
    think=("", "</think>"),
    switches={"thinking": (True, False)},
    prompts=(f"{_ASSISTANT}<think>", f"{_ASSISTANT}</think>"),
)


def _v3(calls: Calls) -> str:
    written = (f"{_CALL}function{_SEP}{name}\n```json\n{as_json(given)}\n```{_CALL_END}" for name, given in calls)
    return _BEGIN + "\n".join(written) + _END


_R1_TURNS = (
    "{% set ns = namespace(is_result=false) %}"
    f"{{% for m in messages %}}{{% if m.role == 'user' %}}{_USER}{{{{ m.content }}}}{{% elif m.role == 'assistant' %}}"
    f"{{{{ '{_OUTPUTS_END}' if ns.is_result else '{_ASSISTANT}' }}}}{{{{ m.content.split('</think>')[-1] }}}}"
    "{% set ns.is_result = false %}"
    f"{{% if m.tool_calls %}}{_BEGIN}{{% for call in m.tool_calls %}}{{{{ '' if loop.first else '\\n' }}}}"
    f"{{{{ '{_CALL}' + call.type + '{_SEP}' + call.function.name + '\\n```json\\n' + call.function.arguments }}}}"
    f"{{{{ '\\n```{_CALL_END}' }}}}{{% endfor %}}{_END}{{% endif %}}{_EOS}"
    f"{{% elif m.role == 'tool' %}}{{{{ '\\n' if ns.is_result else '{_OUTPUTS}' }}}}{{% set ns.is_result = true %}}"
    f"{_OUTPUT}{{{{ m.content }}}}{_OUTPUT_END}{{% endif %}}{{% endfor %}}{{% if ns.is_result %}}{_OUTPUTS_END}"
    f"{{% elif add_generation_prompt %}}{{{{ '{_ASSISTANT}<think>\\n' }}}}{{% endif %}}"
)
DEEPSEEK_R1 = Model(
    _SYSTEM + _R1_TURNS,
    "deepseek_v3_text",
    _v3,
    f'{_ASSISTANT}{_BEGIN}{_CALL}function{_SEP}weather\n```json\n{{"city": "Bern"}}\n```{_CALL_END}{_END}{_EOS}'
    f"{_OUTPUTS}{_OUTPUT}rain",
    reasoning="deepseek_r1",
    think=("", "</think>"),
)
# Newer templates of vLLM, and llama.cpp's copy of DeepSeek's own, expect the arguments as an object.
_TEXT, _OBJECT = "call.function.arguments", "(call.function.arguments | tojson)"
MODELS = {
    "Kimi K2 Thinking": KIMI_K2_THINKING,
    "Kimi K2.5": KIMI_K2_5,
    "GLM-4.7": GLM_4_7,
    "DeepSeek V3.1": DEEPSEEK_V3_1,
    "DeepSeek V3.1 with a template of vLLM": replace(
        DEEPSEEK_V3_1, template=_SYSTEM + _TOOLS + _V31_TURNS, tool_format="deepseek_v31"
    ),
    "DeepSeek V3.1 with a newer template of vLLM": replace(
        DEEPSEEK_V3_1,
        template=_SYSTEM + _TOOLS + _V31_TURNS.replace(_TEXT, _OBJECT),
        tool_format="deepseek_v31",
    ),
    "DeepSeek R1": DEEPSEEK_R1,
    "DeepSeek R1 with a template of vLLM": replace(
        DEEPSEEK_R1, template=_SYSTEM + _TOOLS + _R1_TURNS.replace(_TEXT, _OBJECT), tool_format="deepseek_v3"
    ),
}
