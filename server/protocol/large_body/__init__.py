"""Reading a large body in a process of its own, so that the event loop goes on."""
