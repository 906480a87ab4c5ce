"""`oarlock chat [URL|MODEL]`: talk to a model in the terminal, or pass one question through a pipe."""

import argparse

from oarlock.server.cli.arguments import KINDS_OF_MODEL, not_negative, positive, whole

HELP = "talk to a model: of a server, or of one that is started for it"
EXAMPLE = "oarlock chat http://127.0.0.1:8000 --temperature 0"
_EPILOG = """Without URL and MODEL the server at http://127.0.0.1:8000 is asked; where none answers, one is started.
A server that is started listens on a free port of this machine, and ends with the chat.

Where the standard input is no terminal, all of it is one message:
  echo 'What does os.path.join do?' | oarlock chat

/help lists what can be typed. The server's key, if it wants one, is read from the environment: OPENAI_API_KEY.

exit codes:
  0  left, or the answer is whole        2  wrong command line
  1  the answer failed or was cut off    3  the server cannot be asked, else that of a server that did not start"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "target", nargs="?", metavar="URL|MODEL",
        help=f"address of a server, or a model to serve: {KINDS_OF_MODEL}",
    )  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="which of the server's models (default: the first it lists)")
    parser.add_argument(
        "--serve-flags", default="", metavar="'FLAGS'",
        help="of `oarlock serve`, for a server that is started, as one word: '--tensor-parallel-size 2'",
    )  # fmt: skip
    parser.add_argument("--system-prompt", default="", metavar="TEXT", help="what the conversation begins with")
    parser.add_argument("--load", default="", metavar="FILE.json", help="go on with a conversation that /save wrote")
    parser.add_argument("--temperature", type=not_negative, metavar="X", help="default: the model's")
    parser.add_argument("--top-p", type=positive, metavar="X", help="default: the model's")
    parser.add_argument("--max-tokens", type=whole(1), metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--seed", type=whole(0), metavar="N", help="the same answers again")
    parser.add_argument("--no-history", action="store_true", help="do not keep the typed lines for the next chat")


def run(arguments: argparse.Namespace) -> int:
    from oarlock.server.cli.chat.start import chat  # slow imports of the interface and the client

    return chat(arguments)
