"""Name by which scripts call the command that were installed before it moved to `server/cli/`."""

from oarlock.server.cli.main import main

__all__ = ["main"]
