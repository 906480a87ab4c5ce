"""Former place of the command line, for scripts that were installed before it moved to `server/cli/`."""
