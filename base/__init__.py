"""Leaves that the server, the engine and the workers share: errors, paths, child processes, files, logs, memory."""
