"""The engine process, its loop, and one step."""
