"""Settings and their sources, allowed hosts, and where a model lies."""
