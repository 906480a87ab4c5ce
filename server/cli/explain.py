"""`oarlock explain REQUEST_ID`: what happened to one of a running server's last requests, and what would help."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from oarlock.engine.errors import StartupError
from oarlock.server.cli.arguments import UsageError

HELP = "tell what happened to one of a server's last requests, and what would make it faster"
EXAMPLE = "oarlock explain cmpl-bf5fdae34de7111919b618f3"
_TIMEOUT_S = 30.0
_KEY = "OARLOCK_ADMIN_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask a running server what happened to one of its last thousand requests: the times of its stages, whom it "
        "waited for, and one sentence on what would help. No text is shown. A server on this machine without keys "
        "tells it to everybody here, any other wants the key of its --admin-api-key."
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the X-Request-Id of an answer, or its id")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="of the server (default: %(default)s)"
    )
    parser.add_argument("--admin-api-key", metavar="KEY", help=f"the admin key; better in {_KEY}")
    parser.add_argument("--json", action="store_true", help="the server's whole answer, for programs")


def run(arguments: argparse.Namespace) -> int:
    key = arguments.admin_api_key or os.environ.get(_KEY) or None
    answer = _ask(arguments.url.rstrip("/").removesuffix("/v1"), arguments.request_id, key)
    sys.stdout.write(json.dumps(answer, indent=1) + "\n" if arguments.json else text_of(answer))
    return 0


def _ask(url: str, request_id: str, key: str | None) -> dict[str, Any]:
    """Ask the server what happened to a request. Raises `StartupError`."""
    from urllib.error import HTTPError, URLError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url} is not the URL of a server.", "For example: --url http://127.0.0.1:8000")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = Request(f"{url}/v1/requests/{quote(request_id, safe='')}", headers=headers)
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise _refusal(error.code, error.read()) from None
    except (URLError, OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise StartupError(f"No answer from {url}: {cause}.", "Is the server running there? Give its --url.") from None


def _refusal(status: int, body: bytes) -> StartupError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return StartupError(f"The server answered with status {status}.", "Is it an Oarlock server? Give its --url.")
    fixes = {
        401: f"Set {_KEY} to the key of the server's --admin-api-key.",
        403: "Start the server with --admin-api-key KEY, and give the same key here.",
        404: "Give the X-Request-Id or the id of one of the server's last thousand answers.",
    }
    return StartupError(message, fixes.get(status, "See the server's log."))


def text_of(answer: dict[str, Any]) -> str:
    """The answer of `GET /v1/requests/{id}` for people."""
    key = "" if answer["key"] is None else f", key {answer['key']}"
    status = "" if answer["status"] is None else f" with status {answer['status']}"
    lines = [
        f"{answer['id']}  {answer['route']}, {answer['state']}{status}{key}",
        f"{answer['prompt_tokens']} prompt tokens ({answer['cached_tokens']} cached), "
        f"{answer['completion_tokens']} answered, choices: {answer['choices']}",
        "",
    ]
    for event in answer["timeline"]:
        details = ", ".join(f"{name} {_shown(value)}" for name, value in event.items() if name not in ("at_s", "event"))
        lines.append(f"{event['at_s']:9.3f} s  {event['event']:<20}{details}".rstrip())
    lines += ["", "  ".join(f"{name} {value:.3f} s" for name, value in answer["seconds"].items()), ""]
    lines.append(answer["diagnosis"])
    if answer["flag"] is not None:
        lines.append(f"Would help: {answer['flag']}")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
