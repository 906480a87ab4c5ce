"""`oarlock migrate "vllm serve …"`: translates another server's command line, and lists flags without an equivalent."""

import argparse
import sys

from oarlock.server.cli.arguments import Parser

HELP = "translate a command line of vLLM, llama-server, TGI, SGLang or Ollama"
EXAMPLE = 'oarlock migrate "vllm serve Qwen/Qwen3-0.6B --tensor-parallel-size 2"'
_EPILOG = """LINE is quoted, as it was typed, with variables before it or with `docker run … IMAGE` around it. Our line
goes to standard output, what is said about it to standard error.

exit codes:
  0  everything it asks for is there     2  wrong command line, or none of a server that is known
  1  something has no equivalent; it is listed"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    assert isinstance(parser, Parser)
    parser.help_with_unknown = 'Quote the whole line: oarlock migrate "vllm serve MODEL --port 8001"'
    parser.add_argument("line", metavar="LINE", help="the command line of the other server, quoted")


def run(arguments: argparse.Namespace) -> int:
    from oarlock.server.cli.migrate.lines import translate  # the tables of flags are read when it runs

    found = translate(arguments.line)
    for written, sentence in found.notes:
        sys.stderr.write(f"note: {written}: {sentence}\n")
    for written, sentence in found.lost:
        sys.stderr.write(f"no equivalent: {written}: {sentence}\n")
    if found.model is None:
        sys.stderr.write("note: the line names no model, so the demo model is served\n")
    print(found.command())
    return 1 if found.lost else 0
