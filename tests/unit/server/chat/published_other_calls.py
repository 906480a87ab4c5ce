"""Models whose calls are no JSON objects: lines, tags for each argument, or Python's notation. Llama 4 has both."""

from __future__ import annotations

from tests.unit.server.chat.published_models import (
    Calls,
    Model,
    as_json,
    call_object,
    python_calls,
    with_parameters,
)

# Calls are lines in Python's notation.
_OLMO_INSTRUCT = """\
{%- set has_system = messages | selectattr('role', 'equalto', 'system') | list | length > 0 %}
{%- if not has_system %}
    {{- '<|im_start|>system\\nYou are a helpful function-calling AI assistant. ' }}
    {%- if tools is none %}{{ 'You have no functions. <functions></functions><|im_end|>\\n' }}
    {%- else %}
        {{- 'Output any function calls within <function_calls></function_calls> XML tags.' }}
        {{- '<functions>' + tools | tojson + '</functions><|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|im_start|>system\\n' + message.content }}
        {%- if tools is not none %}{{ '<functions>' + tools | tojson + '</functions>' }}{% endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- if message.tool_calls %}
            {{- '<function_calls>' }}
            {%- for call in message.tool_calls %}
                {%- set ns = namespace(given=[]) %}
                {%- for key, value in call.function.arguments.items() %}
                    {%- set ns.given = ns.given + [key ~ '=' ~ (value | tojson)] %}
                {%- endfor %}
                {{- call.function.name + '(' + ns.given | join(', ') + ')' }}
                {%- if not loop.last %}{{ '\\n' }}{% endif %}
            {%- endfor %}
            {{- '</function_calls>' }}
        {%- endif %}
        {{- '<|im_end|>\\n' if not loop.last else eos_token }}
    {%- elif message.role in ('environment', 'tool') %}
        {{- '<|im_start|>environment\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- endfor %}"""


_OLMO_CALL = (
    '<|im_start|>assistant\n<function_calls>weather(city="Bern")</function_calls><|im_end|>\n'
    "<|im_start|>environment\nrain<|im_end|>\n"
)


def _olmo(calls: Calls) -> str:
    return f"<function_calls>{python_calls(calls, chr(10))}</function_calls>"


OLMO3_INSTRUCT = Model(_OLMO_INSTRUCT, "olmo3", _olmo, _OLMO_CALL)


# Functions and calls are texts of the messages, and the prompt opens the reasoning.
OLMO3_THINK = Model(
    """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are OLMo. You have no functions. <functions></functions><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|im_start|>system\\n' + message.content }}
        {%- if message.get('functions', none) is not none %}
            {{- ' <functions>' + message.functions + '</functions><|im_end|>\\n' }}
        {%- else %}{{ ' You have no functions. <functions></functions><|im_end|>\\n' }}{% endif %}
    {%- elif message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1] }}
        {%- if message.get('function_calls', none) is not none %}
            {{- '<function_calls>' + message.function_calls + '</function_calls>' }}
        {%- endif %}
        {{- '<|im_end|>\\n' if not loop.last else eos_token }}
    {%- elif message.role == 'environment' %}
        {{- '<|im_start|>environment\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}
{%- endfor %}""",
    "olmo3_functions",
    _olmo,
    _OLMO_CALL,
    reasoning="deepseek_r1",
    think=("", "</think>"),
    prompts=("assistant\n<think>", "assistant\n<think>"),
)


# A call is a turn: the function's name follows the role. Calls of a message are left out.
GLM4_0414 = Model(
    """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# \u53ef\u7528\u5de5\u5177
{% for tool in tools %}{% set function = tool.function if tool.get("function") else tool %}

## {{ function.name }}

{{ function | tojson(indent=4) }}
{%- endfor %}
{%- endif -%}
{%- for message in messages if message.role == 'system' %}
<|system|>
{{ message.content }}
{%- endfor %}
{%- for message in messages if message.role != 'system' %}
    {%- set meta = message.get("metadata", "") %}
    {%- if message.role == 'user' %}
<|user|>
{{ message.content }}
    {%- elif message.role == 'assistant' and not meta %}
<|assistant|>
{{ message.content }}
    {%- elif message.role == 'assistant' and meta %}
<|assistant|>{{ meta }}
{{ message.content }}
    {%- elif message.role == 'observation' %}
<|observation|>
{{ message.content }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    "glm4",
    lambda calls: "<|assistant|>".join(f"{name}\n{as_json(given)}" for name, given in calls),
    '<|assistant|>weather\n{"city": "Bern"}<|observation|>\nrain<|assistant|>',
)


# The same turns; the tools belong to a message.
GLM4_9B = Model(
    """\
[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}<|system|>
# \u53ef\u7528\u5de5\u5177{% for tool in item['tools'] %}{% if tool['type'] == 'function' %}

## {{ tool['function']['name'] }}

{{ tool['function'] | tojson(indent=4) }}{% endif %}{% endfor %}{% endif %}
{%- if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}
{{ item['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    "glm4_9b",
    GLM4_0414.write,
    '<|assistant|>weather\n{"city": "Bern"}<|observation|>\nrain',
)


def _glm45(calls: Calls) -> str:
    pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    return "\n".join(with_parameters([call], "<tool_call>", "{}\n", pair, "", "</tool_call>") for call in calls)


GLM_4_5 = Model(
    """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
    {{- '<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>\\n</tool_call>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|user|>\\n' + m.content + ('/nothink' if enable_thinking is defined and not enable_thinking else '') }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n<think></think>' + ('\\n' + m.content if m.content else '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) }}
                {{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- elif m.role == 'system' %}{{ '<|system|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}""",
    "glm45",
    _glm45,
    "<|assistant|>\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "</tool_call><|observation|>\n<tool_response>\nrain\n</tool_response>",
    reasoning="deepseek_r1",
    think=("\n<think>", "</think>\n"),
    switches={"enable_thinking": (True, False)},
    prompts=("<|assistant|>", "/nothink<|assistant|>\n<think></think>"),
)


MINIMAX_M2 = Model(
    """\
{{- ']~!b[]~b]system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are helpful.') }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>\\n' }}
    {%- for tool in tools %}{{ '<tool>' + tool.function | tojson + '</tool>\\n' }}{% endfor %}
    {{- '</tools>\\n\\n<minimax:tool_call>\\n<invoke name="tool-name-1">\\n</invoke>\\n</minimax:tool_call>' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- ']~b]ai\\n' + message.content }}
        {%- if message.tool_calls %}
            {{- '\\n<minimax:tool_call>\\n' }}
            {%- for call in message.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- for k, v in call.function.arguments.items() %}
                    {{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>\\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{% endif %}
        {{- '\\n<response>' + message.content + '</response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '[e~[\\n' }}{% endif %}
    {%- elif message.role == 'user' %}{{ ']~b]user\\n' + message.content + '[e~[\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}""",
    "minimax_m2",
    lambda calls: with_parameters(
        calls,
        "<minimax:tool_call>\n",
        '<invoke name="{}">\n',
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n",
        "</minimax:tool_call>",
    ),
    ']~b]ai\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern</parameter>\n</invoke>\n'
    "</minimax:tool_call>[e~[\n]~b]tool\n<response>rain</response>[e~[\n",
    reasoning="deepseek_r1",
    think=("", "\n</think>\n\n"),
    prompts=("<think>\n", "<think>\n"),
)


# The prompt opens the reasoning, and values are lines of their own.
QWEN_3_5 = Model(
    """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\n\\nReply with NO suffix:\\n\\n<tool_call>\\n<function=example_function_name>\\n' }}
    {{- '<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>' }}
    {%- if messages[0].role == 'system' %}{{ '\\n\\n' + messages[0].content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- ('\\n\\n' if loop.first and m.content else '' if loop.first else '\\n') }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {{- '\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '' }}
{%- endif %}""",
    "qwen3_coder",
    lambda calls: "\n".join(
        with_parameters(
            [call],
            "<tool_call>\n",
            "<function={}>\n",
            "<parameter={}>\n{}\n</parameter>\n",
            "</function>\n",
            "</tool_call>",
        )
        for call in calls
    ),
    "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n",
    reasoning="deepseek_r1",
    think=("", "\n</think>\n\n"),
    switches={"enable_thinking": (True, False)},
    prompts=("<think>\n", "<think>\n\n</think>\n\n"),
)


# Keys and values between tokens with a suffix, which the template puts together.
HUNYUAN_3 = Model(
    """\
{%- set suffix = ':opensource' %}
{%- set think, think_end = '<think{}>'.format(suffix), '</think{}>'.format(suffix) %}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'no_think' %}
{%- if effort not in ('high', 'low', 'no_think') %}{{ raise_exception('unknown effort: ' + effort) }}{% endif %}
{%- for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '</tools>' }}
{%- endif %}
{{- '<\uff5creasoning_mode:opensource\uff5c>reasoning_effort:' + effort }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<\uff5chy_User:opensource\uff5c>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<\uff5chy_Assistant:opensource\uff5c>' + think + (message.reasoning_content or '') + think_end }}
        {{- message.content }}
        {%- if message.tool_calls %}
            {{- '<tool_calls{}>\\n'.format(suffix) }}
            {%- for call in message.tool_calls %}
                {{- '<tool_call{}>'.format(suffix) + call.function.name + '<tool_sep{}>\\n'.format(suffix) }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- '<arg_key{}>'.format(suffix) + key + '</arg_key{}>\\n'.format(suffix) }}
                    {{- '<arg_value{}>'.format(suffix) + (value if value is string else value | tojson) }}
                    {{- '</arg_value{}>\\n'.format(suffix) }}
                {%- endfor %}
                {{- '</tool_call{}>\\n'.format(suffix) }}
            {%- endfor %}
            {{- '</tool_calls{}>'.format(suffix) }}
        {%- endif %}
        {{- '<\uff5chy_eos:opensource\uff5c>' }}
    {%- elif message.role == 'tool' %}{{ '<tool_responses{}>'.format(suffix) + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<\uff5chy_Assistant:opensource\uff5c>' + think + (think_end if effort == 'no_think' else '') }}
{%- endif %}""",
    "hy_v3",
    lambda calls: with_parameters(
        calls,
        "<tool_calls:opensource>\n",
        "<tool_call:opensource>{}<tool_sep:opensource>\n",
        "<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>{}</arg_value:opensource>\n",
        "</tool_call:opensource>\n",
        "</tool_calls:opensource>",
    ),
    "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Bern</arg_value:opensource>\n"
    "</tool_call:opensource>\n</tool_calls:opensource><\uff5chy_eos:opensource\uff5c>"
    "<tool_responses:opensource>rain",
    reasoning="hy_v3",
    think=("", "</think:opensource>"),
    switches={"reasoning_effort": ("low", "no_think")},
    prompts=("<think:opensource>", "<think:opensource></think:opensource>"),
)


SEED_OSS = Model(
    """\
{%- set thinking_budget = thinking_budget if thinking_budget is defined else -1 %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = 'You are Doubao.' %}{% endif %}
{{- '<seed:bos>system\\n' + system }}
{%- for tool in tools or [] %}{{ '\\n\\nFunction:\\ndef ' + tool.function.name + '():' }}{% endfor %}
{%- if tools %}{{ '\\n<seed:tool_call>\\n<function=example>\\n</function>\\n</seed:tool_call>\\n' }}{% endif %}
{{- '<seed:eos>' }}
{%- if thinking_budget == 0 %}{{ '<seed:bos>systemYour thinking budget is 0.<seed:eos>' }}
{%- elif thinking_budget != -1 %}
    {{- '<seed:bos>systemYour thinking budget is ' ~ thinking_budget ~ '.<seed:eos>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<seed:bos>' + message.role }}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '\\n<seed:think>' + message.reasoning_content + '</seed:think>' }}
    {%- endif %}
    {{- '\\n' + message.content if message.content else '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for k, v in call.function.arguments | items %}
            {{- '<parameter=' + k + '>' + (v if v is string else v | string) + '</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</seed:tool_call>' }}
    {%- endfor %}
    {{- '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<seed:bos>assistant\\n' }}
    {%- if thinking_budget == 0 %}
        {{- '<seed:think><seed:cot_budget_reflect>The budget is 0.</seed:cot_budget_reflect></seed:think>' }}
    {%- endif %}
{%- endif %}""",
    "seed_oss",
    lambda calls: "\n".join(
        with_parameters(
            [call],
            "<seed:tool_call>\n",
            "<function={}>\n",
            "<parameter={}>{}</parameter>\n",
            "</function>\n",
            "</seed:tool_call>",
        )
        for call in calls
    ),
    "<seed:bos>assistant\n<seed:tool_call>\n<function=weather>\n<parameter=city>Bern</parameter>\n</function>\n"
    "</seed:tool_call><seed:eos><seed:bos>tool\nrain<seed:eos>",
    reasoning="seed_oss",
    think=("<seed:think>", "</seed:think>"),
    switches={"thinking_budget": (512, 0)},
    prompts=("<seed:bos>assistant\n", "</seed:cot_budget_reflect></seed:think>"),
)


NEMOTRON_3 = Model(
    """\
{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}{{ '\\n\\n# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>' }}{% endif %}
{%- for tool in tools or [] %}
    {{- '\\n<function>\\n<name>' + tool.function.name + '</name>' }}
    {{- '\\n<description>' + tool.function.description + '</description>' }}
    {{- '\\n<parameters>\\n' + tool.function.parameters | tojson + '\\n</parameters>\\n</function>' }}
{%- endfor %}
{%- if tools %}
    {{- '\\n</tools>\\n\\nIf you choose to call a function ONLY reply in the following format with NO suffix:\\n\\n' }}
    {{- '<tool_call>\\n<function=example_function_name>\\n<parameter=example_1>\\nvalue_1\\n</parameter>\\n' }}
    {{- '</function>\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>' }}
        {{- '\\n' + message.reasoning_content + '\\n' if message.reasoning_content else '' }}
        {{- '</think>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for k, v in call.function.arguments | items %}
                {{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>\\n' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>' + ('\\n' if enable_thinking else '</think>') }}
{%- endif %}""",
    "qwen3_coder",
    lambda calls: "\n".join(
        with_parameters(
            [call],
            "<tool_call>\n",
            "<function={}>\n",
            "<parameter={}>\n{}\n</parameter>\n",
            "</function>\n",
            "</tool_call>",
        )
        for call in calls
    ),
    "<think></think>\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n"
    "</tool_call>\n"
    "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<|im_end|>",
    reasoning="deepseek_r1",
    think=("", "\n</think>\n"),
    switches={"enable_thinking": (True, False)},
    prompts=("<|im_start|>assistant\n<think>\n", "<think></think>"),
)


def _llama4(call: str, instructions: str, before: str, after_text: str, between: str, after: str) -> str:
    return f"""\
{{{{- bos_token }}}}
{{%- if messages[0].role == 'system' %}}{{% set system = messages[0].content %}}{{% set messages = messages[1:] %}}
{{%- else %}}{{% set system = 'You are helpful.' %}}{{% endif %}}
{{{{- '<|header_start|>system<|header_end|>\\n\\n' + system }}}}
{{%- if tools %}}{{{{ '\\n{instructions}\\n' + tools | tojson(indent=4) }}}}{{% endif %}}
{{{{- '<|eot|>' }}}}
{{%- for message in messages %}}
    {{%- if message.tool_calls %}}
        {{{{- '<|header_start|>assistant<|header_end|>\\n\\n{before}' + message.content + '{after_text}' }}}}
        {{%- for call in message.tool_calls %}}{{% set f = call.function %}}{call}
            {{{{- '{between}' if not loop.last else '' }}}}
        {{%- endfor %}}
        {{{{- '{after}' }}}}
    {{%- elif message.role in ('tool', 'ipython') %}}
        {{{{- '<|header_start|>ipython<|header_end|>\\n\\n' + message.content | tojson + '<|eot|>' }}}}
    {{%- else %}}
        {{{{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' + message.content + '<|eot|>' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}}}{{% endif %}}"""


# All values are written in quotes.
LLAMA_4_PYTHONIC = Model(
    _llama4(
        """{{- f.name + '(' }}{% for k in f.arguments %}{{ k + '="' + '%s' | format(f.arguments[k]) + '"' }}
            {{- ', ' if not loop.last else '' }}{% endfor %}{{ ')' }}""",
        "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
        "",
        "[",
        ", ",
        "]<|eot|>",
    ),
    "pythonic",
    lambda calls: f"[{python_calls(calls, ', ')}]",
    '<|header_start|>assistant<|header_end|>\n\n[weather(city="Bern")]<|eot|>'
    '<|header_start|>ipython<|header_end|>\n\n"rain"<|eot|>',
)


LLAMA_4_JSON = Model(
    _llama4(
        """{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}""",
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        "<|python_start|>",
        "<|python_end|>",
        "",
        "<|eom|>",
    ),
    "llama3",
    lambda calls: "".join(call_object(call, "parameters") for call in calls),
    "<|header_start|>assistant<|header_end|>\n\n<|python_start|><|python_end|>"
    '{"name": "weather", "parameters": {"city": "Bern"}}<|eom|><|header_start|>ipython<|header_end|>\n\n"rain"<|eot|>',
)


MODELS = {
    "OLMo 3 Instruct": OLMO3_INSTRUCT,
    "OLMo 3 Think": OLMO3_THINK,
    "GLM-4-0414": GLM4_0414,
    "GLM-4-9B": GLM4_9B,
    "GLM-4.5": GLM_4_5,
    "MiniMax-M2": MINIMAX_M2,
    "Qwen3.5": QWEN_3_5,
    "Hunyuan 3": HUNYUAN_3,
    "Nemotron 3": NEMOTRON_3,
    "Seed-OSS": SEED_OSS,
    "Llama 4, pythonic": LLAMA_4_PYTHONIC,
    "Llama 4, JSON": LLAMA_4_JSON,
}
