"""`oarlock chat [URL|MODEL]`: talk to a model in the terminal, or pass one question through a pipe."""

import argparse

from oarlock.server.cli.arguments import KINDS_OF_MODEL, not_negative, positive, whole

HELP = "chat with a model of a running server, or of one that is started for the chat"
EXAMPLE = "oarlock chat http://127.0.0.1:8000 --temperature 0"
_EPILOG = """Without URL and MODEL, the server at http://127.0.0.1:8000 is used; if none responds, one is started.
A server that is started listens on a free port of this machine, and ends with the chat.

If standard input is not a terminal, all of it is one message:
  echo 'What does os.path.join do?' | oarlock chat

/help lists the commands. If the server requires an API key, set OPENAI_API_KEY.

exit codes:
  0  left, or the response is complete     2  wrong command line
  1  the response failed or was cut off    3  no server can be used (or the exit code of one that did not start)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "target", nargs="?", metavar="URL|MODEL",
        help=f"address of a server, or a model to serve: {KINDS_OF_MODEL}",
    )  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="model to use (default: the first that the server lists)")
    parser.add_argument(
        "--serve-flags", default="", metavar="'FLAGS'",
        help="flags of `oarlock serve` for a server that is started, as one word: '--tensor-parallel-size 2'",
    )  # fmt: skip
    parser.add_argument("--system-prompt", default="", metavar="TEXT", help="system prompt of the conversation")
    parser.add_argument("--load", default="", metavar="FILE.json", help="continue a conversation that /save wrote")
    parser.add_argument(
        "--temperature", type=not_negative, metavar="X", help="sampling temperature (default: the model's)"
    )
    parser.add_argument("--top-p", type=positive, metavar="X", help="nucleus sampling (default: the model's)")
    parser.add_argument(
        "--max-tokens", type=whole(1), metavar="N", help="token limit of a response (default: the server's)"
    )
    parser.add_argument("--seed", type=whole(0), metavar="N", help="seed, for repeatable responses")
    parser.add_argument("--no-history", action="store_true", help="do not save the typed lines for the next chat")


def run(arguments: argparse.Namespace) -> int:
    from oarlock.server.cli.chat.start import chat  # slow imports of the interface and the client

    return chat(arguments)
