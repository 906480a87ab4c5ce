"""Both ends of a command: the server that it calls over HTTP, with address, key and errors, and the terminal.

The key is read from the environment, where other users of the machine cannot see it: OPENAI_API_KEY.
"""

import json
import os
import re
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TextIO

from oarlock.base.errors import StartupError
from oarlock.server.bench.http_stream import (
    BrokenError,
    ConnectError,
    HttpClient,
    NotHttpError,
    OnBody,
    StatusError,
    Target,
)
from oarlock.server.cli.arguments import UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "OPENAI_API_KEY"
_EXAMPLE = "For example: http://127.0.0.1:8000"
_BARE_ADDRESS = re.compile(r"(localhost|\d+(\.\d+){3}|\[[\da-fA-F:]+\]|[\w.-]+(?=:\d))(:\d+)?(/.*)?")
# The end of an address that was copied from a client or from the documentation.
_ROUTE = re.compile(r"(/v1)?/(chat/completions|completions|messages|responses|embeddings|models|rerank|score)$")


def is_url(text: str) -> bool:
    """Return whether `text` is meant as the address of a server, and not as a model."""
    return text.startswith(("http://", "https://"))


def is_bare_address(text: str) -> bool:
    """Return whether this is the address of a server without the scheme, such as `localhost:8000` or `10.0.0.7`."""
    return _BARE_ADDRESS.fullmatch(text) is not None


def base_of(url: str) -> str:
    """Return the address without a path of the API: `http://host:8000` for `http://host:8000/v1/`. Raises
    `UsageError`."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        Target.parse(url)
    except ValueError as error:
        fix = f"Write http://{base}" if is_bare_address(url) else _EXAMPLE
        raise UsageError(f"{url} is not the address of a server: {error}.", fix) from None
    if (route := _ROUTE.search(base)) is not None:
        raise UsageError(f"{url} is the address of a route, not of a server.", f"Write {base[: route.start()]}")
    return base


def given_key() -> str | None:
    """Return the key in the environment. Raises `UsageError` if it cannot be sent in a header."""
    key = os.environ.get(KEY_VARIABLE, "").strip() or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"{KEY_VARIABLE} contains characters that an HTTP header cannot carry.", "Set it to the server's key."
        )
    return key


class ServerError(Exception):
    """The server refused a request or sent no response. `status`: of HTTP, or None if nothing came."""

    def __init__(self, cause: str, status: int | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status

    @property
    def fix(self) -> str:
        """Fix that the caller can apply, in one line."""
        if self.status in (401, 403):
            return f"Set the environment variable {KEY_VARIABLE} to the server's API key."
        if self.status == 404:
            return "Correct the address, or update the server: it has no such route."
        if self.status is None:
            return "Start the server (oarlock serve MODEL), or correct the address."
        return "See the server's log."

    def as_startup_error(self) -> StartupError:
        """Convert it to the `StartupError` that ends a command."""
        return StartupError(self.cause, self.fix)


class Remote:
    """Client of one server. All methods raise `ServerError`."""

    def __init__(self, url: str, key: str | None) -> None:
        """Prepare the client. Raises `UsageError` if `url` is not an address."""
        self.url = base_of(url)
        self._client = HttpClient(Target.parse(url), key)

    async def get(self, path: str) -> bytes:
        """Return the body of a path."""
        try:
            return await self._client.get(path)
        except (ConnectError, BrokenError, StatusError) as error:
            raise self._explained(path, error) from None

    async def get_json(self, path: str) -> Any:
        """Return the JSON of a path."""
        return self._read_json(path, await self.get(path))

    def _read_json(self, path: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except ValueError:
            raise ServerError(f"The response of {self.url}{path} is not JSON.", 200) from None

    async def stream(self, path: str, fields: dict[str, Any], on_body: OnBody) -> None:
        """Send `fields` as JSON; `on_body` gets the pieces of the response. Returns at its end."""
        try:
            await self._client.post(path, json.dumps(fields).encode(), on_body)
        except (ConnectError, BrokenError, StatusError) as error:
            raise self._explained(path, error) from None

    async def post_json(self, path: str, fields: dict[str, Any]) -> Any:
        """Send `fields` as JSON, and return the JSON of the response."""
        pieces: list[bytes] = []
        await self.stream(path, fields, lambda now, piece: pieces.append(piece))
        return self._read_json(path, b"".join(pieces))

    async def models(self) -> list[str]:
        """Return the names of the models that the server lists, at least one."""
        listed = await self.get_json("/v1/models")
        try:
            names = [str(entry["id"]) for entry in listed["data"]]
        except (KeyError, TypeError):
            raise ServerError(
                f"The response of {self.url}/v1/models is not the list of an OpenAI-compatible server.", 200
            ) from None
        if not names:
            raise ServerError(f"{self.url} serves no model.", 200)
        return names

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _explained(self, path: str, error: Exception) -> ServerError:
        if isinstance(error, StatusError):
            return ServerError(f"{self.url}{path}: HTTP {error.status}, {message_of(error.text)}", error.status)
        if isinstance(error, NotHttpError):
            return ServerError(f"The program that listens at {self.url} does not speak HTTP ({error}).")
        if isinstance(error, ConnectError):
            return ServerError(f"No server responds at {self.url} ({error}).")
        return ServerError(f"{self.url} closed the connection ({error}).")


def message_of(body: str) -> str:
    """Return the message of an error body in OpenAI's format, or the beginning of another body."""
    try:
        found = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        found = body
    return " ".join(str(found).split())[:500] or "without an explanation"


# Control characters (C0 and C1) except tab and newline, and characters that change the direction of text.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def fit(text: str) -> str:
    """Replace every control character in `text` by its picture (an escape as `␛`) or by `�`: a model must not move the
    cursor, or reverse the shown text."""
    return _UNPRINTABLE.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    number = ord(match[0])
    if number < 0x20:
        return chr(0x2400 + number)
    return "␡" if number == 0x7F else "\N{REPLACEMENT CHARACTER}"


@contextmanager
def single_keys(terminal: TextIO) -> Generator[None]:
    """Deliver keys typed at `terminal` one by one, without showing them; Ctrl-C is still a signal."""
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
