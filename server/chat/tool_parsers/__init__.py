"""Tool-call formats: the format that a model writes, a streaming parser for each, and grammars that force calls."""
