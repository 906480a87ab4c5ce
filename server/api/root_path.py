"""A server that a proxy shows below a path of its own, such as `/llm`.

Some proxies cut that path off before they ask, others leave it: both are answered, and probes that come past the proxy.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from oarlock.engine.errors import StartupError


class RootPath:
    """Cuts the path off, outside of everything that decides by paths: there is one name for each route."""

    def __init__(self, path: str, app: ASGIApp, routes: Iterable[str]) -> None:
        """`path`: with a slash at its beginning and none at its end. `routes`: of `app`, such as `/v1/models/{model}`.

        Raises `StartupError` when a request could mean two routes.
        """
        for route in routes:
            fixed, parameter, _ = route.partition("{")
            if fixed == path or fixed.startswith(f"{path}/") or (parameter and path.startswith(fixed)):
                raise StartupError(
                    f"--root-path {path} is where the server's own route {route} is.",
                    "Choose a path that no route begins with: --root-path /llm",
                )
        self._path = path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope.get("path", "")
        if asked == self._path:  # links of the web page are relative: they want the slash behind it
            await RedirectResponse(f"{self._path}/", 308)(scope, receive, send)
            return
        if asked.startswith(f"{self._path}/"):
            scope = {name: value for name, value in scope.items() if name != "raw_path"}
            scope["path"] = asked.removeprefix(self._path)
        await self._app(scope, receive, send)
