"""Completions: `/v1/completions` and the rendering of its prompts."""
