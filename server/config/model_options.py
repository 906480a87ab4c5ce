"""Options of the served model: its files, its formats, and the code that computes it."""

from dataclasses import dataclass

from oarlock.server.config.options import option

# Names of formats, with aliases. server/chat defines the formats; a test compares both lists.
TOOL_CALL_PARSERS = (
    "auto",
    "openai",
    "functiongemma",
    "gemma4",
    "pythonic",
    "llama4_pythonic",
    "hermes",
    "granite4",
    "ernie45",
    "smollm3",
    "generic",
    "llama3",
    "llama3_json",
    "llama4_json",
    "mistral",
    "mistral_named",
    "deepseek_v3",
    "deepseek_v3_text",
    "deepseek_v31",
    "deepseek_v31_text",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k2",
    "granite",
    "granite_3_0",
    "olmo3",
    "olmo3_functions",
    "phi4_mini",
    "phi4_mini_json",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "glm4",
    "glm4_9b",
    "glm45",
    "glm47",
    "minimax_m2",
    "minimax_m3",
    "minimax",
    "apriel",
    "hunyuan_a13b",
    "hy_v3",
    "nemotron_json",
    "lfm2",
    "cohere",
    "cohere_command",
    "command_r",
    "gigachat3",
    "apertus",
    "functionary_v3_1",
)
REASONING_PARSERS = (
    "auto",
    "none",
    "deepseek_r1",
    "qwen3",
    "glm45",
    "olmo3",
    "minimax_m2",
    "hunyuan_a13b",
    "hy_v3",
    "ernie45",
    "mistral",
    "seed_oss",
    "cohere",
    "minimax_m3",
    "granite",
    "gemma4",
    "openai_gptoss",
)
FIT_TO_MEMORY = -1  # a value of max_model_len, as `auto` in vLLM


@dataclass(frozen=True)
class ModelSettings:
    """The served model, its source, and its dtype."""

    GROUP = "Model"

    model: str | None = option(
        None,
        is_path=True,
        positional=True,
        example="Qwen/Qwen2.5-0.5B-Instruct",
        unset="the demo model",
        help="directory of a checkpoint, GGUF file, hub id, or a name that `oarlock models` lists; without "
        "it, the demo model of this repository",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        example="my-model alias",
        help="model names for requests; responses show the first (default: MODEL as given)",
    )
    revision: str | None = option(None, example="v1.0", help="branch, tag or commit of a hub id (default: main)")
    tokenizer: str | None = option(
        None,
        is_path=True,
        example="Qwen/Qwen2.5-0.5B-Instruct",
        help="directory or hub id of the tokenizer and chat template (default: the model's)",
    )
    chat_template: str | None = option(
        None,
        is_path=True,
        example="template.jinja",
        help="file with a chat template in Jinja (default: the tokenizer's)",
    )
    chat_template_content_format: str = option(
        "auto",
        example="openai",
        choices=("auto", "string", "openai"),
        help="form in which the chat template gets the content of a message: string; openai, a list of "
        "parts; auto: a string, unless the template supports only parts",
    )
    tool_call_parser: str = option(
        "auto",
        example="qwen3_coder",
        choices=TOOL_CALL_PARSERS,
        help="format of the model's tool calls; auto: detected from the chat template",
    )
    reasoning_parser: str = option(
        "auto",
        example="deepseek_r1",
        choices=REASONING_PARSERS,
        help="tags around the model's reasoning; auto: detected from the chat template; none: reasoning is "
        "part of the content",
    )
    download_dir: str | None = option(
        None,
        is_path=True,
        example="/data/models",
        help="where models of the hub are stored, in the layout of huggingface_hub (default: its cache, HF_HOME)",
    )
    offline: bool = option(False, help="serve hub ids from the cache, without the network")
    model_impl: str = option(
        "auto",
        example="transformers",
        choices=("auto", "oarlock", "transformers"),
        aliases={"vllm": "oarlock"},
        help="code that computes the model; oarlock: only a described family; transformers: its class in transformers, "
        "slower; auto: oarlock if there is a description, otherwise transformers (docs/models.md)",
    )
    trust_remote_code: bool = option(
        False,
        help="let a checkpoint's Python code (auto_map) compute a model without a description; the code has "
        "all rights of the server (SECURITY.md)",
    )
    dtype: str = option(
        "auto",
        example="bfloat16",
        choices=("auto", "bfloat16", "float16", "float32"),
        aliases={"half": "float16", "float": "float32"},
        help="dtype of weights and activations; auto: the checkpoint's, or float32 if the CPU would "
        "emulate it; half and float are float16 and float32",
    )
    quantization: str = option(
        "none",
        short="-q",
        example="int8",
        choices=("none", "int8", "int4"),
        help="quantize weights while loading: int8 takes half of bfloat16's memory, int4 0.28",
    )
    dequantize: bool = option(
        False,
        help="dequantize quantized weights to --dtype while loading: inputs of matmuls are not rounded, "
        "but the weights take the memory of an unquantized model",
    )
    load_format: str = option(
        "auto",
        example="dummy",
        choices=("auto", "safetensors", "dummy"),
        help="how weights are loaded; dummy: random weights of the model's shape, for load tests",
    )
    check_weights: bool = option(True, help="refuse a checkpoint that contains NaN or infinity, and name the tensor")
    runner: str = option(
        "auto",
        example="pooling",
        choices=("auto", "generate", "pooling"),
        help="generate text, or embeddings and scores (pooling); auto: as the checkpoint's files specify",
    )
    classifier_from_token: tuple[str, ...] = option(
        (),
        example="no yes",
        help="score text pairs by the odds of the second of these two tokens; rerankers of the Qwen3 family do so "
        "(default: as config.json or modules.json specify)",
    )
    generation_config: str = option(
        "auto",
        is_path=True,
        example="vllm",
        help="default sampling parameters; auto: the model's generation_config.json; vllm: neutral values; "
        "or a folder with such a file",
    )
    seed: int = option(
        0, example="1", limits=(0, 2**31 - 1), help="seed of dummy weights; requests have their own seed"
    )
    max_model_len: int | None = option(
        None,
        example="4096",
        limits=(2, 2**24),
        is_count=True,
        aliases={"auto": FIT_TO_MEMORY},
        special=(FIT_TO_MEMORY,),
        help="context length: maximum tokens of prompt plus completion; 16k is 16,000, 16K 16,384; auto or "
        "-1: as much of the default as the KV memory holds (default: the model's context length)",
    )
