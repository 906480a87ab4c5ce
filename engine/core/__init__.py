"""The engine process and its loop."""
