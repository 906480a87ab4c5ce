"""The quiet end of a program whose output nobody reads any more; the same function as in the workers."""

from workers.unread_output import EXIT_UNREAD, run_while_read

__all__ = ["EXIT_UNREAD", "run_while_read"]
