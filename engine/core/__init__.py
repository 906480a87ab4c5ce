"""The engine's process, its event loop, and its steps."""
