"""A tiny checkpoint whose answers are scripted: it calls the tool that an agent offers, then answers its result.

The demo model never calls a tool of its own accord, so it cannot drive an agent. This checkpoint is a real Llama,
served like any other. Its attention and MLP add zero to the residual stream, so the next token depends on the last
token only, and `lm_head` gives each scripted token one certain successor. Every scripted token is an added token of
the demo model's tokenizer, and its text is a piece of an answer. The chat template ends the prompt with the token
that begins the answer:

* a conversation whose last turn is a tool's result gets `ANSWER` if the result shows that the command really ran, and
  `LOST` if it does not;
* any other conversation gets a call of the first tool of `CALLS` that the client offers, or `NO_TOOL`.

The command's output (`OUTPUT`) is not part of its text, so only a command that was executed can produce it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.e2e.running import DEMO

CONTEXT = 131_072  # tokens: the prompts of agents have 15,000 to 30,000
OUTPUT = "41\n42\n43"
_TEXTS = {  # by the token that begins them, each in two tokens
    "ANSWER": ("The numbers are", " in the file."),
    "LOST": ("The result of the", " tool is missing."),
    "NO_TOOL": ("There is no tool", " that I know."),
}
ANSWER, LOST, NO_TOOL = ("".join(_TEXTS[name]) for name in ("ANSWER", "LOST", "NO_TOOL"))

_HIDDEN = 64  # one dimension for all ordinary tokens, one for each scripted token
_LAYER = "model.layers.0"
_LOGIT = 100.0  # of the certain successor; all other logits are 0
_END = 2  # <|im_end|> of the demo model's tokenizer


def command_of(tool: str) -> str:
    """Return the shell command that a call of `tool` runs: it writes `OUTPUT` to `TOOL.txt` and prints it."""
    return f"seq 41 43 > {tool}.txt; cat {tool}.txt"


# Arguments of the scripted call by the name of the tool; a client that offers several gets a call of the first.
CALLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": command_of("Bash"), "description": "Write numbers"},  # Claude Code
    "exec_command": {"cmd": command_of("exec_command")},  # Codex
    "run_shell_command": {  # Qwen Code
        "command": command_of("run_shell_command"),
        "is_background": False,
        "description": "Write numbers",
    },
    "bash": {"command": command_of("bash"), "description": "Write numbers"},  # opencode
    "shell": {"command": command_of("shell")},  # the scripts of libraries
}

_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n# Tools\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
    {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- set begin = namespace(token='<|begin:NO_TOOL|>') -%}
  {%- if messages[-1].role == 'tool' -%}
    {%- set shows = OUTPUT in text(messages[-1].content) -%}
    {%- set begin.token = '<|begin:ANSWER|>' if shows else '<|begin:LOST|>' -%}
  {%- else -%}
    {%- for name in NAMES | reverse -%}
      {%- for tool in tools or [] if tool.function.name == name -%}
        {%- set begin.token = '<|begin:' + name + '|>' -%}
      {%- endfor -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_start|>assistant\\n' + begin.token -}}
{%- endif -%}
"""


def scripted_model(directory: Path) -> Path:
    """Write the checkpoint into `directory` and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    first = len(tokenizer["model"]["vocab"])
    pieces, successors = _vocabulary(first)
    for index, piece in enumerate(pieces):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = piece.startswith("<|begin:")
        tokenizer["added_tokens"].append({"id": first + index, "content": piece, **flags, "special": special})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    names = "{%- set NAMES = " + json.dumps(list(CALLS)) + " -%}\n{%- set OUTPUT = " + json.dumps(OUTPUT) + " -%}\n"
    settings |= {"model_max_length": CONTEXT, "chat_template": names + _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps(_config(first + len(pieces))))
    save_file(_weights(first, successors), directory / "model.safetensors", {"format": "pt"})
    return directory


def _vocabulary(first: int) -> tuple[list[str], list[int]]:
    """Return the text of each scripted token, and the id of its successor. `first`: id of the first scripted token."""
    answers: dict[str, tuple[str, ...]] = dict(_TEXTS)
    for name, arguments in CALLS.items():  # in three tokens, each with the name in it, so that no two are equal
        call = "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
        first_end = call.index(name) + len(name)
        second_end = call.index(name, first_end) + len(name)
        answers[name] = (call[:first_end], call[first_end:second_end], call[second_end:])
    pieces: list[str] = []
    successors: list[int] = []
    for name, texts in answers.items():
        chain = [f"<|begin:{name}|>", *texts]
        following = range(first + len(pieces) + 1, first + len(pieces) + len(chain))
        pieces += chain
        successors += [*following, _END]
    assert len(set(pieces)) == len(pieces), "a text that occurs twice would have two successors"
    assert len(pieces) < _HIDDEN, "every scripted token needs a dimension of its own"
    return pieces, successors


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": _END,
        "pad_token_id": 0,
        "bos_token_id": None,
    }


def _weights(first: int, successors: list[int]) -> dict[str, np.ndarray]:
    """Return the tensors of the checkpoint, in float32.

    `first`: id of the first scripted token. `successors`: the successor's id for each scripted token.
    """
    vocab_size = first + len(successors)
    embedding = np.zeros((vocab_size, _HIDDEN))  # [V, H]: one-hot rows
    embedding[:first, 0] = 1
    lm_head = np.zeros((vocab_size, _HIDDEN))  # [V, H]
    lm_head[_END, 0] = _LOGIT  # a prompt that does not end with a scripted token gets an empty answer
    for index, successor in enumerate(successors):
        embedding[first + index, 1 + index] = 1
        lm_head[successor, 1 + index] = _LOGIT
    draw = np.random.default_rng(7)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": lm_head, "model.norm.weight": np.ones(_HIDDEN)}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{_LAYER}.{norm}.weight"] = np.ones(_HIDDEN)
    for name, rows in (("self_attn.q", 64), ("self_attn.k", 32), ("self_attn.v", 32), ("mlp.gate", 64), ("mlp.up", 64)):
        tensors[f"{_LAYER}.{name}_proj.weight"] = draw.normal(size=(rows, _HIDDEN))
    for name in ("self_attn.o", "mlp.down"):
        tensors[f"{_LAYER}.{name}_proj.weight"] = np.zeros((_HIDDEN, 64))
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
