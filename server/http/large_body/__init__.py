"""Reading large bodies in a process of its own, so that the event loop is not blocked."""
