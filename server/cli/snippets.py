"""`oarlock snippets [URL] [CLIENT …]`: working code for a running server, with its address, model and key.

Texts have placeholders for the address (`@URL@`, ending in /v1), the model and the key. A placeholder is replaced by a
whole quoted text, in the quotes of its language.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass

from oarlock.server.cli.arguments import UsageError
from oarlock.server.config.options import nearest

_QUESTION = "What does os.path.join do?"


@dataclass(frozen=True, slots=True)
class Snippet:
    """One client's code. `language`: of the code, also the extension of its file."""

    about: str
    language: str
    text: str

    def filled(self, url: str, model: str, key: str) -> str:
        """Return the code for one server. `url` ends with /v1."""
        quote = _QUOTES[self.language]
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": _QUESTION}]})
        found = self.text.replace("@QUESTION@", quote(_QUESTION)).replace("@OF_OPENAI@", quote(f"openai/{model}"))
        found = found.replace("@BODY@", quote(body)).replace("@CHAT_URL@", quote(f"{url}/chat/completions"))
        found = found.replace("@BEARER@", quote(f"Authorization: Bearer {key}"))
        found = found.replace("@OPENCODE@", quote(json.dumps(_opencode(url, model, key))))
        found = found.replace("@BASE_URL@", quote(url.removesuffix("/v1")))
        return found.replace("@URL@", quote(url)).replace("@MODEL@", quote(model)).replace("@KEY@", quote(key))


def _opencode(url: str, model: str, key: str) -> dict[str, object]:
    """Return opencode's configuration for one server."""
    options = {"baseURL": url, "apiKey": key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Oarlock", "options": options, "models": {model: {}}}
    return {"model": f"oarlock/{model}", "provider": {"oarlock": provider}}


_QUOTES: dict[str, Callable[[str], str]] = {
    "sh": shlex.quote,
    "py": json.dumps,  # Python, JavaScript and YAML read JSON's quoting as the same text
    "mjs": json.dumps,
    "yaml": json.dumps,
}

SNIPPETS: dict[str, Snippet] = {
    "curl": Snippet(
        "curl, in a shell",
        "sh",
        """\
curl -sS @CHAT_URL@ \\
  -H @BEARER@ \\
  -H 'Content-Type: application/json' \\
  -d @BODY@
""",
    ),
    "openai-python": Snippet(
        "OpenAI's Python package: pip install openai",
        "py",
        """\
from openai import OpenAI

client = OpenAI(base_url=@URL@, api_key=@KEY@)
stream = client.chat.completions.create(
    model=@MODEL@,
    messages=[{"role": "user", "content": @QUESTION@}],
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
""",
    ),
    "openai-node": Snippet(
        "OpenAI's JavaScript package: npm install openai",
        "mjs",
        """\
import { OpenAI } from "openai";

const client = new OpenAI({ baseURL: @URL@, apiKey: @KEY@ });
const stream = await client.chat.completions.create({
  model: @MODEL@,
  messages: [{ role: "user", content: @QUESTION@ }],
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log();
""",
    ),
    "langchain": Snippet(
        "LangChain: pip install langchain-openai",
        "py",
        """\
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=@URL@, api_key=@KEY@, model=@MODEL@)
for chunk in chat.stream(@QUESTION@):
    print(chunk.text, end="", flush=True)
print()
""",
    ),
    "llamaindex": Snippet(
        "LlamaIndex: pip install llama-index-llms-openai-like",
        "py",
        """\
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(api_base=@URL@, api_key=@KEY@, model=@MODEL@, is_chat_model=True)
for chunk in llm.stream_chat([ChatMessage(role="user", content=@QUESTION@)]):
    print(chunk.delta or "", end="", flush=True)
print()
""",
    ),
    "litellm": Snippet(
        "LiteLLM: pip install litellm",
        "py",
        """\
import litellm

answer = litellm.completion(
    model=@OF_OPENAI@,
    api_base=@URL@,
    api_key=@KEY@,
    messages=[{"role": "user", "content": @QUESTION@}],
)
print(answer.choices[0].message.content)
""",
    ),
    "open-webui": Snippet(
        "Open WebUI, in a container that shares this machine's network; then http://127.0.0.1:3000",
        "sh",
        """\
docker run -d --name open-webui --network host -e PORT=3000 \\
  -e OPENAI_API_BASE_URL=@URL@ \\
  -e OPENAI_API_KEY=@KEY@ \\
  -e ENABLE_OLLAMA_API=false \\
  -v open-webui:/app/backend/data \\
  ghcr.io/open-webui/open-webui:main
""",
    ),
    "continue": Snippet(
        "Continue: ~/.continue/config.yaml",
        "yaml",
        """\
name: Local
version: 0.0.1
schema: v1
models:
  - name: Oarlock
    provider: openai
    model: @MODEL@
    apiBase: @URL@
    apiKey: @KEY@
    roles: [chat, edit, apply]
""",
    ),
    "aider": Snippet(
        "aider: pip install aider-chat",
        "sh",
        """\
export OPENAI_API_BASE=@URL@
export OPENAI_API_KEY=@KEY@
aider --model @OF_OPENAI@ --no-show-model-warnings
""",
    ),
    "claude-code": Snippet(
        "Claude Code: npm install -g @anthropic-ai/claude-code",
        "sh",
        """\
export ANTHROPIC_BASE_URL=@BASE_URL@ ANTHROPIC_AUTH_TOKEN=@KEY@ CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
export ANTHROPIC_MODEL=@MODEL@ ANTHROPIC_DEFAULT_HAIKU_MODEL=@MODEL@ CLAUDE_CODE_SUBAGENT_MODEL=@MODEL@
claude
""",
    ),
    "codex": Snippet(
        "Codex CLI: npm install -g @openai/codex",
        "sh",
        """\
export OARLOCK_KEY=@KEY@
codex --model @MODEL@ -c model_provider=oarlock -c model_providers.oarlock.name=Oarlock \\
  -c model_providers.oarlock.base_url=@URL@ -c model_providers.oarlock.env_key=OARLOCK_KEY
""",
    ),
    "opencode": Snippet(
        "opencode: npm install -g opencode-ai",
        "sh",
        """\
export OPENCODE_CONFIG_CONTENT=@OPENCODE@
opencode
""",
    ),
    "qwen-code": Snippet(
        "Qwen Code: npm install -g @qwen-code/qwen-code",
        "sh",
        """\
export OPENAI_BASE_URL=@URL@ OPENAI_API_KEY=@KEY@ OPENAI_MODEL=@MODEL@
qwen
""",
    ),
}


HELP = "print working code for a running server: curl, openai, LangChain and more"
EXAMPLE = "oarlock snippets http://127.0.0.1:8000 --client openai-python"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, SNIPPETS))
    listed = "\n".join(f"  {name:<{width}}  {snippet.about}" for name, snippet in SNIPPETS.items())
    parser.epilog = (
        f"clients:\n{listed}\n\nThe server is asked for its model. If it requires an API key, set "
        "OPENAI_API_KEY:\nthe printed code contains that key."
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="base URL of the server (default http://127.0.0.1:8000)")
    parser.add_argument("--client", action="append", metavar="NAME", help="print only this client; may be repeated")
    parser.add_argument("--model", metavar="NAME", help="model to use (default: the first that the server lists)")


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from oarlock.server.cli.remote import DEFAULT_URL, Remote, ServerError, given_key

    wanted = arguments.client or list(SNIPPETS)
    for name in wanted:
        if name not in SNIPPETS:
            near = nearest(name, SNIPPETS)
            fix = f"Did you mean {near}?" if near else f"The clients are: {', '.join(SNIPPETS)}."
            raise UsageError(f"There is no snippet for {name}.", fix)
    key = given_key()
    remote = Remote(arguments.url or DEFAULT_URL, key)
    try:
        names = asyncio.run(remote.models())
    except ServerError as error:
        raise error.as_startup_error() from None
    if arguments.model is not None and arguments.model not in names:
        raise UsageError(f"The server has no model {arguments.model!r}.", f"It lists: {', '.join(names)}.")
    for at, name in enumerate(wanted):
        snippet = SNIPPETS[name]
        if len(wanted) > 1:  # a single one is a file that runs
            mark = "//" if snippet.language == "mjs" else "#"
            sys.stdout.write(f"{'' if at == 0 else chr(10)}{mark} ---- {name}: {snippet.about}\n")
        sys.stdout.write(snippet.filled(f"{remote.url}/v1", arguments.model or names[0], key or "none"))
    if key is not None:
        sys.stderr.write("note: the code contains the server's key\n")
    return 0
