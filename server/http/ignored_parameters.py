"""Request parameters without effect: named in a response header, counted, and logged once for each client.

Some are known as soon as a body is parsed: no schema declares them, or the schema marks them as without effect. Others
are known only when the request meets the model, such as a reasoning effort that the chat template does not read. Both
kinds are reported in the same way, and refused in the same way with `--strict-parameters`.
"""

import re
from collections import Counter
from collections.abc import Sequence

from oarlock.engine.errors import RequestError
from oarlock.server.observability.logs import event, logger

HEADER = "X-Ignored-Parameters"
MAX_SHOWN = 32  # names in one header, error or log line
_MAX_NAME = 64  # characters of a name in messages
_MAX_NAMES = 1024  # names that are counted separately
_OTHER = "other"
_MAX_CLIENTS = 256
_MAX_NAMES_OF_CLIENT = 256
_MAX_AGENT = 64  # characters of a User-Agent
_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logger("requests")


class IgnoredParameters:
    """The parameters that were ignored since the start, by name, and the clients whose log line was written.

    Clients choose these names and their own, so the number of stored entries is limited.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # name -> requests; further names after `_MAX_NAMES` count as `other`
        self._logged: dict[tuple[str, str], set[str]] = {}  # (label, agent) -> names, the least recent client first

    def report(self, names: Sequence[str], label: str | None = None, agent: str | None = None) -> None:
        """Count `names`, and log the names that are new for this client.

        `label`: of the API key. `agent`: the User-Agent header.
        """
        cut = [name[: _MAX_NAME + 1] for name in names]
        for name in cut:
            is_counted = name in self.counts or len(self.counts) < _MAX_NAMES
            self.counts[name if is_counted else _OTHER] += 1
        if cut:
            self._log_new(cut, (label or "", (agent or "")[:_MAX_AGENT]))

    def _log_new(self, names: Sequence[str], client: tuple[str, str]) -> None:
        logged = self._logged.pop(client, None) or set()
        self._logged[client] = logged
        if len(self._logged) > _MAX_CLIENTS:
            del self._logged[next(iter(self._logged))]
        new = [name for name in names if name not in logged][: _MAX_NAMES_OF_CLIENT - len(logged)]
        if new:
            logged.update(new)
            label, agent = client
            shown = ",".join(_shown(new))
            _log.info(event("parameters_ignored", client=label or None, agent=agent or None, names=shown))


def refuse(names: Sequence[str]) -> None:
    """Raise `RequestError` if there is a name. Used with `--strict-parameters`."""
    if names:
        shown = [name[:_MAX_NAME] for name in names[:MAX_SHOWN]]
        message = (
            f"These parameters are unknown or have no effect: {', '.join(shown)}. This server refuses them "
            "(--strict-parameters). Leave them out."
        )
        raise RequestError(message, shown[0], "unknown_parameter")


def with_ignored(headers: dict[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return `headers` with `names` added to the report of ignored parameters."""
    if not names:
        return headers
    values = [", ".join(_shown(names)), headers.get(HEADER, "")]
    return headers | {HEADER: ", ".join(filter(None, values))}


def _shown(names: Sequence[str]) -> list[str]:
    """Return a limited number of names that are safe in headers, and the number of further names as `+N`."""
    shown = [name for name in names if _HEADER_SAFE.fullmatch(name)][:MAX_SHOWN]
    hidden = len(names) - len(shown)
    return [*shown, f"+{hidden}"] if hidden else shown
