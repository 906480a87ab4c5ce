"""The options of the server, one file for each group that `--help` shows."""
