"""Formats of tool calls: which one a model writes, a streaming parser for each, and grammars that force calls."""
