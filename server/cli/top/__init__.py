"""`oarlock top [URL]`: the current activity of a server, in a terminal or as JSON."""

import argparse

from oarlock.server.cli.arguments import finite

HELP = "watch a server: its requests, KV blocks, step times and latencies"
EXAMPLE = "oarlock top http://127.0.0.1:8000"
_EPILOG = """Reads GET /v1/state and /metrics, which need no key on loopback or with --open-metrics; otherwise
set OPENAI_API_KEY. Works over SSH. q quits.

exit codes:
  0  left                     3  the server does not respond, or has no live state
  2  wrong command line"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("url", nargs="?", metavar="URL", help="base URL of the server (default http://127.0.0.1:8000)")
    parser.add_argument(
        "--once", action="store_true", help="print the state once; also if standard output is not a terminal"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one object with --once, otherwise one line per update"
    )
    parser.add_argument("--interval", type=finite, default=1.0, metavar="S", help="seconds between updates (default 1)")


def run(arguments: argparse.Namespace) -> int:
    from oarlock.server.cli.remote import DEFAULT_URL, Remote, given_key
    from oarlock.server.cli.top.watch import watch  # slow imports of the interface and the client

    remote = Remote(arguments.url or DEFAULT_URL, given_key())
    return watch(remote, once=arguments.once, as_json=arguments.json, interval_s=arguments.interval)
