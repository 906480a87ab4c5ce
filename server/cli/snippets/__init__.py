"""`oarlock snippets [URL] [CLIENT …]`: working code for a running server, with its address, model and key."""

from __future__ import annotations

import argparse
import sys

from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.snippets.texts import SNIPPETS
from oarlock.server.config.options import nearest

HELP = "print working code for a running server: curl, openai, LangChain and more"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, SNIPPETS))
    listed = "\n".join(f"  {name:<{width}}  {snippet.about}" for name, snippet in SNIPPETS.items())
    parser.epilog = (
        f"clients:\n{listed}\n\nThe server is asked for its model. Its key, if it wants one, is read from the "
        "environment,\nOPENAI_API_KEY, and stands in the code that is printed."
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="default http://127.0.0.1:8000")
    parser.add_argument("--client", action="append", metavar="NAME", help="only this one; may be given several times")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from oarlock.server.cli.remote import DEFAULT_URL, Remote, ServerError, given_key

    wanted = arguments.client or list(SNIPPETS)
    for name in wanted:
        if name not in SNIPPETS:
            near = nearest(name, SNIPPETS)
            fix = f"Did you mean {near}?" if near else f"There are: {', '.join(SNIPPETS)}."
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
        if len(wanted) > 1:  # one by itself is a file that runs
            mark = "//" if snippet.language == "mjs" else "#"
            sys.stdout.write(f"{'' if at == 0 else chr(10)}{mark} ---- {name}: {snippet.about}\n")
        sys.stdout.write(snippet.filled(f"{remote.url}/v1", arguments.model or names[0], key or "none"))
    if key is not None:
        sys.stderr.write("note: the code holds the server's key\n")
    return 0
