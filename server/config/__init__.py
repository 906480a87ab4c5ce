"""Options in groups, their sources and their checks."""
