"""How the server starts Python processes: as the floors below it do."""

from workers.python_child import start_python

__all__ = ["start_python"]
