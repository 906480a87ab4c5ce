"""Models whose calls are JSON objects."""

from __future__ import annotations

from typing import Any

from tests.unit.server.chat.published_models import (
    Model,
    as_json,
    call_list,
    call_object,
    hermes,
)

# The tools have a variable of their own and get into the text as Python writes them; calls are no part of a turn.
SMOLLM3 = Model(
    """\
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if '/no_think' in system %}{% set mode = '/no_think' %}
{%- elif '/think' in system %}{% set mode = '/think' %}{% endif %}
{{- '<|im_start|>system\\n## Metadata\\n\\nReasoning Mode: ' + mode + '\\n\\n## Custom Instructions\\n\\n' }}
{{- system.replace('/no_think', '').replace('/think', '').rstrip() }}
{%- if xml_tools or python_tools %}
    {{- '### Tools\\n\\n' }}
    {%- for tool in xml_tools or [] %}{{ (tool | string) + '\\n' }}{% endfor %}
    {{- 'Answer with <tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n') }}
        {{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n') }}
{%- endif %}""",
    "smollm3",
    hermes,
    "<|im_start|>assistant\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\nrain<|im_end|>\n",
    reasoning="deepseek_r1",
    think=("<think>\n", "\n</think>\n\n"),
    switches={"enable_thinking": (True, False)},
    prompts=("Reasoning Mode: /think", "assistant\n<think>\n\n</think>\n"),
)


# A role of its own for calls, and one for results.
GRANITE_3_0 = Model(
    """\
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set role = message.role %}
    {%- if role in ('system', 'user', 'assistant', 'tool_response') %}
        {{- '<|start_of_role|>' + role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
    {%- elif role == 'assistant_tool_call' %}
        {{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message.content + '<|end_of_text|>\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
{%- endfor %}""",
    "granite_3_0",
    lambda calls: "<|tool_call|>" + call_list(calls),
    "<|start_of_role|>assistant<|end_of_role|><|tool_call|>"
    '[{"name": "weather", "arguments": {"city": "Bern"}}]<|end_of_text|>\n'
    "<|start_of_role|>tool_response<|end_of_role|>rain<|end_of_text|>\n",
)


def _granite_3(thoughts: str) -> str:
    return f"""\
{{%- if messages[0].role == 'system' %}}
    {{%- set system = messages[0].content %}}{{% set messages = messages[1:] %}}
{{%- else %}}
    {{%- set system = 'You are Granite, developed by IBM.' %}}
    {{%- if tools %}}{{% set system = system + ' Respond only with <|tool_call|> followed by a JSON list of tools.' %}}
    {{%- elif thinking %}}{{% set system = system + ' {thoughts}' %}}{{% endif %}}
{{%- endif %}}
{{{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}}}
{{%- if tools %}}
    {{{{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}}}
    {{%- if loop.last and add_generation_prompt %}}{{{{ '<|start_of_role|>assistant<|end_of_role|>' }}}}{{% endif %}}
{{%- endfor %}}"""


_GRANITE_3_CALL = (
    "<|start_of_role|>assistant<|end_of_role|><|tool_call|>"
    '[{"name": "weather", "arguments": {"city": "Bern"}}]<|end_of_text|>\n'
    "<|start_of_role|>tool<|end_of_role|>rain<|end_of_text|>\n"
)


# Reasoning and response after a sentence of their own.
GRANITE_3_2 = Model(
    _granite_3("Write your thoughts after Here is my thought process: and your response after Here is my response:"),
    "granite",
    lambda calls: "<|tool_call|>" + call_list(calls),
    _GRANITE_3_CALL,
    reasoning="granite",
    think=("Here is my thought process:", "\n\nHere is my response:"),
    switches={"thinking": (True, False)},
    prompts=("Here is my thought process:", "developed by IBM.<|end_of_text|>"),
)


# Tags around the reasoning and around the response.
GRANITE_3_3 = Model(
    _granite_3("Write your thoughts between <think></think> and your response between <response></response>."),
    "granite",
    lambda calls: "<|tool_call|>" + call_list(calls),
    _GRANITE_3_CALL,
    reasoning="ernie45",
    think=("<think>", "</think>"),
    answer=("<response>", "</response>"),
    switches={"thinking": (True, False)},
    prompts=("<think></think>", "developed by IBM.<|end_of_text|>"),
)


GRANITE_4 = Model(
    """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = 'You are a helpful assistant.' %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system }}
{%- if tools %}
    {{- '\\n\\nTools within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each call return <tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call>.' }}
{%- endif %}
{{- '<|end_of_text|>\\n' }}
{%- for message in messages %}
    {%- if message.role in ('user', 'system') %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end_of_text|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|start_of_role|>user<|end_of_role|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end_of_text|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""",
    "hermes",
    hermes,
    "<|start_of_role|>assistant<|end_of_role|>"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|end_of_text|>\n'
    "<|start_of_role|>user<|end_of_role|>\n<tool_response>\nrain\n</tool_response><|end_of_text|>\n",
)


def _mistral(call: str, before: str = "", between: str = "", after: str = "", thoughts: str = "") -> str:
    """Return a template that insists on alternating turns, and on ids of nine letters and digits."""
    return f"""\
{{{{- bos_token }}}}
{{%- if messages[0].role == 'system' %}}{{% set system = messages[0].content %}}{{% set messages = messages[1:] %}}
{{%- else %}}{{% set system = 'You are Mistral.{thoughts}' %}}{{% endif %}}
{{{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}}}
{{%- set ns = namespace(index=0) %}}
{{%- for message in messages if not (message.role == 'tool' or message.get('tool_calls')) %}}
    {{%- if (message.role == 'user') != (ns.index % 2 == 0) %}}{{{{ raise_exception('no alternation') }}}}{{% endif %}}
    {{%- set ns.index = ns.index + 1 %}}
{{%- endfor %}}
{{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}
        {{%- if tools and message == users[-1] %}}
            {{{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}}}
        {{%- endif %}}
        {{{{- '[INST]' + message.content + '[/INST]' }}}}
    {{%- elif message.get('tool_calls') %}}
        {{{{- '{before}' }}}}
        {{%- for call in message.tool_calls %}}
            {{%- if call.id | length != 9 %}}{{{{ raise_exception('ids have nine letters') }}}}{{% endif %}}
            {{{{- {call} }}}}{{{{ '{between}' if not loop.last else '' }}}}
        {{%- endfor %}}
        {{{{- '{after}' + eos_token }}}}
    {{%- elif message.role == 'assistant' %}}{{{{ message.content + eos_token }}}}
    {{%- elif message.role == 'tool' %}}
        {{%- if message.tool_call_id | length != 9 %}}{{{{ raise_exception('ids have nine letters') }}}}{{% endif %}}
        {{{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}}}
    {{%- else %}}{{{{ raise_exception('unknown role') }}}}{{% endif %}}
{{%- endfor %}}"""


MISTRAL_3_1 = Model(
    _mistral("(call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}'", "[TOOL_CALLS] [", ", ", "]"),
    "mistral",
    lambda calls: "[TOOL_CALLS] " + call_list(calls),
    '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}, "id": "abcdef123"}]</s>'
    "[TOOL_RESULTS]abcdef123[TOOL_CONTENT]rain[/TOOL_RESULTS]",
)


MISTRAL_3_2 = Model(
    _mistral(
        "'[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson"
    ),
    "mistral_named",
    lambda calls: "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdef123[ARGS]{as_json(given)}" for name, given in calls),
    '[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"city": "Bern"}</s>'
    "[TOOL_RESULTS]abcdef123[TOOL_CONTENT]rain[/TOOL_RESULTS]",
)


MAGISTRAL = Model(
    _mistral(
        "'[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson",
        thoughts=" Think first: [THINK]your thoughts[/THINK]your response.",
    ),
    "mistral_named",
    lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}" for name, given in calls),
    '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}</s>[TOOL_RESULTS]abcdef123[TOOL_CONTENT]rain[/TOOL_RESULTS]',
    reasoning="mistral",
    think=("[THINK]", "[/THINK]"),
    prompts=("[THINK]your thoughts[/THINK]", "[THINK]your thoughts[/THINK]"),
)


# Tags around reasoning and response; the model names itself if there are tools.
HUNYUAN_A13B = Model(
    """\
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if tools %}
        {%- if loop.first %}
            {%- set head = '<|startoftext|><tool_calls>[{"name": "f", "arguments": {}},...]</tool_calls>\\n' %}
            {%- set extra = '\\n' + content if message.role == 'system' else '' %}
            {%- set head = head + tools | tojson + extra + strftime_now('%Y-%m-%d %H:%M:%S') + '<|extra_4|>' %}
            {{- head }}{{ '\u7528\u6237\uff1a' + content + '<|extra_0|>' if message.role == 'user' else '' }}
        {%- elif message.role == 'user' %}{{ '\u7528\u6237\uff1a' + content + '<|extra_0|>' }}
        {%- elif message.role == 'assistant' and 'tool_calls' in message %}
            {{- content + '<tool_calls>[' }}
            {%- for call in message.tool_calls %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
                {{- ', ' if not loop.last else '' }}
            {%- endfor %}
            {{- ']</tool_calls><|eos|>' }}
        {%- elif message.role == 'assistant' %}{{ '\u52a9\u624b\uff1a' + content + '<|eos|>' }}
        {%- elif message.role == 'tool' %}{{ '<tool_response>' + content + '</tool_response><|extra_0|>' }}
        {%- endif %}
    {%- elif message.role == 'system' %}{{ '<|startoftext|>' + content + '<|extra_4|>' }}
    {%- elif message.role == 'assistant' %}{{ content + '<|eos|>' }}
    {%- else %}{{ content + '<|extra_0|>' }}{% endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}""",
    "apriel",
    lambda calls: f"<tool_calls>{call_list(calls)}</tool_calls>",
    '<tool_calls>[{"name": "weather", "arguments": {"city": "Bern"}}]</tool_calls><|eos|>'
    "<tool_response>rain</tool_response><|extra_0|>",
    reasoning="hunyuan_a13b",
    think=("<think>\n", "\n</think>\n"),
    answer=("<answer>\n", "\n</answer>"),
    switches={"enable_thinking": (True, False)},
    prompts=("<|extra_0|>", "<|extra_0|><think>\n\n</think>\n"),
)


HUNYUAN_DENSE = Model(
    """\
{{- '<\uff5chy_begin\u2581of\u2581sentence\uff5c>' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content + '<\uff5chy_place\u2581holder\u2581no\u25813\uff5c>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<\uff5chy_User\uff5c>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1] %}
        {%- if '<answer>' in content %}
            {%- set content = content.split('<answer>')[-1].split('</answer>')[0] %}
        {%- endif %}
        {{- '<\uff5chy_Assistant\uff5c>' + content + '<\uff5chy_place\u2581holder\u2581no\u25812\uff5c>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<\uff5chy_Assistant\uff5c>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}
{%- endif %}""",
    "generic",
    hermes,
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    "<\uff5chy_place\u2581holder\u2581no\u25812\uff5c><\uff5chy_User\uff5c><tool_response>\nrain\n</tool_response>",
    reasoning="hunyuan_a13b",
    think=("<think>\n", "\n</think>\n"),
    answer=("<answer>\n", "\n</answer>"),
    switches={"enable_thinking": (True, False)},
    prompts=("<\uff5chy_Assistant\uff5c>", "<\uff5chy_Assistant\uff5c><think>\n\n</think>\n"),
)


ERNIE_4_5 = Model(
    """\
{{- '<|begin_of_sentence|>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ 'User: ' + message.content + '\\n' }}
    {%- elif message.role == 'assistant' %}{{ 'Assistant: ' + message.content + '<|end_of_sentence|>' }}
    {%- elif message.role == 'system' %}{{ message.content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}""",
    "generic",
    hermes,
    'Assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|end_of_sentence|>'
    "User: <tool_response>\nrain\n</tool_response>\n",
)


ERNIE_4_5_THINKING = Model(
    """\
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
    {{- '<system_setting>\\n' + messages[0].content + '\\n</system_setting>\\n\\n' }}
{%- endif %}
{{- '<global_setting>\\nthink_mode=True\\n</global_setting>' }}
{%- if tools %}{{ '\\n\\n<tool_list>\\n' + tools | tojson + '\\n</tool_list>' }}{% endif %}
{{- '<|im_end|>\\n\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n' }}
        {%- if message.content %}{{ '<response>\\n' + message.content + '\\n</response>\\n' }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>\\n' }}
        {%- endfor %}
        {{- '<|im_end|>\\n\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>tool' }}{% endif %}
        {{- '\\n<tool_output>' + message.content + '</tool_output>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}""",
    "hermes",
    hermes,
    '</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n<|im_end|>\n\n'
    "<|im_start|>tool\n<tool_output>rain</tool_output><|im_end|>\n\n",
    reasoning="ernie45",
    think=("", "\n</think>\n\n"),
    answer=("<response>\n", "\n</response>\n"),
    prompts=("assistant\n<think>\n", "assistant\n<think>\n"),
)


EXAONE_4 = Model(
    """\
{%- macro available(tools) %}{{ '# Available Tools\\n' }}
    {%- for tool in tools %}{{ '<tool>' + tool | tojson + '</tool>\\n' }}{% endfor %}
    {{- '<tool_call>{"name": function_1_name, "arguments": {}}</tool_call>' }}
{%- endmacro %}
{%- for message in messages %}
    {%- if loop.first and (message.role == 'system' or tools) %}
        {{- '[|system|]\\n' + (message.content + '\\n\\n' if message.role == 'system' else '') }}
        {{- available(tools) if tools else '' }}{{ '[|endofturn|]\\n' }}
    {%- endif %}
    {%- if message.role == 'user' %}{{ '[|user|]\\n' + message.content + '[|endofturn|]\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '[|assistant|]\\n' }}
        {%- if message.content %}{{ '<think>\\n\\n</think>\\n\\n' + message.content.split('</think>')[-1] }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}
        {{- '[|endofturn|]\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '[|tool|]\\n' }}{% endif %}
        {{- '<tool_result>' + message.content + '</tool_result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '[|endofturn|]\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[|assistant|]\\n' }}
    {{- '<think>\\n' if enable_thinking is defined and enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}""",
    "hermes",
    lambda calls: "\n".join(f"<tool_call>{call_object(call)}</tool_call>" for call in calls),
    '[|assistant|]\n<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>[|endofturn|]\n'
    "[|tool|]\n<tool_result>rain</tool_result>[|endofturn|]\n",
    reasoning="deepseek_r1",
    think=("", "\n</think>\n\n"),
    switches={"enable_thinking": (True, False)},
    prompts=("[|assistant|]\n<think>\n", "[|assistant|]\n<think>\n\n</think>\n\n"),
)


def _action(number: int, call: tuple[str, dict[str, Any]]) -> str:
    return f'{{"tool_call_id": "{number}", "tool_name": "{call[0]}", "parameters": {as_json(call[1])}}}'


COMMAND_A = Model(
    """\
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are Command.' }}
{%- if tools %}
    {{- ' Write <|START_THINKING|>a plan<|END_THINKING|>, then <|START_ACTION|>a list of JSON<|END_ACTION|>.\\n' }}
    {%- for tool in tools %}{{ tool.function | tojson + '\\n' }}{% endfor %}
{%- endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
        {%- if message.tool_calls %}
            {{- '<|START_THINKING|>' + (message.reasoning_content or '') + '<|END_THINKING|><|START_ACTION|>[\\n' }}
            {%- for call in message.tool_calls %}
                {{- '    {"tool_call_id": "' ~ ns.index ~ '", "tool_name": "' + call.function.name }}
                {{- '", "parameters": ' + call.function.arguments | tojson + '}' }}
                {{- (',' if not loop.last else '') + '\\n' }}
                {%- set ns.index = ns.index + 1 %}
            {%- endfor %}
            {{- ']<|END_ACTION|><|END_OF_TURN_TOKEN|>' }}
        {%- else %}{{ '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}{% endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>' + message.content }}
        {{- '<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
    {%- if reasoning is defined and not reasoning %}{{ '<|START_THINKING|><|END_THINKING|>' }}{% endif %}
{%- endif %}""",
    "cohere",
    lambda calls: (
        f"<|START_ACTION|>[\n    {', '.join(_action(i, call) for i, call in enumerate(calls))}\n]<|END_ACTION|>"
    ),
    "<|START_THINKING|><|END_THINKING|><|START_ACTION|>[\n"
    '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Bern"}}\n]<|END_ACTION|>'
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>rain<|END_TOOL_RESULT|>",
    reasoning="cohere",
    think=("<|START_THINKING|>", "<|END_THINKING|>"),
    switches={"reasoning": (True, False)},
    prompts=("<|CHATBOT_TOKEN|>", "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>"),
)


MODELS = {
    "SmolLM3": SMOLLM3,
    "Granite 3.0": GRANITE_3_0,
    "Granite 3.2": GRANITE_3_2,
    "Granite 3.3": GRANITE_3_3,
    "Granite 4": GRANITE_4,
    "Mistral Small 3.1": MISTRAL_3_1,
    "Mistral Small 3.2": MISTRAL_3_2,
    "Magistral": MAGISTRAL,
    "Hunyuan A13B": HUNYUAN_A13B,
    "Hunyuan 7B": HUNYUAN_DENSE,
    "Ernie 4.5": ERNIE_4_5,
    "Ernie 4.5 Thinking": ERNIE_4_5_THINKING,
    "EXAONE 4": EXAONE_4,
    "Command A": COMMAND_A,
}
