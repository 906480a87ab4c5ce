"""`oarlock batch IN.jsonl OUT.jsonl`: process a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from oarlock.base.paths import expand
from oarlock.server.cli.arguments import add_settings, loaded_settings
from oarlock.server.config.settings import SERVER_ONLY
from oarlock.server.hub.local_model import check_names

if TYPE_CHECKING:
    from oarlock.server.config.settings import Settings
    from oarlock.server.endpoints.batches.batch_file import OutputFile, RequestFile

HELP = "run a file of requests in OpenAI's batch format"
EXAMPLE = "oarlock batch requests.jsonl responses.jsonl --model Qwen/Qwen2.5-0.5B-Instruct"
# Options of the server that affect how requests are read, so that they apply here too.
_OF_REQUESTS = {
    "served_model_name",
    "ignore_model_case",
    "strict_parameters",
    "strict_max_tokens",
    "request_timeout",
}
_EXIT_CODES = """exit codes:
  0  all requests completed               2  wrong command line
  1  some requests failed                 3  wrong file, configuration or model
  130, 143  stopped by Ctrl-C or SIGTERM: repeat the command to continue"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the requests of IN, lines of JSON in OpenAI's batch format, as the server would, and append "
        "each response to OUT. Requests that already have a response in OUT are skipped. Takes the flags "
        "of `serve`."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    parser.add_argument("requests", metavar="IN.jsonl", type=expand, help="the requests, one per line")
    parser.add_argument(
        "results",
        metavar="OUT.jsonl",
        type=expand,
        help="the responses in order of completion; an existing file is continued",
    )
    add_settings(parser, positional=False, without=SERVER_ONLY - _OF_REQUESTS)


def run(arguments: argparse.Namespace) -> int:
    loaded = loaded_settings(arguments)
    settings = loaded.settings
    check_names(settings)
    if loaded.origins["log_level"] == "default":  # nobody watches a server here
        settings = replace(settings, log_level="warning")
    for note in arguments.notes:
        sys.stderr.write(f"note: {note}\n")
    import asyncio

    # Imported before a model is loaded.
    from oarlock.server.endpoints.batches.batch_file import OutputFile, RequestFile

    requests = RequestFile(arguments.requests)
    results = OutputFile(arguments.results, requests)
    try:
        if results.num_done or results.num_dropped:
            again = f", and {results.num_dropped} are retried" if results.num_dropped else ""
            sys.stderr.write(f"{results.num_done} of {len(requests)} requests already have a response{again}\n")
        if results.num_done < len(requests):
            asyncio.run(_run_all(settings, requests, results))
        print(f"{results.num_done} of {len(requests)} requests completed, {results.num_failed} with an error")
    finally:
        results.close()
        requests.close()
    return 1 if results.num_failed else 0


async def _run_all(settings: Settings, requests: RequestFile, results: OutputFile) -> None:
    from oarlock.server.launch.banner import Progress
    from oarlock.server.offline.offline_engine import OfflineEngine, run_requests

    progress = Progress()
    try:
        engine = await OfflineEngine.start(settings, progress)
        try:
            await run_requests(engine, requests, results, progress)
            ignored = engine.endpoints.ignored
        finally:
            await engine.close()
    finally:
        progress.finish()
    for name, count in ignored.most_common(32):
        sys.stderr.write(f"note: {name!r:.64}, a field of {count} request(s), has no effect here and was ignored\n")
