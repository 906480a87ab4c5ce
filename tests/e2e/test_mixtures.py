"""Mixtures of experts behind real sockets, with their chat templates: gpt-oss in MXFP4, and Qwen3-MoE.

Their weights are random, so what they say is noise: calls that are forced are right all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from oarlock.server.chat.tool_parsers.harmony import CALL, HARMONY, RETURN
from tests.e2e.running import RunningServer, events
from tests.golden.quantised import CASES, write
from tests.golden.tiny_models import make_tiny, write_byte_tokenizer
from tests.unit.server.llm import chat_templates as templates

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
ASKED = [{"role": "user", "content": "Weather in Oslo?"}]


SHAPE: dict[str, Any] = {
    "head_dim": 32,
    "max_position_embeddings": 2048,
}  # as kernels have it, and prompts with tools need it


def gpt_oss(folder: Path) -> Path:
    dense = make_tiny(folder, "gpt_oss", intermediate_size=96, **SHAPE)
    model = write(dense, folder, CASES["mxfp4"]).path
    give_tokens(model, templates.HARMONY, sorted(HARMONY.delimiters), [RETURN, CALL])
    return model


def qwen3_moe(folder: Path) -> Path:
    model = make_tiny(folder, "qwen3_moe", **SHAPE)
    give_tokens(model, templates.QWEN, ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"], ["<|im_end|>"])
    return model


def give_tokens(model: Path, template: str, special: list[str], ends: list[str]) -> None:
    """A byte-level tokenizer with the tokens `special`, and the chat template."""
    write_byte_tokenizer(model, 300)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    described = json.loads((model / "config.json").read_text())
    described["eos_token_id"] = tokenizer.convert_tokens_to_ids(ends)
    (model / "config.json").write_text(json.dumps(described))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": described["eos_token_id"]}))


@pytest.fixture(
    scope="module", params=[pytest.param(gpt_oss, marks=pytest.mark.soak), qwen3_moe], ids=["gpt-oss", "qwen3-moe"]
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = request.param(tmp_path_factory.mktemp("mixture"))
    # Noise that is taken for thoughts has no end, where the template has a mark of that.
    flags = ("--reasoning-parser", "none") if request.param is qwen3_moe else ("--tensor-parallel-size", 2)
    with RunningServer(model, "--served-model-name", "tiny", *flags) as server:
        yield server


def post(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.client.post(path, json={"model": "tiny", "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(arguments: dict[str, Any]) -> None:
    assert arguments.keys() == {"city", "days"} and arguments["city"] in ("Oslo", "Bergen")
    assert 1 <= arguments["days"] <= 9


def test_chat_calls_a_tool_whole_and_streamed(server: RunningServer) -> None:
    asked = {
        "messages": ASKED, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required",
        "parallel_tool_calls": False, "max_tokens": 100,
    }  # fmt: skip
    (call,) = post(server, "/v1/chat/completions", **asked)["choices"][0]["message"]["tool_calls"]
    check(json.loads(call["function"]["arguments"]))
    text = ""
    with server.client.stream(
        "POST", "/v1/chat/completions", json={"model": "tiny", "temperature": 0, "stream": True, **asked}
    ) as answer:
        for chunk in events(answer):
            for delta in (choice["delta"] for choice in chunk["choices"]):
                text += "".join(part["function"].get("arguments") or "" for part in delta.get("tool_calls") or [])
    assert text == call["function"]["arguments"]
    # What was called goes back into the conversation, through the template.
    result = {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": "rain"}
    turns = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    again = post(server, "/v1/chat/completions", **asked | {"messages": turns})
    check(json.loads(again["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]))


def test_responses_call_a_tool(server: RunningServer) -> None:
    fields = {"input": "Weather in Oslo?", "tools": [{"type": "function", **TOOL}], "tool_choice": "required"}
    answer = post(server, "/v1/responses", max_output_tokens=100, parallel_tool_calls=False, **fields)
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    check(json.loads(call["arguments"]))


def test_messages_call_a_tool(server: RunningServer) -> None:
    tool = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = post(server, "/v1/messages", messages=ASKED, tools=[tool], tool_choice=choice, max_tokens=100)
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert answer["stop_reason"] == "tool_use"
    check(call["input"])


def test_the_banner_says_the_form_of_weights_and_active_parameters(server: RunningServer) -> None:
    assert ("mxfp4 (4 bits, groups of 32)" in server.log) == ("GptOss" in server.log)
    assert " active" in server.log
