"""Which model is served, where it is found, and in which number type."""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.server.config.options import option

# Names of formats, and other names of the same ones. What they mean is in server/chat, which tests compare.
TOOL_CALL_PARSERS = (
    "auto",
    "openai",
    "functiongemma",
    "gemma4",
    "pythonic",
    "llama4_pythonic",
    "hermes",
    "generic",
    "llama3",
    "llama3_json",
    "llama4_json",
    "mistral",
    "mistral_named",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "granite",
    "phi4_mini",
    "phi4_mini_json",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "glm45",
    "glm47",
)
REASONING_PARSERS = (
    "auto",
    "none",
    "deepseek_r1",
    "qwen3",
    "glm45",
    "mistral",
    "seed_oss",
    "granite",
    "gemma4",
    "openai_gptoss",
)
FITTING = -1  # of max_model_len: as vLLM's `auto`
_GROUP = "Model"


@dataclass(frozen=True)
class ModelSettings:
    """Options of the group `Model`."""

    model: str | None = option(
        None,
        positional=True,
        group=_GROUP,
        example="Qwen/Qwen2.5-0.5B-Instruct",
        help="directory in the Hugging Face layout, or a hub id; without one, the demo model of this repository",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        group=_GROUP,
        example="my-model alias",
        help="names that requests may use; the first is reported (default: MODEL as given)",
    )
    revision: str | None = option(
        None, group=_GROUP, example="v1.0", help="branch, tag or commit of a hub id (default: main)"
    )
    tokenizer: str | None = option(
        None,
        group=_GROUP,
        example="Qwen/Qwen2.5-0.5B-Instruct",
        help="directory or hub id whose tokenizer and chat template are used (default: those of the model)",
    )
    chat_template: str | None = option(
        None,
        group=_GROUP,
        example="template.jinja",
        help="file with a chat template in Jinja (default: that of the tokenizer)",
    )
    chat_template_content_format: str = option(
        "auto",
        group=_GROUP,
        example="openai",
        choices=("auto", "string", "openai"),
        help="what the chat template reads as a message's content: string, one text; openai, a list of parts; auto: "
        "one text, unless the template writes parts alone",
    )
    tool_call_parser: str = option(
        "auto",
        group=_GROUP,
        example="qwen3_coder",
        choices=TOOL_CALL_PARSERS,
        help="format of the model's tool calls; auto: found out from the chat template",
    )
    reasoning_parser: str = option(
        "auto",
        group=_GROUP,
        example="deepseek_r1",
        choices=REASONING_PARSERS,
        help="marks around the model's thoughts; auto: found out from the chat template; none: thoughts are content",
    )
    download_dir: str | None = option(
        None,
        group=_GROUP,
        example="/data/models",
        help="where models of the hub are kept, as huggingface_hub lays them out (default: its cache, HF_HOME)",
    )
    offline: bool = option(False, group=_GROUP, example="", help="serve hub ids from the cache, without the network")
    dtype: str = option(
        "auto",
        group=_GROUP,
        example="bfloat16",
        choices=("auto", "bfloat16", "float16", "float32"),
        aliases={"half": "float16", "float": "float32"},
        help="type of weights and activations; auto: the checkpoint's own, or float32 where a CPU would emulate it; "
        "half and float are float16 and float32",
    )
    quantization: str = option(
        "none",
        short="-q",
        group=_GROUP,
        example="int8",
        choices=("none", "int8", "int4"),
        help="round weights as they are read: int8, half of bfloat16's memory, small errors; int4, 0.28",
    )
    dequantize: bool = option(
        False,
        group=_GROUP,
        example="",
        help="write quantised weights out in --dtype at load: exact where their products would round inputs, in the "
        "memory of an unquantised model",
    )
    load_format: str = option(
        "auto",
        group=_GROUP,
        example="dummy",
        choices=("auto", "safetensors", "dummy"),
        help="how weights are read; dummy: seeded random weights of the model's shape, for load tests",
    )
    check_weights: bool = option(
        True, group=_GROUP, example="", help="refuse a checkpoint that holds NaN or infinity, by the tensor's name"
    )
    runner: str = option(
        "auto",
        group=_GROUP,
        example="pooling",
        choices=("auto", "generate", "pooling"),
        help="generate texts, or embeddings and scores (pooling); auto: as the checkpoint's files say",
    )
    classifier_from_token: tuple[str, ...] = option(
        (),
        group=_GROUP,
        example="no yes",
        help="score texts by the odds of the last of these two answers; rerankers of the Qwen3 family do so "
        "(default: as config.json or modules.json says)",
    )
    generation_config: str = option(
        "auto",
        group=_GROUP,
        example="vllm",
        help="default sampling; auto: the model's generation_config.json; vllm: neutral; or a folder with such a file",
    )
    seed: int = option(
        0,
        group=_GROUP,
        example="1",
        minimum=0,
        maximum=2**31 - 1,
        help="seed of dummy weights; requests have their own",
    )
    max_model_len: int | None = option(
        None,
        group=_GROUP,
        example="4096",
        minimum=2,
        maximum=2**24,
        is_count=True,
        aliases={"auto": FITTING},
        special=(FITTING,),
        help="longest prompt plus answer in tokens; 16k is 16,000, 16K 16,384; auto or -1: as many of the default as "
        "the KV memory holds (default: what the model was trained for)",
    )
