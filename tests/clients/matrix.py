"""Table of the clients that are tried: what each needs, which script drives it.

One environment per client, because together they would force each other to versions that are not used elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Kind of program that a client is."""

    PYTHON = "python"
    NODE = "node"
    COMMAND = "command"  # a program that npm installs
    PROGRAM = "program"  # already on the machine


@dataclass(frozen=True)
class Client:
    """Client with its packages, its script and the servers that it needs."""

    name: str  # of its environment and of its file of pins
    package: str  # whose version the table shows
    script: str  # may be empty where the snippet is all that is run
    requires: tuple[str, ...] = ()  # what a person would type behind `pip install`
    kind: Kind = Kind.PYTHON
    borrows_torch: bool = False  # needs torch: this repository's own is lent, nothing is downloaded
    needs_transformers_numbers: bool = False
    needs_small_server: bool = False  # one that is easily full, and that may be asked to leave
    needs_embedding_server: bool = False  # of a checkpoint of sentence-transformers
    needs_encoder_servers: bool = False  # of encoders: one of vectors, one of scores
    needs_scripted_server: bool = False  # of the model of scripted_model.py, which calls tools
    is_agent: bool = False  # its turns are in agents.py
    timeout_s: float = 1200.0
    is_large: bool = False  # gigabytes: tried where it is named, and with --all
    is_older: bool = False  # a version before the newest: likewise
    is_slow: bool = False  # half a minute and more: likewise
    snippet: str = ""  # of `oarlock snippets`, which is run as it is printed

    @property
    def is_quick(self) -> bool:
        """Whether it is tried without being asked for."""
        return not (self.is_large or self.is_older or self.is_slow)


CLIENTS = (
    Client(
        "openai-3",
        "openai",
        "openai_sdk.py",
        ("openai==3.52.0",),
        needs_small_server=True,
        is_slow=True,  # most of it is in tests/e2e/test_clients.py
        snippet="openai-python",
    ),
    Client("openai-2", "openai", "openai_sdk.py", ("openai==2.54.0",), needs_small_server=True, is_older=True),
    Client("openai-1", "openai", "openai_sdk.py", ("openai==1.109.1",), needs_small_server=True, is_older=True),
    Client("anthropic", "anthropic", "anthropic_sdk.py", ("anthropic==2.12.0",)),
    Client("litellm", "litellm", "litellm_client.py", ("litellm==1.106.2", "mcp==2.3.0"), snippet="litellm"),
    Client(
        "langchain-openai",
        "langchain-openai",
        "langchain_client.py",
        ("langchain-openai==1.7.3",),
        needs_embedding_server=True,
        snippet="langchain",
    ),
    Client("cohere", "cohere", "cohere_client.py", ("cohere==7.3.1",), needs_embedding_server=True),
    Client(
        "sentence-transformers",
        "sentence-transformers",
        "sentence_transformers_client.py",
        ("sentence-transformers==6.2.0", "transformers==5.23.0"),
        borrows_torch=True,
        needs_embedding_server=True,
        needs_encoder_servers=True,
    ),
    Client(
        "llama-index",
        "llama-index-llms-openai-like",
        "llama_index_client.py",
        ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
        needs_embedding_server=True,
        snippet="llamaindex",
    ),
    Client("aider", "aider-chat", "", ("aider-chat==0.86.2",), snippet="aider"),
    Client("instructor", "instructor", "instructor_client.py", ("instructor==1.17.0",)),
    Client("openai-agents", "openai-agents", "openai_agents.py", ("openai-agents==0.24.0",)),
    Client("pydantic-ai-slim", "pydantic-ai-slim", "pydantic_ai_client.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client(
        "lm-eval",
        "lm_eval",
        "lm_eval_client.py",
        ("lm_eval[api]==0.4.13", "transformers==5.23.0"),
        needs_transformers_numbers=True,
        is_slow=True,
    ),
    Client("guidellm", "guidellm", "guidellm_client.py", ("guidellm==0.8.1",), borrows_torch=True, is_slow=True),
    Client("openai-node", "openai", "openai_node.mjs", ("openai@7.55.0",), kind=Kind.NODE, snippet="openai-node"),
    Client("anthropic-node", "@anthropic-ai/sdk", "anthropic_node.mjs", ("@anthropic-ai/sdk@1.12.0",), kind=Kind.NODE),
    Client("continue", "@continuedev/cli", "", ("@continuedev/cli@1.5.47",), kind=Kind.NODE, snippet="continue"),
    Client(
        "ai-sdk",
        "ai",
        "ai_sdk.mjs",
        ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.1.8"),
        kind=Kind.NODE,
        needs_scripted_server=True,
    ),
    Client(
        "langchain-node",
        "@langchain/openai",
        "langchain_node.mjs",
        ("@langchain/openai@1.5.8", "@langchain/core@1.4.0"),
        kind=Kind.NODE,
        needs_scripted_server=True,
    ),
    Client("llm", "llm", "llm_client.py", ("llm==0.36",), needs_scripted_server=True),
    Client(
        "claude-code",
        "@anthropic-ai/claude-code",
        "",
        ("@anthropic-ai/claude-code@2.1.332",),
        kind=Kind.COMMAND,
        needs_scripted_server=True,
        is_agent=True,
        timeout_s=180.0,
        snippet="claude-code",
    ),
    Client(
        "claude-code-2.1.197",
        "@anthropic-ai/claude-code",
        "",
        ("@anthropic-ai/claude-code@2.1.197",),
        kind=Kind.COMMAND,
        needs_scripted_server=True,
        is_agent=True,
        is_older=True,
        timeout_s=180.0,
        snippet="claude-code",
    ),
    Client(
        "codex",
        "@openai/codex",
        "",
        ("@openai/codex@0.171.0",),
        kind=Kind.COMMAND,
        needs_scripted_server=True,
        is_agent=True,
        timeout_s=180.0,
        snippet="codex",
    ),
    Client(
        "opencode",
        "opencode-ai",
        "",
        ("opencode-ai@1.18.33",),
        kind=Kind.COMMAND,
        needs_scripted_server=True,
        is_agent=True,
        is_slow=True,
        timeout_s=180.0,
        snippet="opencode",
    ),
    Client(
        "qwen-code",
        "@qwen-code/qwen-code",
        "",
        ("@qwen-code/qwen-code@0.15.10",),
        kind=Kind.COMMAND,
        needs_scripted_server=True,
        is_agent=True,
        is_slow=True,
        timeout_s=180.0,
        snippet="qwen-code",
    ),
    Client(
        "open-webui", "open-webui", "", ("open-webui==0.12.4",), borrows_torch=True, is_large=True, snippet="open-webui"
    ),
    Client("curl", "curl", "curl_lines.py", kind=Kind.PROGRAM, snippet="curl"),
)

# No client, but it has an environment of the same kind; tests/fuzz runs it.
FUZZER = Client("schemathesis", "schemathesis", "", ("schemathesis==4.32.5",))
