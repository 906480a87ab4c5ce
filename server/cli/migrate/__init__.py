"""`oarlock migrate "vllm serve …"`: translates another server's command line, and lists flags without an equivalent."""

import argparse
import sys

from oarlock.server.cli.arguments import Parser

HELP = "translate a command line of vLLM, llama-server, TGI, SGLang or Ollama"
EXAMPLE = 'oarlock migrate "vllm serve Qwen/Qwen3-0.6B --tensor-parallel-size 2"'
_EPILOG = """LINE may begin with variables or with `docker run … IMAGE`. Our command line goes to standard output,
notes go to standard error.

exit codes:
  0  everything has an equivalent        2  wrong command line, or an unknown server
  1  some flags have no equivalent"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    assert isinstance(parser, Parser)
    parser.help_with_unknown = 'Quote the whole line: oarlock migrate "vllm serve MODEL --port 8001"'
    parser.add_argument("line", metavar="LINE", help="the command line of the other server, quoted")


def run(arguments: argparse.Namespace) -> int:
    from oarlock.server.cli.migrate.lines import translate  # the tables are parsed only if they are used

    found = translate(arguments.line)
    for written, sentence in found.notes:
        sys.stderr.write(f"note: {written}: {sentence}\n")
    for written, sentence in found.lost:
        sys.stderr.write(f"no equivalent: {written}: {sentence}\n")
    if found.model is None:
        sys.stderr.write("note: the line names no model, so the demo model is served\n")
    print(found.command())
    return 1 if found.lost else 0
