"""Settings and their sources, API keys, allowed hosts, and where a model lies."""
