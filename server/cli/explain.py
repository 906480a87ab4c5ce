"""`oarlock explain REQUEST_ID`: the history of a recent request to a running server, and advice."""

import argparse
import json
import os
import sys
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.server.cli.arguments import UsageError

HELP = "explain one of a server's last requests, and how to make it faster"
EXAMPLE = "oarlock explain cmpl-bf5fdae34de7111919b618f3 http://127.0.0.1:8000"
_KEY = "OARLOCK_ADMIN_API_KEY"
_FIXES = {  # HTTP status -> fix
    401: f"Set {_KEY} to the key of the server's --admin-api-key.",
    403: "Start the server with --admin-api-key KEY, and give the same key here.",
    404: "Give the X-Request-Id or the id of one of the server's last thousand responses, and its address.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Explain one of a running server's last thousand requests: the time of each stage, which requests "
        "it waited for, and one sentence on how to make it faster. No text is shown. If the server has no "
        "keys, everybody on its machine may ask; any other server requires the key of its --admin-api-key."
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="X-Request-Id of a response, or its id")
    parser.add_argument("url", nargs="?", metavar="URL", help="default http://127.0.0.1:8000")
    parser.add_argument("--admin-api-key", metavar="KEY", help=f"the admin key; prefer {_KEY}")
    parser.add_argument("--json", action="store_true", help="print the server's JSON response")


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    from urllib.parse import quote

    from oarlock.server.cli.remote import DEFAULT_URL, Remote, ServerError, is_bare_address, is_url

    if is_url(arguments.request_id) or (arguments.url is None and is_bare_address(arguments.request_id)):
        raise UsageError(
            f"{arguments.request_id} is an address, but REQUEST_ID comes first.", f"For example: {EXAMPLE}"
        )
    remote = Remote(arguments.url or DEFAULT_URL, arguments.admin_api_key or os.environ.get(_KEY) or None)
    try:
        response = asyncio.run(remote.get_json(f"/v1/requests/{quote(arguments.request_id, safe='')}"))
    except ServerError as error:
        raise StartupError(error.cause, _FIXES.get(error.status or 0, error.fix)) from None
    sys.stdout.write(json.dumps(response, indent=1) + "\n" if arguments.json else text_of(response))
    return 0


def text_of(response: dict[str, Any]) -> str:
    """Return the response of `GET /v1/requests/{id}` as text for people."""
    key = "" if response["key"] is None else f", key {response['key']}"
    adapter = "" if response["adapter"] is None else f", adapter {response['adapter']}"
    status = "" if response["status"] is None else f" with status {response['status']}"
    lines = [
        f"{response['id']}  {response['route']}, {response['state']}{status}{key}{adapter}",
        f"{response['prompt_tokens']} prompt tokens ({response['cached_tokens']} cached), "
        f"{response['completion_tokens']} generated, choices: {response['choices']}",
        "",
    ]
    for event in response["timeline"]:
        details = ", ".join(f"{name} {_shown(value)}" for name, value in event.items() if name not in ("at_s", "event"))
        lines.append(f"{event['at_s']:9.3f} s  {event['event']:<20}{details}".rstrip())
    lines += ["", "  ".join(f"{name} {value:.3f} s" for name, value in response["seconds"].items()), ""]
    lines.append(response["diagnosis"])
    if response["flag"] is not None:
        lines.append(f"Would help: {response['flag']}")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
