"""Vectors and scores of texts: requests to prompts, what the engine made of them, and that as JSON."""
